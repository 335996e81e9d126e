"""The step socket of a shard, as a router speaks to it: answers, statuses, order, spans, the end of either side."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from funitel.model_server.executor.executor import Executor
from funitel.model_server.rpc.compute_threads import InlineRunner, ThreadedRunner
from funitel.model_server.rpc.dispatcher import Dispatcher
from funitel.model_server.rpc.step_socket_server import StepServer
from funitel.proto import generate_pb2 as pb
from funitel.proto import wire
from funitel.proto.errors import FunitelError, ShardFailed, StartupError
from funitel.proto.step_socket import OK, Frame, Method, encode_context
from funitel_testing.executors import load_executor, num_sequences, start
from funitel_testing.spans import recording
from funitel_testing.step_peer import StepPeer
from funitel_testing.tiny import save_tiny

PROMPT = list(range(40, 60))
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return load_executor(save_tiny("llama", tmp_path_factory.mktemp("tiny")))


class Router(StepPeer):
    """The other end: sends frames."""

    def prefill(self, call_id: int, request_id: int, step_seq: int, context: bytes = b"") -> None:
        batch = wire.encode_batch(request_id, [start(request_id, PROMPT)], 4)
        payload = wire.encode_prefill(batch, None, (), step_seq).SerializeToString()
        self.send(Frame(call_id, Method.PREFILL, payload, context))


class Shard:
    """A served executor, the path of its step socket, and the failures that ended it."""

    def __init__(self, calls: Dispatcher, server: StepServer, path: str, failures: list[FunitelError]) -> None:
        self.calls = calls
        self.server = server
        self.path = path
        self.failures = failures

    async def connect(self) -> Router:
        _, router = await asyncio.get_running_loop().create_unix_connection(Router, self.path)
        return router


@pytest.fixture(params=["own lane", "lane beside"])
async def shard(request: pytest.FixtureRequest, executor: Executor, tmp_path: Path) -> AsyncIterator[Shard]:
    executor.clear()
    with ThreadPoolExecutor(1) as compute, ThreadPoolExecutor(1) as answers:
        failures: list[FunitelError] = []
        path = f"{tmp_path}/shard-0.steps"
        lane = InlineRunner() if request.param == "own lane" else ThreadedRunner(compute, answers)
        calls = Dispatcher(executor, 1, lane, asyncio.get_running_loop(), failures.append)
        server = StepServer(calls, path)
        await server.start()
        yield Shard(calls, server, path, failures)
        await server.stop()


async def test_every_method_is_answered(shard: Shard) -> None:
    router = await shard.connect()
    router.prefill(1, 1, 1)
    router.prefill(2, 2, 2)
    first, second = [pb.PrefillResponse.FromString((await router.answer()).payload) for _ in range(2)]
    assert [list(answer.batch.request_ids) for answer in (first, second)] == [[1], [2]]
    cached = [wire.decode_cached(answer.batch) for answer in (first, second)]
    router.send(Frame(3, Method.DECODE, wire.encode_decode(cached, (), 3).SerializeToString()))
    router.send(
        Frame(
            4, Method.FILTER_BATCH, pb.FilterBatchRequest(batch_id=1, request_ids=[2], step_seq=4).SerializeToString()
        )
    )
    router.send(Frame(5, Method.CLEAR_CACHE, pb.ClearCacheRequest(id=1, step_seq=5).SerializeToString()))
    decoded, filtered, cleared = [await router.answer() for _ in range(3)]
    assert [frame.call_id for frame in (decoded, filtered, cleared)] == [3, 4, 5]
    assert {frame.code for frame in (decoded, filtered, cleared)} == {OK}
    generations = wire.decode_result(pb.DecodeResponse.FromString(decoded.payload)).generations
    assert [generation.request_id for generation in generations] == [1, 2]
    assert list(pb.FilterBatchResponse.FromString(filtered.payload).batch.request_ids) == [2]


async def test_calls_of_two_routers_run_in_the_order_of_their_numbers(shard: Shard) -> None:
    one, two = await shard.connect(), await shard.connect()
    two.prefill(7, 2, 2)
    await asyncio.sleep(0.05)
    assert two.answers.empty()
    one.prefill(7, 1, 1)
    assert (await one.answer()).code == (await two.answer()).code == OK


@pytest.mark.parametrize(
    ("frame", "status", "details"),
    [
        (Frame(9, 77, b""), grpc.StatusCode.INVALID_ARGUMENT, "the step socket has no method 77"),
        (Frame(9, Method.DECODE, b"\xff"), grpc.StatusCode.INVALID_ARGUMENT, "the payload is no message of its method"),
        (Frame(9, Method.DECODE, b"", b"traced"), grpc.StatusCode.INVALID_ARGUMENT, "the context is not JSON"),
        (Frame(9, Method.DECODE, b"", b"\xff{}"), grpc.StatusCode.INVALID_ARGUMENT, "the context is not JSON"),
        (Frame(9, Method.DECODE, b"", b"[" * 100_000), grpc.StatusCode.INVALID_ARGUMENT, "the context is not JSON"),
        (Frame(9, Method.DECODE, b"", b"[1]"), grpc.StatusCode.INVALID_ARGUMENT, "the context is no object of strings"),
        (
            Frame(9, Method.FILTER_BATCH, pb.FilterBatchRequest(batch_id=99, request_ids=[1]).SerializeToString()),
            grpc.StatusCode.INTERNAL,
            "Batch ID 99 not found in cache",
        ),
    ],
)
async def test_failures_have_grpcs_statuses(shard: Shard, frame: Frame, status: grpc.StatusCode, details: str) -> None:
    router = await shard.connect()
    router.send(frame)
    assert await router.answer() == Frame(9, status.value[0], details.encode())
    router.prefill(1, 1, 1)
    assert (await router.answer()).code == OK


async def test_a_rank_that_lost_the_others_says_so_and_gives_up(
    shard: Shard, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*arguments: object) -> None:
        raise ShardFailed("rank 0 lost the other ranks")

    monkeypatch.setattr(executor.runner, "decoder", lose)
    router = await shard.connect()
    router.prefill(1, 1, 1)
    assert (await router.answer()).payload == b"rank 0 lost the other ranks"
    assert [failure.message for failure in shard.failures] == ["rank 0 lost the other ranks"]


async def test_a_router_that_hangs_up_does_not_stop_its_calls(shard: Shard, executor: Executor) -> None:
    leaver, other = await shard.connect(), await shard.connect()
    leaver.prefill(1, 1, 1)
    leaver.close()
    await asyncio.wait_for(leaver.lost.wait(), 10)
    other.prefill(2, 2, 2)
    assert (await other.answer()).code == OK
    assert num_sequences(executor) == 2


async def test_stopping_hangs_up_and_leaves_no_file(shard: Shard) -> None:
    router = await shard.connect()
    router.prefill(1, 1, 1)
    await router.answer()
    await shard.server.stop()
    await asyncio.wait_for(router.lost.wait(), 10)
    assert not await asyncio.to_thread(Path(shard.path).exists)


async def test_a_path_that_cannot_be_is_one_clear_line(shard: Shard, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot listen on .*/nowhere/s"):
        await StepServer(shard.calls, f"{tmp_path}/nowhere/s").start()


async def test_calls_are_spans_below_the_routers(shard: Shard) -> None:
    with recording() as spans:
        router = await shard.connect()
        context = encode_context({"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"})
        router.prefill(1, 1, 1, context)
        router.prefill(2, 2, 1, context)
        await router.answer()
        await router.answer()
    refused, step = sorted(spans.all, key=lambda span: span.status.is_ok)
    assert {span.name for span in (refused, step)} == {"/generate.v3.TextGenerationService/Prefill"}
    assert {f"{span.context.trace_id:032x}" for span in (refused, step)} == {TRACE}
    assert step.attributes is not None
    assert step.attributes["rpc.method"] == "Prefill"
    assert step.attributes["rpc.grpc.status_code"] == 0
    assert step.attributes["funitel.step.rows"] == 1
    assert not refused.status.is_ok
    assert refused.status.description == "InvalidRequest"


async def test_a_step_is_a_span_below_each_that_it_is_made_for(shard: Shard) -> None:
    named = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "traceparent-1": f"00-{'1' * 32}-{'2' * 16}-01"}
    with recording() as spans:
        router = await shard.connect()
        router.prefill(1, 1, 1, encode_context(named))
        router.prefill(2, 2, 2)  # for nobody who is traced
        await router.answer()
        await router.answer()
    assert {f"{span.context.trace_id:032x}" for span in spans.all} == {TRACE, "1" * 32}
    assert len(spans.all) == 2
