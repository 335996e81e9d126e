"""The client of one rank of a model: calls over gRPC, steps over the step socket; statuses become funitel errors."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc

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
from funitel.proto.step_socket import KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS, MAX_BYTES, Method
from funitel.proto.tracing import spans
from funitel.router.shard_client.step_socket import StepClient, unreadable

logger = logging.getLogger(__name__)

SERVICE = "/generate.v3.TextGenerationService/"
# No step takes this long; a shard that does not answer by then hangs.
STEP_TIMEOUT_SECONDS = 300.0
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_BYTES),
    ("grpc.max_send_message_length", MAX_BYTES),
    # A host that vanishes closes no connection: pings find it lost within some 30 s. The kernel of a
    # stopped process answers pings: only the step timeout finds it.
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel must not inherit an old one's backoff
]

_STATUSES: dict[int, grpc.StatusCode] = {status.value[0]: status for status in grpc.StatusCode}

T = TypeVar("T")
Parse = Callable[[bytes], T]


def target_of(url: str) -> str:
    """Convert an address as shards announce it, "unix:///path" or "tcp://host:port", to gRPC's form."""
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
        """With `tls`, both ends of a TCP connection show certificates."""
        self.rank = rank
        self.url = url
        self._channel = _channel(url, tls)
        self._methods: dict[str, Any] = {}
        self._steps: StepClient | None = None
        self._is_closed = False

    async def open_steps(self, path: str) -> None:
        """Make numbered calls over a step socket from now on, if it can be reached: it may be on another machine."""
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
                response_deserializer=None,  # gRPC would return None for a message that cannot be parsed
            )
        return self._answer(function(payload, timeout=timeout, metadata=tuple(spans.inject().items()) or None), parse)

    async def _answer(self, call: Awaitable[bytes], parse: Parse[T]) -> T:
        try:
            payload = await call
        except grpc.aio.AioRpcError as error:
            raise self.failure(error.code(), error.details()) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._is_closed or (task is not None and task.cancelling()):
                raise
            raise self.failure(grpc.StatusCode.CANCELLED, "closed") from None  # the caller was not cancelled
        try:
            return parse(payload)
        except Exception as error:  # as the step socket does
            raise self.failure(grpc.StatusCode.DATA_LOSS, unreadable(error)) from error

    def _failure_of(self, code: int, details: str) -> FunitelError:
        return self.failure(_STATUSES.get(code, grpc.StatusCode.UNKNOWN), details)

    async def disconnected(self) -> None:
        """Return once there is no connection to the shard; the next call may open it again."""
        if self._steps is not None:
            await asyncio.shield(self._steps.lost)
        while (state := self._channel.get_state()) is grpc.ChannelConnectivity.READY:
            await self._channel.wait_for_state_change(state)

    @property
    def is_connected(self) -> bool:
        """Whether all connections to the shard are open: it has not ended."""
        if self._steps is not None and self._steps.lost.done():
            return False
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    def failure(self, status: grpc.StatusCode, details: str | None) -> FunitelError:
        """Translate a gRPC status of this rank to an error of ours."""
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
        """Close the connections; calls in flight fail."""
        self._is_closed = True
        if self._steps is not None:
            self._steps.close()
        await self._channel.close()
