"""The gRPC servicer of an encoder: calls run on the compute thread in the order they come; Health never waits."""

import asyncio
import logging
from concurrent.futures import Executor as ThreadExecutor
from typing import Any, NoReturn, TypeAlias

import grpc

from funitel.model_server.encoder.executor import EncoderExecutor
from funitel.proto import encoder_wire, generate_pb2_grpc, wire
from funitel.proto import generate_pb2 as pb
from funitel.proto.errors import FunitelError, StepFailed
from funitel.proto.step import ShardInfo

logger = logging.getLogger(__name__)

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class EncoderServicer(generate_pb2_grpc.TextGenerationServiceServicer):
    """What of `generate.v3.TextGenerationService` an encoder answers; the rest is UNIMPLEMENTED."""

    def __init__(self, executor: EncoderExecutor, info: ShardInfo, urls: list[str], compute: ThreadExecutor) -> None:
        self._executor = executor
        self._info = info
        self._urls = urls
        self._compute = compute

    async def Health(self, request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
        """Answer at once: the process lives and its event loop turns."""
        return pb.HealthResponse()

    async def Info(self, request: pb.InfoRequest, context: Context) -> pb.InfoResponse:
        """Static facts."""
        return wire.encode_info(self._info)

    async def ServiceDiscovery(
        self, request: pb.ServiceDiscoveryRequest, context: Context
    ) -> pb.ServiceDiscoveryResponse:
        """The address of the one rank."""
        return pb.ServiceDiscoveryResponse(urls=self._urls)

    async def ClearCache(self, request: pb.ClearCacheRequest, context: Context) -> pb.ClearCacheResponse:
        """Nothing is kept between calls."""
        return pb.ClearCacheResponse()

    async def Encode(self, request: pb.EncodeRequest, context: Context) -> pb.EncodeResponse:
        """Compute one batch of texts."""
        loop = asyncio.get_running_loop()
        try:
            task, inputs = encoder_wire.decode_inputs(request)
            result = await loop.run_in_executor(self._compute, self._executor.encode, task, inputs)
        except FunitelError as error:
            await _abort(context, error)
        except Exception as error:
            logger.exception("encoding failed")
            await _abort(context, StepFailed(f"{type(error).__name__}: {error}"))
        return encoder_wire.encode_rows(result)


async def _abort(context: Context, error: FunitelError) -> NoReturn:
    await context.abort(error.grpc_status, error.message)
    raise AssertionError("abort raises")
