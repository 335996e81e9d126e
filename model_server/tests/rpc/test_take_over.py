"""Another router takes over from one that has died: what it is told, what it is refused, and that tokens go on."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
import pytest

from funitel.model_server.executor.async_sampling import AsyncSampling
from funitel.model_server.executor.executor import Executor
from funitel.model_server.gpu_sampling.ops import TorchMaths
from funitel.model_server.rpc.dispatcher import Dispatcher
from funitel.model_server.rpc.serve import CallServer
from funitel.model_server.rpc.servicer import Servicer, make_server
from funitel.proto import generate_pb2 as pb
from funitel.proto import generate_pb2_grpc, wire
from funitel.proto.step import CachedBatch, SequenceStart, ShardInfo, WarmupLimits
from funitel.proto.step_socket import Frame, Method
from funitel.proto.takeover import wire as takeover_wire
from funitel.proto.takeover.state import HeldBatch, NumberedCall, SequenceOutputs, TakeOverState, join_outputs
from funitel_testing.executors import BLOCK_SIZE, ids_of, load_executor, num_sequences, run_alone, start
from funitel_testing.outputs import key_of, keyed
from funitel_testing.step_peer import StepPeer
from funitel_testing.tiny import save_tiny

PROMPT = list(range(40, 60))
WARMUP = wire.encode_warmup(
    wire.encode_batch(1, [start(0, PROMPT)], BLOCK_SIZE),
    WarmupLimits(max_prefill_tokens=64, max_batch_total_tokens=2000),
)
ROWS = {each: keyed(start(each, PROMPT[each:], 12, do_sample=True, seed=each)) for each in (1, 2)}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return load_executor(save_tiny("llama", tmp_path_factory.mktemp("tiny")))


@pytest.fixture(params=["host", "device"])
def executor(request: pytest.FixtureRequest, loaded: Executor) -> Executor:
    """Sampled on the host, one thread for all; or ahead, with threads of their own for steps and answers."""
    runner = loaded.runner
    sampling = partial(AsyncSampling, maths=TorchMaths())
    parts = loaded.spec, runner.decoder, runner.pools, loaded.codec, loaded.parallel, loaded.options
    return Executor(*parts, *([sampling] if request.param == "device" else []))


class Shard:
    """A served executor, a stub to it, and its step socket."""

    def __init__(self, calls: Dispatcher, path: str, stub: generate_pb2_grpc.TextGenerationServiceStub) -> None:
        self.calls = calls
        self.path = path
        self.stub = stub

    async def connect(self) -> StepPeer:
        _, router = await asyncio.get_running_loop().create_unix_connection(StepPeer, self.path)
        return router

    async def look(self) -> TakeOverState:
        return takeover_wire.decode_state(
            await self.stub.TakeOver(takeover_wire.encode_take_over(pb.WarmupRequest(), only_looks=True))
        )

    async def take_over(
        self, missing: tuple[NumberedCall, ...] = (), warmup: pb.WarmupRequest = WARMUP
    ) -> TakeOverState:
        return takeover_wire.decode_state(
            await self.stub.TakeOver(takeover_wire.encode_take_over(warmup, missing), timeout=60)
        )

    async def refused(self, missing: tuple[NumberedCall, ...] = (), warmup: pb.WarmupRequest = WARMUP) -> str:
        """What the shard says to a router that it refuses."""
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await self.take_over(missing, warmup)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        return refused.value.details() or ""

    async def outputs(self) -> dict[str, SequenceOutputs]:
        return join_outputs(takeover_wire.decode_outputs(await self.stub.Outputs(pb.OutputsRequest())))

    async def decode(self, batch_id: int, step_seq: int) -> list[int]:
        """The tokens of one more step."""
        answer = await self.stub.Decode(wire.encode_decode([CachedBatch(batch_id, ())], (), step_seq))
        return [token_id for each in wire.decode_result(answer).generations for token_id in each.tokens.ids]


@pytest.fixture
async def shard(executor: Executor, tmp_path: Path) -> AsyncIterator[Shard]:
    address, path = f"unix:{tmp_path}/shard-0", f"{tmp_path}/shard-0.steps"
    with ThreadPoolExecutor(1) as compute:
        server = CallServer(executor, 1, path, compute, lambda _: None)
        await server.start()
        grpc_server = make_server(Servicer(executor, ShardInfo(), [], server.dispatcher), address)
        await grpc_server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            stub = generate_pb2_grpc.TextGenerationServiceStub(channel)  # type: ignore[no-untyped-call]
            await stub.Warmup(WARMUP)
            yield Shard(server.dispatcher, path, stub)
        await grpc_server.stop(None)
        await server.stop()


def prefill(batch_id: int, row: SequenceStart, step_seq: int) -> pb.PrefillRequest:
    return wire.encode_prefill(wire.encode_batch(batch_id, [row], BLOCK_SIZE), None, (), step_seq)


def decode(batch_id: int, step_seq: int) -> pb.DecodeRequest:
    return wire.encode_decode([CachedBatch(batch_id, ())], (), step_seq)


def ids(outputs: SequenceOutputs) -> list[int]:
    return [token_id for each in outputs.steps for token_id in each.generation.tokens.ids]


def facts(batches: tuple[HeldBatch, ...]) -> list[tuple[int, int, int, int]]:
    return [(batch.id, row.request_id, row.num_computed, row.num_known) for batch in batches for row in batch.rows]


async def test_rows_of_a_router_that_died_go_on_with_the_tokens_of_an_undisturbed_run(
    shard: Shard, loaded: Executor
) -> None:
    expected = ids_of(run_alone(loaded, ROWS[1]))
    router = await shard.connect()
    router.send(Frame(1, Method.PREFILL, prefill(1, ROWS[1], 1).SerializeToString()))
    router.send(Frame(2, Method.DECODE, decode(1, 2).SerializeToString()))
    router.send(Frame(3, Method.DECODE, decode(1, 4).SerializeToString()))  # waits for 3, which will not come
    await router.answer()
    router.close()
    looked = await shard.look()
    found = await shard.take_over()

    assert [each.step_seq for each in looked.latest] == list(range(1, looked.last_step_seq + 1))
    assert found.warmup is not None
    assert found.warmup.pool_tokens == 2000
    (row,) = found.batches[0].rows
    known = ids((await shard.outputs())[key_of(1)])
    assert (row.output_key, row.num_computed, row.num_known) == (key_of(1), 18 + len(known), 19 + len(known))
    more = [await shard.decode(1, found.last_step_seq + 1 + number) for number in range(3)]
    assert known + [token_id for (token_id,) in more] == expected[: len(known) + 3]
    assert ids((await shard.outputs())[key_of(1)]) == expected[: len(known) + 3]


async def test_calls_of_the_earlier_router_that_are_read_late_are_refused(shard: Shard) -> None:
    await shard.stub.Prefill(prefill(1, ROWS[1], 1))
    await shard.look()
    late = await shard.connect()
    late.send(Frame(1, Method.DECODE, decode(1, 2).SerializeToString()))
    assert b"another router has looked" in (await late.answer()).payload
    found = await shard.take_over()
    late.send(Frame(2, Method.DECODE, decode(1, 2).SerializeToString()))
    assert b"was executed already" in (await late.answer()).payload

    assert facts(found.batches) == [(1, 1, 19, 20)]
    assert await shard.decode(1, found.last_step_seq + 1)


async def test_missing_calls_are_made_and_their_outputs_recorded(shard: Shard, loaded: Executor) -> None:
    await shard.stub.Prefill(prefill(1, ROWS[1], 1))
    calls = [
        NumberedCall(1, "Prefill", prefill(1, ROWS[1], 1).SerializeToString()),  # made already
        NumberedCall(2, "Decode", decode(1, 2).SerializeToString()),
        NumberedCall(3, "Prefill", prefill(2, ROWS[2], 3).SerializeToString()),
        NumberedCall(4, "ClearCache", pb.ClearCacheRequest(id=1, step_seq=4).SerializeToString()),
    ]
    found = await shard.take_over(tuple(calls))

    assert facts(found.batches) == [(2, 2, 18, 19)]
    assert (await shard.look()).latest == tuple(calls)
    outputs = await shard.outputs()
    assert ids(outputs[key_of(1)]) == ids_of(run_alone(loaded, ROWS[1]))[:2]
    assert len(ids(outputs[key_of(2)])) == 1


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (NumberedCall(3, "Decode", decode(1, 3).SerializeToString()), "are not those from step_seq 2 on"),
        (NumberedCall(2, "Sleep", b""), "call 2 is no message of 'Sleep'"),
        (NumberedCall(2, "Decode", b"\xff"), "call 2 is no message of 'Decode'"),
        (NumberedCall(2, "Decode", decode(1, 3).SerializeToString()), "call 2 has another number"),
        (NumberedCall(2, "Decode", b""), "call 2 has another number"),
    ],
)
async def test_calls_that_cannot_be_made_are_refused_and_none_begins(
    shard: Shard, call: NumberedCall, reason: str
) -> None:
    await shard.stub.Prefill(prefill(1, ROWS[1], 1))
    assert reason in await shard.refused((call,))

    assert (await shard.look()).last_step_seq == 1
    assert facts((await shard.take_over()).batches) == [(1, 1, 19, 20)]


async def test_another_warmup_is_refused_after_the_missing_calls_were_made(shard: Shard) -> None:
    await shard.stub.Prefill(prefill(1, ROWS[1], 1))
    other = pb.WarmupRequest()
    other.CopyFrom(WARMUP)
    other.max_prefill_tokens += 1
    missing = (NumberedCall(2, "Decode", decode(1, 2).SerializeToString()),)
    assert await shard.refused(missing, other) == "warmup: the last one here was another"

    assert len(ids((await shard.outputs())[key_of(1)])) == 2
    await shard.stub.ClearCache(pb.ClearCacheRequest())
    await shard.stub.Prefill(prefill(1, ROWS[1], 1))


async def test_a_shard_that_sleeps_or_lacks_a_warmup_is_not_taken_over(shard: Shard) -> None:
    await shard.stub.Sleep(pb.SleepRequest(level=1))
    reason = "warmup: there was none here since the shard was started or slept"
    assert await shard.refused() == reason
    await shard.stub.Wake(pb.WakeRequest())
    assert await shard.refused() == reason
    await shard.stub.Warmup(WARMUP)
    assert (await shard.take_over()).batches == ()


async def test_rows_beside_a_step_that_failed_are_not_taken_over(
    shard: Shard, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*arguments: object) -> None:
        raise RuntimeError("no more")

    await shard.stub.Prefill(prefill(1, ROWS[1], 1))
    with monkeypatch.context() as patch:
        patch.setattr(executor.runner, "decoder", explode)
        with pytest.raises(grpc.aio.AioRpcError):
            await shard.stub.Prefill(prefill(2, ROWS[2], 2))
    assert await shard.refused() == "a step has failed here: ClearCache comes next"
    await shard.stub.ClearCache(pb.ClearCacheRequest())
    assert (await shard.take_over()).batches == ()


async def test_released_outputs_are_forgotten(shard: Shard) -> None:
    await shard.stub.Prefill(prefill(1, ROWS[1], 1))
    await shard.stub.Prefill(prefill(2, ROWS[2], 2))
    await shard.stub.ReleaseOutputs(takeover_wire.encode_release([key_of(1), "unknown"]))

    assert list(await shard.outputs()) == [key_of(2)]


async def test_rows_stay_when_the_connection_of_their_router_ends(shard: Shard, executor: Executor) -> None:
    router = await shard.connect()
    router.send(Frame(1, Method.PREFILL, prefill(1, ROWS[1], 1).SerializeToString()))
    router.close()  # before the answer
    other = await shard.connect()
    other.send(Frame(1, Method.PREFILL, prefill(2, ROWS[2], 2).SerializeToString()))
    await other.answer()

    assert num_sequences(executor) == 2
    assert set(await shard.outputs()) == {key_of(1), key_of(2)}
