"""The shards of one model copy: a call goes to every rank at once, one answer comes back from each.

Calls go over gRPC, numbered ones over the step socket where a shard of this machine has one. Foreign statuses become
funitel errors here.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc

from funitel.proto import encoder_wire, wire
from funitel.proto import generate_pb2 as pb
from funitel.proto.errors import (
    FunitelError,
    InvalidRequest,
    ResourceExhausted,
    ShardFailed,
    ShardUnsound,
    StartupError,
    StepFailed,
)
from funitel.proto.security.tls import MutualTls
from funitel.proto.step import (
    BlockCopy,
    CachedBatch,
    EncoderInput,
    EncoderResult,
    EncoderTask,
    GrammarType,
    RowUpdate,
    SequenceStart,
    ShardInfo,
    ShardMemory,
    StepResult,
    WarmupLimits,
    WarmupResult,
)
from funitel.proto.step_socket import KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS, MAX_BYTES, Method
from funitel.proto.tracing import spans
from funitel.router.shard_client.fencing import fence
from funitel.router.shard_client.step_socket import StepClient, unreadable

logger = logging.getLogger(__name__)

SERVICE = "/generate.v3.TextGenerationService/"
HEALTH_TIMEOUT_SECONDS = 5.0
GRAMMAR_TIMEOUT_SECONDS = 30.0
DISMISS_SECONDS = 2.0  # in which a rank ends that can
# No step takes this long; a shard that does not answer by then hangs.
STEP_TIMEOUT_SECONDS = 300.0
# Ranks answer together: once one has failed, the others have this long before they are given up.
STRAGGLER_SECONDS = 5.0
LEAST_POLL_SECONDS, MOST_POLL_SECONDS = 0.1, 1.0  # between two attempts to reach shards that are still loading
WAITING_SECONDS = 10.0  # between two lines that say that they are waited for
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_BYTES),
    ("grpc.max_send_message_length", MAX_BYTES),
    # A host that vanishes takes no leave: it is asked again and again, and lost within some 30 s. A process that only
    # stands still, and another machine's kernel that answers for it, are told apart no sooner.
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),  # or a new channel would wait as long as the last one to the same address
]

_STATUSES: dict[int, grpc.StatusCode] = {status.value[0]: status for status in grpc.StatusCode}

T = TypeVar("T")
Message = Any  # protobuf messages share no useful base
Parse = Callable[[bytes], T]
Results = tuple[StepResult, ...]  # of the ranks asked, in their order


def target_of(url: str) -> str:
    """Address gRPC understands: "unix:///path" and "tcp://host:port" are what shards announce."""
    if url.startswith("unix://"):
        return "unix:" + url.removeprefix("unix://")
    return url.removeprefix("tcp://")


def _channel(url: str, tls: MutualTls | None) -> grpc.aio.Channel:
    if tls is None or url.startswith("unix:"):
        return grpc.aio.insecure_channel(target_of(url), options=OPTIONS)
    return grpc.aio.secure_channel(target_of(url), tls.channel_credentials(), options=OPTIONS)


class ShardClient:
    """Calls to one rank. Requests are bytes, so that all ranks get one encoding."""

    def __init__(self, rank: int, url: str, tls: MutualTls | None = None) -> None:
        """With `tls`, a shard on TCP must show a certificate, and is shown one."""
        self.rank = rank
        self.url = url
        self._channel = _channel(url, tls)
        self._methods: dict[str, Any] = {}
        self._steps: StepClient | None = None
        self._has_hung_up = False

    async def open_steps(self, path: str) -> None:
        """Make numbered calls by a step socket from now on, if it can be reached: it may be another machine's."""
        if not path:
            return
        try:
            self._steps = await StepClient.connect(path, self._failure_of)
        except OSError as error:
            logger.warning("shard rank %d: steps go over gRPC, for %s is out of reach: %s", self.rank, path, error)

    def step(self, method: Method, payload: bytes, parse: Parse[T]) -> Awaitable[T]:
        """Send a numbered call now; raises FunitelError when it is awaited."""
        if self._steps is not None and not self._steps.lost.done():
            return self._steps.call(method, payload, parse, STEP_TIMEOUT_SECONDS)
        return self.call(method.rpc, payload, parse, STEP_TIMEOUT_SECONDS)

    def call(self, method: str, payload: bytes, parse: Parse[T], timeout: float | None = None) -> Awaitable[T]:
        """Send now over gRPC; raises FunitelError when it is awaited."""
        function = self._methods.get(method)
        if function is None:
            function = self._methods[method] = self._channel.unary_unary(
                SERVICE + method,
                request_serializer=None,
                response_deserializer=None,  # gRPC would make nothing of what cannot be parsed, and go on
            )
        return self._answer(function(payload, timeout=timeout, metadata=tuple(spans.inject().items()) or None), parse)

    async def _answer(self, call: Awaitable[bytes], parse: Parse[T]) -> T:
        try:
            payload = await call
        except grpc.aio.AioRpcError as error:
            raise self.failure(error.code(), error.details()) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._has_hung_up or (task is not None and task.cancelling()):
                raise
            raise self.failure(grpc.StatusCode.CANCELLED, "hung up") from None  # whoever waits was not cancelled
        try:
            return parse(payload)
        except Exception as error:  # as a step socket's end takes it
            raise self.failure(grpc.StatusCode.DATA_LOSS, unreadable(error)) from error

    def _failure_of(self, code: int, details: str) -> FunitelError:
        return self.failure(_STATUSES.get(code, grpc.StatusCode.UNKNOWN), details)

    async def disconnected(self) -> None:
        """Return once there is no connection to the shard; it may come back with the next call."""
        if self._steps is not None:
            await asyncio.shield(self._steps.lost)
        while (state := self._channel.get_state()) is grpc.ChannelConnectivity.READY:
            await self._channel.wait_for_state_change(state)

    @property
    def is_connected(self) -> bool:
        """Whether all connections to the shard are there: it has not ended, and is not about to."""
        if self._steps is not None and self._steps.lost.done():
            return False
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    def failure(self, status: grpc.StatusCode, details: str | None) -> FunitelError:
        """Say what a gRPC status of this rank means to us."""
        details = details or status.name
        match status:
            case grpc.StatusCode.FAILED_PRECONDITION:
                return StartupError(details)
            case grpc.StatusCode.INVALID_ARGUMENT:
                return InvalidRequest(details)
            case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED | grpc.StatusCode.CANCELLED:
                return ShardFailed(f"shard rank {self.rank} does not answer: {details}")
            case grpc.StatusCode.DATA_LOSS:
                return ShardUnsound(f"shard rank {self.rank}: {details}")
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return ResourceExhausted(f"shard rank {self.rank}: {details}")
            case _:
                return StepFailed(f"shard rank {self.rank}: {details}")

    async def close(self) -> None:
        """Hang up; calls under way fail."""
        self._has_hung_up = True
        if self._steps is not None:
            self._steps.close()
        await self._channel.close()


def _ignore(task: "asyncio.Future[Any]") -> None:
    """Retrieve what a task raised that nobody will ask."""
    if not task.cancelled():
        task.exception()


class Shards:
    """Every rank of one model copy, in rank order: the `Ranks` of a `Replica`."""

    def __init__(self, clients: Sequence[ShardClient], infos: Sequence[ShardInfo]) -> None:
        self.clients = tuple(clients)
        self.infos = tuple(infos)

    @classmethod
    async def connect(cls, master_url: str, patience_seconds: float = 0.0, tls: MutualTls | None = None) -> "Shards":
        """Find all ranks through rank 0, drop what an earlier router left, and ask for their facts.

        Shards that are still loading are waited for, with a line of the log every ten seconds.

        Raises:
            StartupError: they do not answer within `patience_seconds`, or they do not speak this protocol.
        """
        began = said = time.monotonic()
        while True:
            try:
                return await cls._find(master_url, tls)
            except ShardFailed as error:
                waited = time.monotonic() - began
                if waited >= patience_seconds:
                    after = f" after {patience_seconds:g} s" if patience_seconds else ""
                    raise StartupError(f"no shard answers at {master_url}{after}: {error.message}") from error
            if said == began or time.monotonic() - said >= WAITING_SECONDS:
                said = time.monotonic()
                logger.info("waiting for the shards at %s since %.0f s", master_url, waited)
            await asyncio.sleep(min(max(LEAST_POLL_SECONDS, waited / 20), MOST_POLL_SECONDS))

    @classmethod
    async def _find(cls, master_url: str, tls: MutualTls | None) -> "Shards":
        """One attempt; ShardFailed when a rank does not answer."""
        # New channels each time: one that has failed to connect waits longer and longer before it tries again.
        master = ShardClient(0, master_url, tls)
        try:
            found: pb.ServiceDiscoveryResponse = await master.call(
                "ServiceDiscovery", b"", pb.ServiceDiscoveryResponse.FromString, HEALTH_TIMEOUT_SECONDS
            )
        except ShardFailed:
            raise
        except FunitelError as error:
            raise StartupError(f"what answers at {master_url} is no shard: {error.message}") from error
        finally:
            await master.close()
        bare = cls([ShardClient(rank, url, tls) for rank, url in enumerate(found.urls)], [])
        try:
            await bare.clear()
            infos = await bare._fan_out("Info", pb.InfoRequest(), pb.InfoResponse.FromString)
        except BaseException:
            await bare.close()
            raise
        shards = cls(bare.clients, [wire.decode_info(info) for info in infos])
        for client, info in zip(shards.clients, shards.infos, strict=True):
            await client.open_steps(info.step_socket)
        return shards

    async def warmup(self, sequences: Sequence[SequenceStart], limits: WarmupLimits) -> list[WarmupResult]:
        """Size the pool; every rank's result."""
        batch = wire.encode_batch(0, sequences, self._block_size)
        request = wire.encode_warmup(batch, limits)
        responses = await self._fan_out("Warmup", request, pb.WarmupResponse.FromString)
        return [wire.decode_warmup_result(response) for response in responses]

    async def health(self) -> list[ShardMemory]:
        """What memory the ranks hold; raise ShardFailed unless every rank answers."""
        parse = pb.HealthResponse.FromString
        responses = await self._fan_out("Health", pb.HealthRequest(), parse, timeout=HEALTH_TIMEOUT_SECONDS)
        return [wire.decode_memory(response) for response in responses]

    async def dismiss(self, reason: str) -> None:
        """Have ranks of other machines end, if they can: those of this one are beyond doubt once they are fenced."""
        payload = pb.DismissRequest(reason=reason).SerializeToString()
        remote = [client for client in self.clients if client.url.startswith("tcp://")]
        calls = (client.call("Dismiss", payload, pb.DismissResponse.FromString, DISMISS_SECONDS) for client in remote)
        await asyncio.gather(*calls, return_exceptions=True)

    async def disconnected(self) -> None:
        """Return once the connection to any rank has ended."""
        tasks = [asyncio.create_task(client.disconnected()) for client in self.clients]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    def fence(self) -> None:
        """See to it that shards are dead that are lost and have not ended; where one has, its peers are seen to."""
        if all(client.is_connected for client in self.clients):
            for client in self.clients:
                fence(client.url)

    def prefill(
        self,
        batch_id: int,
        starts: Sequence[SequenceStart],
        cached: CachedBatch | None,
        rows: Sequence[RowUpdate],
        copies: Sequence[BlockCopy],
        step_seq: int | None,
    ) -> Awaitable[tuple[StepResult, ...]]:
        """Send a step that takes new sequences in."""
        batch = wire.encode_batch(batch_id, starts, self._block_size)
        request = wire.encode_prefill(batch, cached, rows, step_seq, copies)
        return self._results(self._send(Method.PREFILL, request, self._prefilled))

    def decode(
        self,
        batches: Sequence[CachedBatch],
        rows: Sequence[RowUpdate],
        copies: Sequence[BlockCopy],
        step_seq: int | None,
    ) -> Awaitable[tuple[StepResult, ...]]:
        """Send a step of cached batches."""
        request = wire.encode_decode(batches, rows, step_seq, copies)
        return self._results(self._send(Method.DECODE, request, self._decoded))

    def _prefilled(self, payload: bytes) -> Results:
        return (wire.decode_result(pb.PrefillResponse.FromString(payload), self.infos[0].vocab_size),)

    def _decoded(self, payload: bytes) -> Results:
        return (wire.decode_result(pb.DecodeResponse.FromString(payload), self.infos[0].vocab_size),)

    def filter(self, batch_id: int, request_ids: Sequence[int], step_seq: int | None) -> Awaitable[CachedBatch]:
        """Send that only some rows of a cached batch are kept."""
        request = pb.FilterBatchRequest(batch_id=batch_id, request_ids=request_ids, step_seq=step_seq)
        return self._kept(self._send(Method.FILTER_BATCH, request, pb.FilterBatchResponse.FromString))

    async def _kept(self, calls: Sequence[Awaitable[pb.FilterBatchResponse]]) -> CachedBatch:
        responses = await self._answers(calls)
        return wire.decode_cached(responses[-1].batch)

    async def compile_grammar(self, kind: GrammarType, text: str) -> None:
        """Compile a grammar on every rank, beside the steps."""
        request = wire.encode_grammar(kind, text)
        await self._fan_out("CompileGrammar", request, pb.CompileGrammarResponse.FromString, GRAMMAR_TIMEOUT_SECONDS)

    async def encode(self, task: EncoderTask, inputs: Sequence[EncoderInput]) -> EncoderResult:
        """Have texts read whole by an encoder, which is one rank."""
        request = encoder_wire.encode_inputs(task, inputs)
        [response] = await self._fan_out("Encode", request, pb.EncodeResponse.FromString, STEP_TIMEOUT_SECONDS)
        return encoder_wire.decode_rows(response)

    def clear(self, batch_id: int | None = None, step_seq: int | None = None) -> Awaitable[None]:
        """Send that one cached batch is dropped, or all are."""
        request = pb.ClearCacheRequest(id=batch_id, step_seq=step_seq)
        return self._done(self._send(Method.CLEAR_CACHE, request, pb.ClearCacheResponse.FromString))

    async def _done(self, calls: Sequence[Awaitable[pb.ClearCacheResponse]]) -> None:
        await self._answers(calls)

    @property
    def _block_size(self) -> int:
        return self.infos[-1].block_size

    def _results(self, calls: Sequence[Awaitable[Results]]) -> Awaitable[Results]:
        return calls[0] if len(calls) == 1 else self._joined(calls)  # one rank: no task has to wake up for a step

    async def _joined(self, calls: Sequence[Awaitable[Results]]) -> Results:
        return tuple(result for results in await self._answers(calls) for result in results)

    def _send(self, method: Method, request: Message, parse: Parse[T]) -> list[Awaitable[T]]:
        """Encode once and send without yielding to the event loop: what was planned is what is sent."""
        payload = request.SerializeToString()
        return [client.step(method, payload, parse) for client in self.clients]

    async def _fan_out(self, method: str, request: Message, parse: Parse[T], timeout: float | None = None) -> list[T]:
        payload = request.SerializeToString()
        return await self._answers([client.call(method, payload, parse, timeout) for client in self.clients])

    async def _answers(self, calls: Sequence[Awaitable[T]]) -> list[T]:
        """Wait for every rank; the lowest rank's failure is raised, a dead shard before a failed step."""
        if len(calls) == 1:
            return [await calls[0]]
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if any(not task.done() for task in tasks):
                await asyncio.wait(tasks, timeout=STRAGGLER_SECONDS)
        except asyncio.CancelledError:
            for task in tasks:
                task.add_done_callback(_ignore)
                task.cancel()
            raise
        failures: list[FunitelError] = []
        for client, task in zip(self.clients, tasks, strict=True):
            if not task.done():
                task.cancel()
                failures.append(ShardUnsound(f"shard rank {client.rank} does not answer"))
            elif isinstance(error := task.exception(), FunitelError):
                failures.append(error)
        if failures:
            raise next((f for f in failures if isinstance(f, ShardFailed)), failures[0])
        return [task.result() for task in tasks]

    async def close(self) -> None:
        """Close all channels."""
        for client in self.clients:
            await client.close()
