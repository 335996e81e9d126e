"""The gRPC servicer of an encoder: calls run on the compute thread in order of arrival; Health never waits."""

import asyncio
import logging
from concurrent.futures import Executor as ThreadExecutor

from funitel.model_server.executor.encoder import EncoderExecutor
from funitel.model_server.rpc.base_servicer import Context, ShardServicer, abort
from funitel.proto import encoder_wire
from funitel.proto import generate_pb2 as pb
from funitel.proto.errors import FunitelError, StepFailed, translating
from funitel.proto.step import ShardInfo

logger = logging.getLogger(__name__)


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
        loop = asyncio.get_running_loop()
        try:
            task, inputs = encoder_wire.decode_inputs(request)
            with translating(_failure):
                result = await loop.run_in_executor(self._compute, self._executor.encode, task, inputs)
        except FunitelError as error:
            await abort(context, error)
        return encoder_wire.encode_rows(result)


def _failure(error: Exception) -> StepFailed:
    logger.error("encoding failed", exc_info=error)
    return StepFailed(f"{type(error).__name__}: {error}")
