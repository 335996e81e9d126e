"""The gRPC servicer: decode a call, run it on the compute thread, encode the answer. Knows no tensors.

Calls that change state run on one thread, in the order of their `step_seq` where the router numbers them, in order
of arrival otherwise. The next one is at hand there before the last has ended; what that one found is put into words
and encoded on the event loop meanwhile. Health and Info never wait for it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor as ThreadExecutor
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc

from funitel.model_server.executor import ComputedStep, Executor
from funitel.model_server.tracing import Traced
from funitel.proto import generate_pb2 as pb
from funitel.proto import generate_pb2_grpc, wire
from funitel.proto.errors import FunitelError, InvalidRequest, ShardFailed, StartupError, StepFailed
from funitel.proto.step import ShardInfo

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
Response = TypeVar("Response", pb.PrefillResponse, pb.DecodeResponse)
Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
MAX_MESSAGE_BYTES = 2**31 - 1
# A numbered call whose predecessor is not done after this long is refused: the longest step must fit.
ORDER_TIMEOUT_SECONDS = 300.0


class StepOrder:
    """Begins numbered calls strictly in order, from 1; any number may be waiting.

    A call is begun when the one before it has *begun*: what they are handed to keeps them in that order.
    """

    def __init__(self) -> None:
        self._next = 1
        self._waiting: dict[int, _Waiting] = {}

    def reset(self) -> None:
        """Start again from 1: a router has (re)connected. Calls still waiting are refused."""
        given_up, self._waiting = self._waiting, {}
        self._next = 1
        for step_seq, waiting in given_up.items():
            waiting.begun.set_exception(InvalidRequest(f"step_seq {step_seq} belongs to a numbering that was given up"))

    async def begin(self, step_seq: int | None, call: Callable[[], Awaitable[T]]) -> Awaitable[T]:
        """Call `call` in the turn of `step_seq`, at once for None; returns what it returns.

        A caller that is cancelled while it waits leaves its call behind, to be made when its turn comes.

        Raises:
            InvalidRequest: the number was used already, or its predecessors did not come in time.
        """
        if step_seq is None:
            return call()
        if step_seq < self._next or step_seq in self._waiting:
            raise InvalidRequest(f"step_seq {step_seq} was executed already, {self._next} is next")
        waiting = _Waiting(call, asyncio.get_running_loop().create_future())
        self._waiting[step_seq] = waiting
        self._begin_due()
        if not waiting.begun.done():
            await asyncio.wait([waiting.begun], timeout=ORDER_TIMEOUT_SECONDS)
        if not waiting.begun.done():
            del self._waiting[step_seq]
            raise InvalidRequest(f"step_seq {step_seq} came, {self._next} did not")
        begun: Awaitable[T] = waiting.begun.result()
        return begun

    def _begin_due(self) -> None:
        while (waiting := self._waiting.pop(self._next, None)) is not None:
            self._next += 1
            waiting.begun.set_result(waiting.call())


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A call that waits for its turn, and what it returns once begun."""

    call: Callable[[], Awaitable[Any]]
    begun: "asyncio.Future[Awaitable[Any]]"


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

        def encode(_: None) -> pb.ClearCacheResponse:
            return pb.ClearCacheResponse()

        if request.HasField("id"):
            return await self._run(context, _step_seq(request), lambda: self._executor.clear(request.id), encode)
        response = await self._run(context, None, self._executor.clear, encode)
        self._order.reset()
        return response

    async def FilterBatch(self, request: pb.FilterBatchRequest, context: Context) -> pb.FilterBatchResponse:
        """Keep some rows of a cached batch."""
        step_seq = _step_seq(request)
        return await self._run(
            context,
            step_seq,
            lambda: self._executor.filter(request.batch_id, request.request_ids, is_ahead=step_seq is not None),
            lambda kept: pb.FilterBatchResponse(batch=wire.encode_cached(kept)),
        )

    async def Warmup(self, request: pb.WarmupRequest, context: Context) -> pb.WarmupResponse:
        """Size the pool."""
        starts = [wire.decode_sequence(message) for message in request.batch.requests]
        limits = wire.decode_warmup_limits(request)
        return await self._run(context, None, lambda: self._executor.warmup(starts, limits), wire.encode_warmup_result)

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
        step_seq, batch_id = _step_seq(request), request.batch.id
        return await self._run(
            context,
            step_seq,
            lambda: self._executor.compute_prefill(batch_id, starts, cached, rows, is_ahead=step_seq is not None),
            lambda step: _encoded(step, pb.PrefillResponse()),
        )

    async def Decode(self, request: pb.DecodeRequest, context: Context) -> pb.DecodeResponse:
        """Run one step of cached batches."""
        cached = [wire.decode_cached(message) for message in request.batches]
        rows = wire.decode_rows(request.rows)
        step_seq = _step_seq(request)
        return await self._run(
            context,
            step_seq,
            lambda: self._executor.compute_decode(cached, rows, is_ahead=step_seq is not None),
            lambda step: _encoded(step, pb.DecodeResponse()),
        )

    async def _run(
        self,
        context: Context,
        step_seq: int | None,
        call: Callable[[], T],
        encode: Callable[[T], R],
    ) -> R:
        """Run `call` on the compute thread in its turn; failures become gRPC statuses.

        What it returns is encoded here, on the event loop, while the compute thread goes on. A client that hangs up
        stops neither: other ranks run the call too, and later ones build on it.
        """
        try:
            return await asyncio.shield(await self._order.begin(step_seq, lambda: self._begin(call, encode)))
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

    def _begin(self, call: Callable[[], T], encode: Callable[[T], R]) -> "asyncio.Future[R]":
        """Hand `call` to the compute thread. Results come back, and are encoded, in the order of the calls."""
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[R] = loop.create_future()

        def compute() -> None:
            try:
                computed = call()
            except Exception as error:
                loop.call_soon_threadsafe(answered.set_exception, error)
            else:
                loop.call_soon_threadsafe(take, computed)

        def take(computed: T) -> None:
            try:
                answered.set_result(encode(computed))
            except Exception as error:
                answered.set_exception(error)

        self._compute.submit(compute)
        return answered


def _step_seq(
    request: pb.PrefillRequest | pb.DecodeRequest | pb.FilterBatchRequest | pb.ClearCacheRequest,
) -> int | None:
    return request.step_seq if request.HasField("step_seq") else None


def _encoded(step: ComputedStep, response: Response) -> Response:
    wire.encode_result(step.describe(), response)
    return response


async def _abort(context: Context, error: FunitelError) -> NoReturn:
    await context.abort(error.grpc_status, error.message)
    raise AssertionError("abort raises")


def make_server(
    servicer: generate_pb2_grpc.TextGenerationServiceServicer, address: str, *, is_traced: bool = False
) -> grpc.aio.Server:
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
