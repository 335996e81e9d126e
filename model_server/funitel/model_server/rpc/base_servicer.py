"""The gRPC calls that every shard answers: Health, Info, Dismiss, ServiceDiscovery. Knows no tensors."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import grpc

from funitel.proto import generate_pb2 as pb
from funitel.proto import generate_pb2_grpc, wire
from funitel.proto.errors import FunitelError
from funitel.proto.step import ShardInfo, ShardMemory

End: TypeAlias = Callable[[str], None]
MAX_REASON = 500  # characters of a reason that are printed


def end_process(reason: str) -> NoReturn:
    """End at once, with the reason in the last line; a compute thread that hangs is not waited for."""
    said = "".join(character if character.isprintable() else " " for character in reason[:MAX_REASON])
    print(f"error: the router takes no answer of this shard any more: {said}", file=sys.stderr, flush=True)
    os._exit(1)


Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class ShardServicer(generate_pb2_grpc.TextGenerationServiceServicer):
    """The calls of `generate.v3.TextGenerationService` that never wait for the compute thread."""

    def __init__(self, info: ShardInfo, urls: list[str], end: End = end_process) -> None:
        self._info = info
        self._urls = urls
        self._end = end

    @property
    def busy_ns(self) -> int:
        """Nanoseconds since the call in flight was begun, where that is known; 0 for none."""
        return 0

    async def Health(self, request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
        """Answer at once: the process lives and its event loop turns. Says what memory it holds, and if it computes."""
        health = wire.encode_memory(_memory())
        health.busy_ns = self.busy_ns
        return health

    async def Dismiss(self, request: pb.DismissRequest, context: Context) -> pb.DismissResponse:
        """End the process, whatever the compute thread does: the router takes no answer of it any more."""
        self._end(request.reason)
        return pb.DismissResponse()

    async def Info(self, request: pb.InfoRequest, context: Context) -> pb.InfoResponse:
        """Static facts."""
        return wire.encode_info(self._info)

    async def ServiceDiscovery(
        self, request: pb.ServiceDiscoveryRequest, context: Context
    ) -> pb.ServiceDiscoveryResponse:
        """Addresses of all ranks."""
        return pb.ServiceDiscoveryResponse(urls=self._urls)


def _memory() -> ShardMemory:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    resident, peak = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return ShardMemory(resident, peak)


async def abort(context: Context, error: FunitelError) -> NoReturn:
    """End a call with the gRPC status of an error."""
    await context.abort(error.grpc_status, error.message)
    raise AssertionError("abort raises")
