"""Calls of the control plane to the shards of a replica that no router uses: Sleep and Wake, on every rank."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import grpc

from funitel.proto import generate_pb2 as pb
from funitel.proto.errors import (
    FunitelError,
    InvalidRequest,
    ResourceExhausted,
    ShardFailed,
    StepFailed,
    WrongState,
)
from funitel.proto.generate_pb2_grpc import TextGenerationServiceStub
from funitel.proto.security.tls import MutualTls

ANSWER_SECONDS = 10.0
COPY_SECONDS = 600.0  # weights of a GPU to the host's memory, or back: 100 GB at less than 1 GB/s
LEVEL = 1  # weights stay in the host's memory

T = TypeVar("T")
Call = Callable[[TextGenerationServiceStub], Awaitable[T]]


async def sleep(addresses: Sequence[str], tls: MutualTls | None = None) -> int:
    """Put the shards of a replica to sleep; returns the bytes that all of them together have given back.

    Where a rank refuses, those that sleep already are woken up. A replica that sleeps gives back 0 bytes.

    Args:
        addresses: `unix:///path` or `tcp://host:port` of every rank, or of rank 0, which knows the others'.
        tls: for addresses of TCP.

    Raises:
        WrongState: a rank has sequences, or is none that can sleep.
        ResourceExhausted: a host has no memory for the weights of a GPU.
        ShardFailed: a rank does not answer.
    """

    async def call(stub: TextGenerationServiceStub) -> int:
        response: pb.SleepResponse = await stub.Sleep(pb.SleepRequest(level=LEVEL), timeout=COPY_SECONDS)
        return response.freed_bytes

    async with AsyncExitStack() as stack:
        ranks = await _ranks(addresses, tls, stack)
        answers = await _on_all(ranks, call)
        failures = [answer for answer in answers if isinstance(answer, FunitelError)]
        if failures:
            asleep = [rank for rank, answer in zip(ranks, answers, strict=True) if not isinstance(answer, FunitelError)]
            await _on_all(asleep, _wake)
            raise failures[0]
    return sum(answer for answer in answers if not isinstance(answer, FunitelError))


async def wake(addresses: Sequence[str], tls: MutualTls | None = None) -> None:
    """Wake the shards of a replica up; a router's Warmup comes next. Those that are awake stay so.

    Args: see `sleep`.

    Raises:
        ResourceExhausted: a GPU does not have the memory any more; its rank sleeps on.
        WrongState, ShardFailed: see `sleep`.
    """
    async with AsyncExitStack() as stack:
        answers = await _on_all(await _ranks(addresses, tls, stack), _wake)
    for answer in answers:
        if isinstance(answer, FunitelError):
            raise answer


class _Rank:
    """The stub of one rank; statuses become funitel errors of one line."""

    def __init__(self, number: int, address: str, channel: grpc.aio.Channel) -> None:
        self.number = number
        self.address = address
        self._stub = TextGenerationServiceStub(channel)  # type: ignore[no-untyped-call]

    async def call(self, call: Call[T]) -> T:
        """Make a call; raises FunitelError."""
        try:
            return await call(self._stub)
        except grpc.aio.AioRpcError as error:
            raise self._failure(error.code(), error.details() or error.code().name) from error

    def _failure(self, status: grpc.StatusCode, details: str) -> FunitelError:
        name = f"shard rank {self.number}"
        match status:
            case grpc.StatusCode.FAILED_PRECONDITION:
                return WrongState(f"{name}: {details}")
            case grpc.StatusCode.UNIMPLEMENTED:
                return WrongState(f"{name}: its engine can neither sleep nor wake up")
            case grpc.StatusCode.INVALID_ARGUMENT:
                return InvalidRequest(f"{name}: {details}")
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return ResourceExhausted(f"{name}: {details}")
            case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED | grpc.StatusCode.CANCELLED:
                return ShardFailed(f"{name} at {self.address} does not answer: {details}")
            case _:
                return StepFailed(f"{name}: {details}")


async def _wake(stub: TextGenerationServiceStub) -> None:
    await stub.Wake(pb.WakeRequest(), timeout=COPY_SECONDS)


async def _discover(stub: TextGenerationServiceStub) -> list[str]:
    answer: Any = await stub.ServiceDiscovery(pb.ServiceDiscoveryRequest(), timeout=ANSWER_SECONDS)
    return list(answer.urls)


async def _ranks(addresses: Sequence[str], tls: MutualTls | None, stack: AsyncExitStack) -> list[_Rank]:
    """All ranks, with channels that `stack` closes; rank 0 is asked for them where it stands alone."""

    async def connect(number: int, address: str) -> _Rank:
        return _Rank(number, address, await stack.enter_async_context(_channel(address, tls)))

    if len(addresses) == 1:
        first = await connect(0, addresses[0])
        addresses = await first.call(_discover) or addresses
        if len(addresses) == 1:
            return [first]
    return [await connect(number, address) for number, address in enumerate(addresses)]


def _channel(address: str, tls: MutualTls | None) -> grpc.aio.Channel:
    # A pool of its own: a channel that failed to connect backs off, and others to the same address with it.
    options = [("grpc.use_local_subchannel_pool", 1)]
    if address.startswith("unix://"):
        return grpc.aio.insecure_channel("unix:" + address.removeprefix("unix://"), options=options)
    target = address.removeprefix("tcp://")
    if tls is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, tls.channel_credentials(), options=options)


async def _on_all(ranks: Sequence[_Rank], call: Call[T]) -> list[T | FunitelError]:
    """The answer of every rank, or its error: none is left while it works."""

    async def ask(rank: _Rank) -> T | FunitelError:
        try:
            return await rank.call(call)
        except FunitelError as error:
            return error

    return list(await asyncio.gather(*map(ask, ranks)))
