"""Ranks as processes, of which one got a step more than the other when their router was killed: another goes on."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from funitel.proto import generate_pb2 as pb
from funitel.proto import wire
from funitel.proto.step import Capability
from funitel.proto.takeover import wire as takeover_wire
from funitel.proto.takeover.state import NumberedCall, SequenceOutputs, TakeOverState, join_outputs
from funitel.router.connect import connect
from funitel.router.replica_set.replica_set import ReplicaSet
from funitel.router.settings import RouterSettings
from funitel.router.shard_client.shards import Shards
from funitel.router.telemetry.metrics import Metrics
from funitel_testing.dying_router import NUM_ANSWERED, decode, prefill, sequences, stub_of, warmup
from funitel_testing.outputs import key_of
from funitel_testing.servers import wait_until
from funitel_testing.shards import shards
from funitel_testing.takeovers.routers import abandon
from funitel_testing.tiny import save_tiny

NUM_BEGUN = NUM_ANSWERED + 3
NUM_STEPS = NUM_BEGUN + 4
SECONDS = 60.0

KINDS: dict[str, tuple[str, ...]] = {"tensor parallel": (), "stages": ("--partition", "0;1")}


class Ranks:
    """The ranks of a replica, as a router calls them."""

    def __init__(self, socket: Path) -> None:
        self.stubs = [stub_of(str(socket), rank) for rank in range(2)]

    async def all(self, name: str, request: Any) -> list[Any]:
        """The answers of all ranks to a call."""
        return list(await asyncio.gather(*(getattr(stub, name)(request, timeout=SECONDS) for stub in self.stubs)))

    async def ready(self) -> None:
        """Wait until both answer."""
        for stub in self.stubs:
            await stub.Health(pb.HealthRequest(), wait_for_ready=True, timeout=SECONDS)

    async def wait_until_busy(self, rank: int) -> None:
        """Wait until a rank is in a step, in which it waits for the other."""
        for _ in range(6000):
            if (await self.stubs[rank].Health(pb.HealthRequest())).busy_ns:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"rank {rank} is in no step")

    async def outputs(self) -> dict[str, SequenceOutputs]:
        """All that is recorded."""
        parts = map(takeover_wire.decode_outputs, await self.all("Outputs", pb.OutputsRequest()))
        return join_outputs(each for part in parts for each in part)

    async def look(self) -> list[TakeOverState]:
        """What ranks have begun; at once, also where one waits for the other."""
        request = takeover_wire.encode_take_over(pb.WarmupRequest(), only_looks=True)
        return list(map(takeover_wire.decode_state, await self.all("TakeOver", request)))

    async def take_over(self, looked: list[TakeOverState]) -> list[TakeOverState]:
        """Take over, with the calls that either rank lacks."""
        begun: dict[int, NumberedCall] = {call.step_seq: call for state in looked for call in state.latest}
        missing = [[begun[seq] for seq in sorted(begun) if seq > state.last_step_seq] for state in looked]
        answers = await asyncio.gather(
            *(
                stub.TakeOver(takeover_wire.encode_take_over(warmup(), calls), timeout=SECONDS)
                for stub, calls in zip(self.stubs, missing, strict=True)
            )
        )
        return list(map(takeover_wire.decode_state, answers))

    async def undisturbed(self) -> dict[str, SequenceOutputs]:
        """What the sequences bring in so many steps of one router."""
        await self.all("ClearCache", pb.ClearCacheRequest())
        await self.all("Warmup", warmup())
        await self.all("Prefill", prefill(1))
        for number in range(2, NUM_STEPS + 1):
            await self.all("Decode", decode(number))
        found = await self.outputs()
        await self.all("ReleaseOutputs", takeover_wire.encode_release(found))
        return found


def ids_of(outputs: SequenceOutputs) -> list[int]:
    """Its tokens."""
    return [token_id for each in outputs.steps for token_id in each.generation.tokens.ids]


def die(socket: Path, last_rank: int) -> None:
    """Run a router until it has sent a step to one rank alone, and kill it."""
    command = [sys.executable, "-m", "funitel_testing.dying_router", str(socket), str(last_rank)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as router:
        assert router.stdout is not None
        assert router.stdout.readline() == "sent\n"
        router.kill()


@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_are_those_of_an_undisturbed_run(kind: str, tmp_path: Path) -> None:
    model, socket = save_tiny("llama", tmp_path / "model"), tmp_path / "shard"
    with shards(model, socket, 2, "--block-size", "4", *KINDS[kind]):
        wait_until(lambda: all(Path(f"{socket}-{rank}").exists() for rank in range(2)), SECONDS)
        ranks = Ranks(socket)
        await ranks.ready()
        infos = map(wire.decode_info, await ranks.all("Info", pb.InfoRequest()))
        assert all({Capability.OUTPUTS, Capability.TAKE_OVER} <= info.capabilities for info in infos)
        expected = await ranks.undisturbed()
        assert {key: len(ids_of(each)) for key, each in expected.items()} == {key_of(i): NUM_STEPS for i in (1, 2, 3)}

        for last_rank in range(2):
            await asyncio.to_thread(die, socket, last_rank)
            await ranks.wait_until_busy(last_rank)
            looked = await ranks.look()
            begun = [NUM_BEGUN - 1, NUM_BEGUN - 1]
            begun[last_rank] = NUM_BEGUN
            assert [state.last_step_seq for state in looked] == begun
            one, other = await ranks.take_over(looked)
            assert (one.last_step_seq, one.batches) == (other.last_step_seq, other.batches)
            lengths = [len(each.input_ids) + NUM_BEGUN for each in sequences()]
            assert [row.num_known for row in one.batches[0].rows] == lengths
            assert {key: len(ids_of(each)) for key, each in (await ranks.outputs()).items()} == {
                key: NUM_BEGUN for key in expected
            }
            for number in range(1, NUM_STEPS - NUM_BEGUN + 1):
                await ranks.all("Decode", decode(one.last_step_seq + number))
            found = await ranks.outputs()
            assert {key: ids_of(each) for key, each in found.items()} == {
                key: ids_of(each) for key, each in expected.items()
            }
            assert [each.mirostat_mu for each in found.values()] == [expected[key].mirostat_mu for key in found]
            await ranks.all("ReleaseOutputs", takeover_wire.encode_release(found))


async def test_a_router_that_is_refused_may_clear_ranks_of_which_one_waited(tmp_path: Path) -> None:
    model, socket = save_tiny("llama", tmp_path / "model"), tmp_path / "shard"
    with shards(model, socket, 2, "--block-size", "4"):
        wait_until(lambda: all(Path(f"{socket}-{rank}").exists() for rank in range(2)), SECONDS)
        ranks = Ranks(socket)
        await ranks.ready()
        await asyncio.to_thread(die, socket, 1)
        await ranks.wait_until_busy(1)
        looked = await ranks.look()
        missing = [call for call in looked[1].latest if call.step_seq > looked[0].last_step_seq]
        calls = [takeover_wire.encode_take_over(pb.WarmupRequest(), each) for each in (missing, [])]
        answers = await asyncio.gather(
            *(stub.TakeOver(call, timeout=SECONDS) for stub, call in zip(ranks.stubs, calls, strict=True)),
            return_exceptions=True,
        )
        refusals = [each.details() for each in answers if isinstance(each, grpc.aio.AioRpcError)]
        assert refusals == 2 * ["warmup: the last one here was another"]
        assert {key: len(ids_of(each)) for key, each in (await ranks.outputs()).items()} == {
            key_of(i): NUM_BEGUN for i in (1, 2, 3)
        }
        assert await ranks.undisturbed()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_router_with_other_settings_waits_for_no_rank(kind: str, tmp_path: Path) -> None:
    model, socket = save_tiny("llama", tmp_path / "model"), tmp_path / "shard"
    with shards(model, socket, 2, "--block-size", "4", *KINDS[kind]):
        wait_until(lambda: all(Path(f"{socket}-{rank}").exists() for rank in range(2)), SECONDS)
        ranks = Ranks(socket)
        await ranks.ready()
        await asyncio.to_thread(die, socket, 1)
        await ranks.wait_until_busy(1)
        left = await Shards.connect(f"unix://{socket}-0", keeps=True)
        await asyncio.wait_for(left.settle(), SECONDS)
        await left.close()
        await asyncio.to_thread(die, socket, 1)
        await ranks.wait_until_busy(1)
        settings = RouterSettings(master_shard_uds_path=f"{socket}-0", keeper="unused", lora_folder=str(tmp_path))
        fleet = await asyncio.wait_for(connect(settings, Metrics()), SECONDS)
        assert isinstance(fleet, ReplicaSet)
        assert not fleet._serving[0].engine.held
        await abandon(fleet)
