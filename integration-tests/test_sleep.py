"""Shards as processes that sleep and wake up by the calls of the control plane: memory falls, text stays."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from funitel.launcher.executors.shard_calls import sleep, wake
from funitel.proto import generate_pb2 as pb
from funitel.proto import wire
from funitel.proto.errors import FunitelError
from funitel.proto.generate_pb2_grpc import TextGenerationServiceStub
from funitel.proto.step import Capability, WarmupLimits
from funitel_testing.executors import start
from funitel_testing.shards import shards
from funitel_testing.tiny import save_tiny

PROMPT = list(range(40, 60))
SIZE = 2
STEP_SECONDS = 60.0


class Replica:
    """The ranks of a replica, all of which get every call."""

    def __init__(self, socket: Path) -> None:
        self.addresses = [f"unix://{socket}-{rank}" for rank in range(SIZE)]
        self._channels = [grpc.aio.insecure_channel(f"unix:{socket}-{rank}") for rank in range(SIZE)]
        self._stubs: list[Any] = [TextGenerationServiceStub(channel) for channel in self._channels]  # type: ignore[no-untyped-call]

    async def call(self, name: str, request: Any) -> list[Any]:
        return list(await asyncio.gather(*(getattr(stub, name)(request, timeout=STEP_SECONDS) for stub in self._stubs)))

    async def until_ready(self) -> None:
        for _ in range(600):
            try:
                await self.call("Health", pb.HealthRequest())
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1)
            else:
                return
        raise AssertionError("the shards do not answer")

    async def text(self, num_tokens: int) -> list[int]:
        """Warm up, and the first tokens behind the prompt, as a router would ask for them."""
        batch = wire.encode_batch(1, [start(1, PROMPT, num_tokens)], 4)
        limits = WarmupLimits(max_prefill_tokens=64, max_batch_total_tokens=2000)
        await self.call("ClearCache", pb.ClearCacheRequest())
        await self.call("Warmup", wire.encode_warmup(batch, limits))
        answers = await self.call("Prefill", wire.encode_prefill(batch, None, (), 1))
        found: list[int] = []
        for seq in range(2, num_tokens + 2):
            for answer in answers:
                found += [i for each in wire.decode_result(answer).generations for i in each.tokens.ids]
            if not answers[0].HasField("batch"):
                break
            cached = [wire.decode_cached(answers[0].batch)]
            answers = await self.call("Decode", wire.encode_decode(cached, (), seq))
        return found

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


async def test_all_ranks_of_a_replica_sleep_and_wake_up(tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "model")
    socket = tmp_path / "shard"
    with shards(model, socket, SIZE, "--block-size", "4"):
        replica = Replica(socket)
        await replica.until_ready()
        infos = [wire.decode_info(info) for info in await replica.call("Info", pb.InfoRequest())]
        assert all(Capability.SLEEP in info.capabilities for info in infos)
        expected = await replica.text(10)
        assert len(expected) == 10
        await sleep(replica.addresses[:1])  # rank 0 names the others
        for name, request in (("Warmup", pb.WarmupRequest()), ("Decode", pb.DecodeRequest())):
            with pytest.raises(grpc.aio.AioRpcError, match="the shard sleeps: Wake comes first") as refused:
                await replica.call(name, request)
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        await wake(replica.addresses[:1])
        assert await replica.text(10) == expected

        batch = wire.encode_batch(2, [start(2, PROMPT, 5)], 4)
        await replica.call("Prefill", wire.encode_prefill(batch, None, (), None))
        with pytest.raises(FunitelError, match="shard rank 0: the shard cannot sleep: 1 sequences are here"):
            await sleep(replica.addresses)
        await replica.call("ClearCache", pb.ClearCacheRequest())
        await sleep(replica.addresses)
        await wake(replica.addresses)
        assert await replica.text(10) == expected
        await replica.close()
