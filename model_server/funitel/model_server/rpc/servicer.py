"""The gRPC servicers of a shard, generating or encoder: every call of `generate.v3`. Knows no tensors.

What changes state is run by the dispatcher, on the compute thread. Health and Info never wait for it.
"""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor as ThreadExecutor
from functools import partial
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc

from funitel.model_server.device.memory import is_out_of_memory, process_memory
from funitel.model_server.executor.encoder import EncoderExecutor
from funitel.model_server.executor.executor import Executor
from funitel.model_server.rpc.dispatcher import Dispatcher, Q, R, ReplyCallbacks
from funitel.model_server.rpc.tracing import TracedCalls, status_of
from funitel.proto import encoder_wire, generate_pb2_grpc, wire
from funitel.proto import generate_pb2 as pb
from funitel.proto.errors import FunitelError, InvalidRequest, ResourceExhausted, StartupError, StepFailed, translating
from funitel.proto.process.private_socket import keeping_private
from funitel.proto.security.tls import MutualTls
from funitel.proto.step import MediaInput, ShardInfo
from funitel.proto.step_socket import KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS, MAX_BYTES
from funitel.proto.takeover import wire as takeover_wire

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_REASON = 500  # characters of a reason that are printed


def end_process(reason: str) -> NoReturn:
    """End at once, with the reason in the last line; a compute thread that hangs is not waited for."""
    said = "".join(character if character.isprintable() else " " for character in reason[:MAX_REASON])
    print(f"error: the router takes no answer of this shard any more: {said}", file=sys.stderr, flush=True)
    os._exit(1)


Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class ShardServicer(generate_pb2_grpc.TextGenerationServiceServicer):
    """The calls of `generate.v3.TextGenerationService` that never wait for the compute thread."""

    def __init__(self, info: ShardInfo, urls: list[str]) -> None:
        self._info = info
        self._urls = urls

    @property
    def busy_ns(self) -> int:
        """Nanoseconds since the call in flight was begun, where that is known; 0 for none."""
        return 0

    async def Health(self, request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
        """Answer at once: the process lives and its event loop turns. Says what memory it holds, and if it computes."""
        health = wire.encode_memory(process_memory())
        health.busy_ns = self.busy_ns
        return health

    async def Dismiss(self, request: pb.DismissRequest, context: Context) -> pb.DismissResponse:
        """End the process, whatever the compute thread does: the router takes no answer of it any more."""
        end_process(request.reason)

    async def Info(self, request: pb.InfoRequest, context: Context) -> pb.InfoResponse:
        """Static facts."""
        return wire.encode_info(self._info)

    async def ServiceDiscovery(
        self, request: pb.ServiceDiscoveryRequest, context: Context
    ) -> pb.ServiceDiscoveryResponse:
        """Addresses of all ranks."""
        return pb.ServiceDiscoveryResponse(urls=self._urls)


async def abort(context: Context, error: FunitelError) -> NoReturn:
    """End a call with the gRPC status of an error."""
    await context.abort(status_of(error), error.message)
    raise AssertionError("abort raises")


UNIX = "unix:"


class Servicer(ShardServicer):
    """One rank of `generate.v3.TextGenerationService`."""

    def __init__(self, executor: Executor, info: ShardInfo, urls: list[str], dispatcher: Dispatcher) -> None:
        super().__init__(info, urls)
        self._executor = executor
        self._dispatcher = dispatcher

    @property
    def busy_ns(self) -> int:
        """See ShardServicer."""
        return self._dispatcher.busy_ns

    async def CompileGrammar(self, request: pb.CompileGrammarRequest, context: Context) -> pb.CompileGrammarResponse:
        """Compile a grammar on a thread of its own; steps go on meanwhile."""
        kind = wire.decode_grammar_type(request.grammar_type)
        await self._aside(context, partial(self._executor.compile_grammar, kind, request.grammar))
        return pb.CompileGrammarResponse()

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        """Read an adapter on a thread of its own; steps go on meanwhile."""
        adapter = await self._aside(context, partial(self._executor.load_adapter, request.id, request.path))
        return pb.LoadAdapterResponse(bytes=adapter.weights.num_bytes, max_rank=adapter.max_rank)

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.UnloadAdapterResponse:
        """Forget an adapter."""
        await self._aside(context, partial(self._executor.unload_adapter, request.id))
        return pb.UnloadAdapterResponse()

    async def EncodeMedia(self, request: pb.EncodeMediaRequest, context: Context) -> pb.EncodeMediaResponse:
        """Encode an image or a sound on a thread of its own; steps go on meanwhile."""
        began = time.perf_counter_ns()
        try:
            with translating(_media_failure):
                num_bytes = await asyncio.wrap_future(self._executor.encode_media(_media_of(request)))
        except FunitelError as error:
            await abort(context, error)
        return pb.EncodeMediaResponse(bytes=num_bytes, total_ns=time.perf_counter_ns() - began)

    async def DropMedia(self, request: pb.DropMediaRequest, context: Context) -> pb.DropMediaResponse:
        """Drop features of images and sounds."""
        self._executor.drop_media(request.keys)
        return pb.DropMediaResponse()

    async def ClearCache(self, request: pb.ClearCacheRequest, context: Context) -> pb.ClearCacheResponse:
        """Drop one or all cached batches."""
        return await self._answer(context, self._dispatcher.clear_cache, request)

    async def FilterBatch(self, request: pb.FilterBatchRequest, context: Context) -> pb.FilterBatchResponse:
        """Keep some rows of a cached batch."""
        return await self._answer(context, self._dispatcher.filter_batch, request)

    async def Warmup(self, request: pb.WarmupRequest, context: Context) -> pb.WarmupResponse:
        """Size the pool."""
        return await self._answer(context, self._dispatcher.warmup, request)

    async def Outputs(self, request: pb.OutputsRequest, context: Context) -> pb.OutputsResponse:
        """Tell the outputs that are kept, on a thread of its own; steps go on meanwhile."""
        return await self._aside(context, lambda: takeover_wire.encode_outputs(self._executor.output.records.outputs()))

    async def ReleaseOutputs(self, request: pb.ReleaseOutputsRequest, context: Context) -> pb.ReleaseOutputsResponse:
        """Forget outputs."""
        self._executor.output.records.release(request.output_keys)
        return pb.ReleaseOutputsResponse()

    async def TakeOver(self, request: pb.TakeOverRequest, context: Context) -> pb.TakeOverResponse:
        """Tell what an earlier router has left here; where the call only looks, at once and beside the steps."""
        if request.only_looks:
            return self._dispatcher.look()
        return await self._answer(context, self._dispatcher.take_over, request)

    async def Sleep(self, request: pb.SleepRequest, context: Context) -> pb.SleepResponse:
        """Give the pool back, and what weights take on a GPU."""
        return await self._answer(context, self._dispatcher.sleep, request)

    async def Wake(self, request: pb.WakeRequest, context: Context) -> pb.WakeResponse:
        """Put the weights back; Warmup comes next."""
        return await self._answer(context, self._dispatcher.wake, request)

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> pb.PrefillResponse:
        """Take a batch in and run one step."""
        return await self._answer(context, self._dispatcher.prefill, request)

    async def Decode(self, request: pb.DecodeRequest, context: Context) -> pb.DecodeResponse:
        """Run one step of cached batches."""
        return await self._answer(context, self._dispatcher.decode, request)

    async def _aside(self, context: Context, work: Callable[[], T]) -> T:
        """Work on a thread aside from the steps; failures become gRPC statuses."""
        try:
            return await asyncio.to_thread(work)
        except FunitelError as error:
            await abort(context, error)

    async def _answer(self, context: Context, call: Callable[[Q, ReplyCallbacks[R]], None], request: Q) -> R:
        """Make a call on its loop and wait for what comes of it here; failures become gRPC statuses."""
        here = asyncio.get_running_loop()
        answered: asyncio.Future[R] = here.create_future()

        def settle(outcome: R | FunitelError) -> None:
            if answered.done():  # the client has hung up
                return
            if isinstance(outcome, FunitelError):
                answered.set_exception(outcome)
            else:
                answered.set_result(outcome)

        def tell(outcome: R | FunitelError) -> None:
            here.call_soon_threadsafe(settle, outcome)

        reply: ReplyCallbacks[R] = ReplyCallbacks(tell, tell)
        self._dispatcher.loop.call_soon_threadsafe(self._dispatcher.make, call, request, reply)
        try:
            return await answered
        except FunitelError as error:
            await abort(context, error)


def make_server(
    servicer: generate_pb2_grpc.TextGenerationServiceServicer,
    address: str,
    *,
    is_traced: bool = False,
    tls: MutualTls | None = None,
) -> grpc.aio.Server:
    """A server of `servicer` bound to "unix:/path" or "host:port", not yet started.

    A Unix socket is its owner's alone; with `tls` a caller must show a certificate.

    Raises:
        StartupError: the address is taken or not ours.
    """
    server = grpc.aio.server(
        interceptors=[TracedCalls()] if is_traced else [],
        options=[
            ("grpc.max_receive_message_length", MAX_BYTES),
            ("grpc.max_send_message_length", MAX_BYTES),
            ("grpc.keepalive_time_ms", KEEPALIVE_MS),
            ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
            ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),  # a router asks during long steps
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.so_reuseport", 0),
        ],
    )
    generate_pb2_grpc.add_TextGenerationServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    try:
        if address.startswith(UNIX):
            with keeping_private(address.removeprefix(UNIX)):
                server.add_insecure_port(address)
        elif tls is not None:
            server.add_secure_port(address, tls.server_credentials())
        else:
            server.add_insecure_port(address)
    except RuntimeError as error:
        raise StartupError(f"cannot listen on {address}: {error}") from error
    return server


def _media_of(request: pb.EncodeMediaRequest) -> MediaInput:
    try:
        return encoder_wire.decode_media(request)
    except ValueError:
        raise InvalidRequest(f"kind must be one of those of MediaKind, given {request.kind}", "kind") from None


def _media_failure(error: Exception) -> FunitelError:
    if is_out_of_memory(error):
        return ResourceExhausted(f"there is no memory to encode a media item: {type(error).__name__}")
    return _failure(error)


class EncoderServicer(ShardServicer):
    """What of `generate.v3.TextGenerationService` an encoder answers; the rest is UNIMPLEMENTED."""

    def __init__(self, executor: EncoderExecutor, info: ShardInfo, urls: list[str], compute: ThreadExecutor) -> None:
        super().__init__(info, urls)
        self._executor = executor
        self._compute = compute

    async def ClearCache(self, request: pb.ClearCacheRequest, context: Context) -> pb.ClearCacheResponse:
        """Nothing is kept between calls."""
        return pb.ClearCacheResponse()

    async def Encode(self, request: pb.EncodeRequest, context: Context) -> pb.EncodeResponse:
        """Compute one batch of texts."""
        try:
            task, inputs = encoder_wire.decode_inputs(request)
        except FunitelError as error:
            await abort(context, error)
        result = await self._in_order(context, partial(self._executor.encode, task, inputs))
        return encoder_wire.encode_rows(result)

    async def Sleep(self, request: pb.SleepRequest, context: Context) -> pb.SleepResponse:
        """Give back what weights take on a GPU, behind the batches that came before; there is no pool."""
        freed = await self._in_order(context, partial(self._executor.sleep, request.level))
        return pb.SleepResponse(freed_bytes=freed)

    async def Wake(self, request: pb.WakeRequest, context: Context) -> pb.WakeResponse:
        """Put the weights back; texts can be computed at once."""
        await self._in_order(context, self._executor.wake)
        return pb.WakeResponse()

    async def _in_order(self, context: Context, work: Callable[[], T]) -> T:
        """Work on the compute thread, in the order of calls; failures become gRPC statuses."""
        try:
            with translating(_failure):
                return await asyncio.get_running_loop().run_in_executor(self._compute, work)
        except FunitelError as error:
            await abort(context, error)


def _failure(error: Exception) -> StepFailed:
    logger.error("encoding failed", exc_info=error)
    return StepFailed(f"{type(error).__name__}: {error}")
