"""What every shard answers over gRPC, whatever it computes. Knows no tensors."""

from typing import Any, NoReturn, TypeAlias

import grpc

from funitel.proto import generate_pb2 as pb
from funitel.proto import generate_pb2_grpc, wire
from funitel.proto.errors import FunitelError
from funitel.proto.step import ShardInfo

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class ShardServicer(generate_pb2_grpc.TextGenerationServiceServicer):
    """The calls of `generate.v3.TextGenerationService` that never wait for the compute thread."""

    def __init__(self, info: ShardInfo, urls: list[str]) -> None:
        self._info = info
        self._urls = urls

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


async def abort(context: Context, error: FunitelError) -> NoReturn:
    """End a call with the gRPC status of an error."""
    await context.abort(error.grpc_status, error.message)
    raise AssertionError("abort raises")
