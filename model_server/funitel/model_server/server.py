"""The gRPC servicer: decode a call, run it on the compute thread, encode the answer. Knows no tensors.

Calls that change state run on one thread, in the order of their `step_seq` where the router numbers them, in order
of arrival otherwise. Health and Info never wait for it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor as ThreadExecutor
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc

from funitel.model_server.executor import Executor
from funitel.model_server.tracing import Traced
from funitel.proto import generate_pb2 as pb
from funitel.proto import generate_pb2_grpc, wire
from funitel.proto.errors import FunitelError, InvalidRequest, ShardFailed, StartupError, StepFailed
from funitel.proto.step import ShardInfo

logger = logging.getLogger(__name__)

T = TypeVar("T")
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
MAX_MESSAGE_BYTES = 2**31 - 1
# A numbered call whose predecessor is not done after this long is refused: the longest step must fit.
ORDER_TIMEOUT_SECONDS = 300.0


class StepOrder:
    """Lets numbered calls through strictly in order, from 1; several may be waiting."""

    def __init__(self) -> None:
        self._next = 1
        self._round = 0  # numberings begun; a call of an earlier one is refused
        self._changed = asyncio.Condition()

    async def reset(self) -> None:
        """Start again from 1: a router has (re)connected. Calls still waiting are refused."""
        async with self._changed:
            self._next = 1
            self._round += 1
            self._changed.notify_all()

    @asynccontextmanager
    async def turn(self, step_seq: int | None) -> AsyncIterator[None]:
        """Wait for the turn of `step_seq`; None goes through at once.

        Raises:
            InvalidRequest: the number was executed already, or its predecessors did not come in time.
        """
        if step_seq is None:
            yield
            return
        async with self._changed:
            current = self._round
            if step_seq < self._next:
                raise InvalidRequest(f"step_seq {step_seq} was executed already, {self._next} is next")
            try:
                async with asyncio.timeout(ORDER_TIMEOUT_SECONDS):
                    await self._changed.wait_for(lambda: self._next >= step_seq or self._round != current)
            except TimeoutError as error:
                raise InvalidRequest(f"step_seq {step_seq} came, {self._next} did not") from error
            if self._round != current:
                raise InvalidRequest(f"step_seq {step_seq} belongs to a numbering that was given up")
        try:
            yield
        finally:
            async with self._changed:
                if self._round == current:
                    self._next = step_seq + 1
                    self._changed.notify_all()


class Servicer(generate_pb2_grpc.TextGenerationServiceServicer):
    """One rank of `generate.v3.TextGenerationService`.

    `on_fatal` is told of failures after which this process cannot go on: the ranks have lost each other.
    """

    def __init__(
        self,
        executor: Executor,
        info: ShardInfo,
        urls: list[str],
        compute: ThreadExecutor,
        on_fatal: Callable[[FunitelError], None],
    ) -> None:
        self._on_fatal = on_fatal
        self._executor = executor
        self._info = info
        self._urls = urls
        self._compute = compute
        self._order = StepOrder()

    async def Health(self, request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
        """Answer at once: the process lives and its event loop turns."""
        return pb.HealthResponse()

    async def Info(self, request: pb.InfoRequest, context: Context) -> pb.InfoResponse:
        """Static facts."""
        return wire.encode_info(self._info)

    async def ServiceDiscovery(
        self, request: pb.ServiceDiscoveryRequest, context: Context
    ) -> pb.ServiceDiscoveryResponse:
        """Addresses of all ranks."""
        return pb.ServiceDiscoveryResponse(urls=self._urls)

    async def ClearCache(self, request: pb.ClearCacheRequest, context: Context) -> pb.ClearCacheResponse:
        """Drop one or all cached batches; dropping all starts the numbering again."""
        if not request.HasField("id"):
            await self._run(context, None, self._executor.clear)
            await self._order.reset()
            return pb.ClearCacheResponse()
        await self._run(context, _step_seq(request), lambda: self._executor.clear(request.id))
        return pb.ClearCacheResponse()

    async def FilterBatch(self, request: pb.FilterBatchRequest, context: Context) -> pb.FilterBatchResponse:
        """Keep some rows of a cached batch."""
        kept = await self._run(
            context,
            _step_seq(request),
            lambda: self._executor.filter(request.batch_id, request.request_ids),
        )
        return pb.FilterBatchResponse(batch=wire.encode_cached(kept))

    async def Warmup(self, request: pb.WarmupRequest, context: Context) -> pb.WarmupResponse:
        """Size the pool."""
        starts = [wire.decode_sequence(message) for message in request.batch.requests]
        limits = wire.decode_warmup_limits(request)
        result = await self._run(context, None, lambda: self._executor.warmup(starts, limits))
        return wire.encode_warmup_result(result)

    async def CompileGrammar(self, request: pb.CompileGrammarRequest, context: Context) -> pb.CompileGrammarResponse:
        """Compile a grammar on a thread of its own; steps go on meanwhile."""
        kind = wire.decode_grammar_type(request.grammar_type)
        try:
            await asyncio.to_thread(self._executor.compile_grammar, kind, request.grammar)
        except FunitelError as error:
            await _abort(context, error)
        return pb.CompileGrammarResponse()

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> pb.PrefillResponse:
        """Take a batch in and run one step."""
        starts = [wire.decode_sequence(message) for message in request.batch.requests]
        cached = wire.decode_cached(request.cached_batch) if request.HasField("cached_batch") else None
        rows = wire.decode_rows(request.rows)
        result = await self._run(
            context,
            _step_seq(request),
            lambda: self._executor.prefill(request.batch.id, starts, cached, rows),
        )
        response = pb.PrefillResponse()
        wire.encode_result(result, response)
        return response

    async def Decode(self, request: pb.DecodeRequest, context: Context) -> pb.DecodeResponse:
        """Run one step of cached batches."""
        cached = [wire.decode_cached(message) for message in request.batches]
        rows = wire.decode_rows(request.rows)
        result = await self._run(context, _step_seq(request), lambda: self._executor.decode(cached, rows))
        response = pb.DecodeResponse()
        wire.encode_result(result, response)
        return response

    async def _run(self, context: Context, step_seq: int | None, call: Callable[[], T]) -> T:
        """Run `call` on the compute thread in its turn; failures become gRPC statuses.

        A client that hangs up does not stop a call that has begun: other ranks run it too.
        """
        try:
            return await asyncio.shield(asyncio.ensure_future(self._in_turn(step_seq, call)))
        except ShardFailed as error:
            self._on_fatal(error)
            await _abort(context, error)
        except FunitelError as error:
            await _abort(context, error)
        except Exception as error:
            logger.exception("step failed")
            failure = StepFailed(f"{type(error).__name__}: {error}")
            if self._info.world_size > 1:  # the other ranks may be waiting inside a collective for ever
                self._on_fatal(failure)
            await _abort(context, failure)

    async def _in_turn(self, step_seq: int | None, call: Callable[[], T]) -> T:
        async with self._order.turn(step_seq):
            return await asyncio.get_running_loop().run_in_executor(self._compute, call)


def _step_seq(
    request: pb.PrefillRequest | pb.DecodeRequest | pb.FilterBatchRequest | pb.ClearCacheRequest,
) -> int | None:
    return request.step_seq if request.HasField("step_seq") else None


async def _abort(context: Context, error: FunitelError) -> NoReturn:
    await context.abort(error.grpc_status, error.message)
    raise AssertionError("abort raises")


def make_server(servicer: Servicer, address: str, *, is_traced: bool = False) -> grpc.aio.Server:
    """A server of `servicer` bound to "unix:/path" or "host:port", not yet started.

    Raises:
        StartupError: the address is taken or not ours.
    """
    server = grpc.aio.server(
        interceptors=[Traced()] if is_traced else [],
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),
        ],
    )
    generate_pb2_grpc.add_TextGenerationServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise StartupError(f"cannot listen on {address}: {error}") from error
    return server
