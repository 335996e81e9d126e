"""A router that has sent a step to one rank of two and is killed then: a program for tests, and what it sends."""

import asyncio
import sys
from typing import Any

import grpc

from funitel.proto import generate_pb2 as pb
from funitel.proto import wire
from funitel.proto.generate_pb2_grpc import TextGenerationServiceStub
from funitel.proto.step import CachedBatch, SequenceStart, WarmupLimits
from funitel.proto.step_socket import SUFFIX, Frame, Method
from funitel.proto.strategy import DecodingStrategy
from funitel_testing.executors import start
from funitel_testing.outputs import keyed
from funitel_testing.step_peer import StepPeer

PROMPT = list(range(40, 60))
BLOCK_SIZE = 4
NUM_ANSWERED = 4  # steps that are answered before the last ones are sent


def sequences() -> list[SequenceStart]:
    """What the router runs, in batch 1; none of it ends in the steps of a test."""
    kinds: list[dict[str, Any]] = [
        {},
        {"do_sample": True, "temperature": 1.5, "top_n_tokens": 2},
        {"strategy": DecodingStrategy(mirostat=2, mirostat_tau=3.0)},
    ]
    return [keyed(start(i, PROMPT[i:], 40, seed=i, **kind)) for i, kind in enumerate(kinds, 1)]


def warmup() -> pb.WarmupRequest:
    """The warm-up of every router of the test."""
    batch = wire.encode_batch(1, [start(0, PROMPT)], BLOCK_SIZE)
    return wire.encode_warmup(batch, WarmupLimits(max_prefill_tokens=64, max_batch_total_tokens=2000))


def prefill(step_seq: int | None) -> pb.PrefillRequest:
    """The first step."""
    return wire.encode_prefill(wire.encode_batch(1, sequences(), BLOCK_SIZE), None, (), step_seq)


def decode(step_seq: int | None) -> pb.DecodeRequest:
    """Each of the others."""
    return wire.encode_decode([CachedBatch(1, ())], (), step_seq)


def stub_of(socket: str, rank: int) -> Any:
    """A stub to a rank."""
    return TextGenerationServiceStub(grpc.aio.insecure_channel(f"unix:{socket}-{rank}"))  # type: ignore[no-untyped-call]


async def run(socket: str, last_rank: int) -> None:
    """Warm up, make steps, leave two that are not answered, send another one to `last_rank` alone, and wait."""
    stubs = [stub_of(socket, rank) for rank in range(2)]
    await asyncio.gather(*(stub.ClearCache(pb.ClearCacheRequest()) for stub in stubs))
    await asyncio.gather(*(stub.Warmup(warmup()) for stub in stubs))
    loop = asyncio.get_running_loop()
    peers = [(await loop.create_unix_connection(StepPeer, f"{socket}-{rank}{SUFFIX}"))[1] for rank in range(2)]
    for number in range(1, NUM_ANSWERED + 3):
        is_first = number == 1
        payload = (prefill(number) if is_first else decode(number)).SerializeToString()
        for peer in peers:
            peer.send(Frame(number, Method.PREFILL if is_first else Method.DECODE, payload))
        if number <= NUM_ANSWERED:
            await asyncio.gather(*(peer.answer() for peer in peers))
    number += 1
    peers[last_rank].send(Frame(number, Method.DECODE, decode(number).SerializeToString()))
    for _ in range(2):
        await peers[last_rank].answer()
    print("sent", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], int(sys.argv[2])))
