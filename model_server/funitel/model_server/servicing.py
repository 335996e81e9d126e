"""What every shard answers over gRPC, whatever it computes. Knows no tensors."""

from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import grpc

from funitel.proto import generate_pb2 as pb
from funitel.proto import generate_pb2_grpc, wire
from funitel.proto.errors import FunitelError
from funitel.proto.step import ShardInfo, ShardMemory

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class ShardServicer(generate_pb2_grpc.TextGenerationServiceServicer):
    """The calls of `generate.v3.TextGenerationService` that never wait for the compute thread."""

    def __init__(self, info: ShardInfo, urls: list[str]) -> None:
        self._info = info
        self._urls = urls

    async def Health(self, request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
        """Answer at once: the process lives and its event loop turns. Says what memory it holds, too."""
        return wire.encode_memory(_memory())

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
