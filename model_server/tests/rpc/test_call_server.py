"""The calls of a shard on a CPU, as it is deployed: gRPC and the step socket, computed on a loop of their own."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from funitel.model_server.executor.executor import Executor
from funitel.model_server.rpc import step_socket_server
from funitel.model_server.rpc.serve import CallServer
from funitel.model_server.rpc.servicer import Servicer, make_server
from funitel.proto import generate_pb2 as pb
from funitel.proto import generate_pb2_grpc, wire
from funitel.proto.errors import FunitelError
from funitel.proto.step import Capability, ShardInfo
from funitel.proto.step_socket import OK, Frame, Method
from funitel_testing.executors import load_executor, start
from funitel_testing.step_peer import StepPeer
from funitel_testing.tiny import save_tiny

PROMPT = list(range(40, 60))
LONG_TEXT = "x" * (8 << 20)  # more than a socket takes at once


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Executor:
    return load_executor(save_tiny("llama", tmp_path_factory.mktemp("tiny")))


def prefill_request(request_id: int, step_seq: int) -> pb.PrefillRequest:
    batch = wire.encode_batch(request_id, [start(request_id, PROMPT)], 4)
    return wire.encode_prefill(batch, None, (), step_seq)


class Router(StepPeer):
    """The other end of the step socket."""

    def read(self, does: bool) -> None:
        """Read what comes, or leave it."""
        (self._transport.resume_reading if does else self._transport.pause_reading)()

    def prefill(self, step_seq: int) -> None:
        self.send(Frame(step_seq, Method.PREFILL, prefill_request(step_seq, step_seq).SerializeToString()))


class Shard:
    """A served executor, with a stub and the path of its step socket."""

    def __init__(
        self,
        executor: Executor,
        server: CallServer,
        stub: generate_pb2_grpc.TextGenerationServiceStub,
        path: str,
        failures: list[FunitelError],
    ) -> None:
        self.executor = executor
        self.server = server
        self.stub = stub
        self.path = path
        self.failures = failures

    async def connect(self) -> Router:
        _, router = await asyncio.get_running_loop().create_unix_connection(Router, self.path)
        return router

    async def prefill(self, step_seq: int) -> pb.PrefillResponse:
        """Over gRPC."""
        return await asyncio.wait_for(self.stub.Prefill(prefill_request(step_seq, step_seq)), 10)

    @contextmanager
    def blocked(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
        """Steps wait until the event is set, which it is at the end."""
        gate, compute = threading.Event(), self.executor.compute_prefill

        def blocked(*arguments: Any, **options: Any) -> Any:
            assert gate.wait(10)
            return compute(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(self.executor, "compute_prefill", blocked)
            try:
                yield gate
            finally:
                gate.set()

    def answer_with(self, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Answer ClearCache on the step socket with a long text."""
        steps = self.server._steps
        assert steps is not None

        def answer(request: object, reply: Any) -> None:
            reply.answer(pb.PrefillResponse(generations=[pb.Generation(tokens=pb.Tokens(texts=[text]))]))

        parse: Callable[[bytes], object] = pb.ClearCacheRequest.FromString
        monkeypatch.setitem(steps.methods, Method.CLEAR_CACHE, (Method.CLEAR_CACHE, parse, answer))


@pytest.fixture
async def shard(executor: Executor, tmp_path: Path) -> AsyncIterator[Shard]:
    executor.clear()
    address, path = f"unix:{tmp_path}/shard-0", f"{tmp_path}/shard-0.steps"
    info = ShardInfo(block_size=4, capabilities=frozenset(Capability))
    with ThreadPoolExecutor(1) as compute:
        failures: list[FunitelError] = []
        server = CallServer(executor, info.world_size, path, compute, failures.append)
        assert server.dispatcher.loop is not asyncio.get_running_loop(), "a CPU has a loop of its own"
        await server.start()
        grpc_server = make_server(Servicer(executor, info, [], server.dispatcher), address)
        await grpc_server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            stub = generate_pb2_grpc.TextGenerationServiceStub(channel)  # type: ignore[no-untyped-call]
            yield Shard(executor, server, stub, path, failures)
        await grpc_server.stop(None)
        if not server.dispatcher.loop.is_closed():
            await asyncio.wait_for(server.stop(), 10)


async def test_both_ways_in_take_turns(shard: Shard) -> None:
    router = await shard.connect()
    third = asyncio.create_task(shard.prefill(3))
    router.prefill(2)
    assert list((await shard.prefill(1)).batch.request_ids) == [1]
    frame = await router.answer()
    assert (frame.call_id, frame.code) == (2, OK)
    assert list((await third).batch.request_ids) == [3]


async def test_health_answers_while_a_step_computes(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    router = await shard.connect()
    with shard.blocked(monkeypatch) as gate:
        router.prefill(1)
        over_grpc = asyncio.create_task(shard.prefill(2))
        for _ in range(3):
            await asyncio.wait_for(shard.stub.Health(pb.HealthRequest()), 5)
        await asyncio.sleep(0.02)
        assert router.answers.empty()
        assert not over_grpc.done()
        gate.set()
        assert (await router.answer()).code == OK
        assert list((await over_grpc).batch.request_ids) == [2]


async def test_what_was_accepted_is_answered_before_the_end(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    router = await shard.connect()
    with shard.blocked(monkeypatch) as gate:
        for step_seq in (1, 2, 3):
            router.prefill(step_seq)
        over_grpc = asyncio.create_task(shard.prefill(4))
        await asyncio.sleep(0.05)
        stopping = asyncio.create_task(shard.server.stop())
        await asyncio.sleep(0.05)
        assert not stopping.done()
        gate.set()
        await asyncio.wait_for(stopping, 10)
    assert [(await router.answer()).code for _ in range(3)] == [OK] * 3
    assert list((await over_grpc).batch.request_ids) == [4]
    await asyncio.wait_for(router.lost.wait(), 10)


async def test_what_was_answered_is_sent_before_the_end(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    shard.answer_with(LONG_TEXT, monkeypatch)
    router = await shard.connect()
    router.read(False)
    router.send(Frame(1, Method.CLEAR_CACHE, b""))
    await asyncio.sleep(0.05)
    stopping = asyncio.create_task(shard.server.stop())
    await asyncio.sleep(0.05)
    assert not stopping.done()
    router.read(True)
    frame = await router.answer()
    assert len(frame.payload) > len(LONG_TEXT)
    await asyncio.wait_for(stopping, 10)


async def test_a_router_that_does_not_read_holds_up_no_end(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_socket_server, "FLUSH_SECONDS", 0.05)
    shard.answer_with(LONG_TEXT, monkeypatch)
    router = await shard.connect()
    router.read(False)
    router.send(Frame(1, Method.CLEAR_CACHE, b""))
    await asyncio.sleep(0.05)
    await asyncio.wait_for(shard.server.stop(), 2)
    router.close()


async def test_what_a_handler_raises_is_answered_and_its_number_is_used(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(rows: object) -> None:
        raise RuntimeError("a bug")

    router = await shard.connect()
    with monkeypatch.context() as patch:
        patch.setattr(wire, "decode_rows", explode)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await shard.prefill(1)
        router.prefill(2)
        frame = await router.answer()
    assert (failed.value.code(), failed.value.details()) == (grpc.StatusCode.ABORTED, "RuntimeError: a bug")
    assert frame == Frame(2, grpc.StatusCode.ABORTED.value[0], b"RuntimeError: a bug")
    router.prefill(3)
    assert (await router.answer()).code == OK
    assert shard.failures == []
