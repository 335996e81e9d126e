"""Calls that change state, whichever way they come: run on the compute thread in order, put into words beside it.

They begin in the order of their `step_seq` where the router numbers them, in order of arrival otherwise. The next one
is at hand on the compute thread before the last has ended; what that one found is described and encoded on the event
loop meanwhile. Knows messages, but neither gRPC nor sockets: `server` and `step_server` carry them.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor as ThreadExecutor
from typing import TypeVar

from funitel.model_server.executor import ComputedStep, Executor
from funitel.model_server.step_order import StepOrder
from funitel.proto import generate_pb2 as pb
from funitel.proto import wire
from funitel.proto.errors import FunitelError, ShardFailed, StepFailed

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
Response = TypeVar("Response", pb.PrefillResponse, pb.DecodeResponse)


class Calls:
    """The calls of one rank. Event loop only; each returns a future, which fails with a FunitelError.

    A caller that gives a future up stops nothing: other ranks run the call too, and later ones build on it.
    `on_fatal` is told of failures after which this process cannot go on: the ranks have lost each other.
    """

    def __init__(
        self,
        executor: Executor,
        world_size: int,
        compute: ThreadExecutor,
        on_fatal: Callable[[FunitelError], None],
    ) -> None:
        self._executor = executor
        self._world_size = world_size
        self._compute = compute
        self._on_fatal = on_fatal
        self._order = StepOrder()

    def clear_cache(self, request: pb.ClearCacheRequest) -> "asyncio.Future[pb.ClearCacheResponse]":
        """Drop one or all cached batches; dropping all starts the numbering again."""
        if request.HasField("id"):
            batch_id = request.id
            return self._run(
                _step_seq(request), lambda: self._executor.clear(batch_id), lambda _: pb.ClearCacheResponse()
            )

        def encode(_: None) -> pb.ClearCacheResponse:
            self._order.reset()
            return pb.ClearCacheResponse()

        return self._run(None, self._executor.clear, encode)

    def filter_batch(self, request: pb.FilterBatchRequest) -> "asyncio.Future[pb.FilterBatchResponse]":
        """Keep some rows of a cached batch."""
        step_seq = _step_seq(request)
        return self._run(
            step_seq,
            lambda: self._executor.filter(request.batch_id, request.request_ids, is_ahead=step_seq is not None),
            lambda kept: pb.FilterBatchResponse(batch=wire.encode_cached(kept)),
        )

    def warmup(self, request: pb.WarmupRequest) -> "asyncio.Future[pb.WarmupResponse]":
        """Size the pool."""
        starts = [wire.decode_sequence(message) for message in request.batch.requests]
        limits = wire.decode_warmup_limits(request)
        return self._run(None, lambda: self._executor.warmup(starts, limits), wire.encode_warmup_result)

    def prefill(self, request: pb.PrefillRequest) -> "asyncio.Future[pb.PrefillResponse]":
        """Take a batch in and run one step."""
        starts = [wire.decode_sequence(message) for message in request.batch.requests]
        cached = wire.decode_cached(request.cached_batch) if request.HasField("cached_batch") else None
        rows = wire.decode_rows(request.rows)
        step_seq, batch_id = _step_seq(request), request.batch.id
        return self._run(
            step_seq,
            lambda: self._executor.compute_prefill(batch_id, starts, cached, rows, is_ahead=step_seq is not None),
            lambda step: _encoded(step, pb.PrefillResponse()),
        )

    def decode(self, request: pb.DecodeRequest) -> "asyncio.Future[pb.DecodeResponse]":
        """Run one step of cached batches."""
        cached = [wire.decode_cached(message) for message in request.batches]
        rows = wire.decode_rows(request.rows)
        step_seq = _step_seq(request)
        return self._run(
            step_seq,
            lambda: self._executor.compute_decode(cached, rows, is_ahead=step_seq is not None),
            lambda step: _encoded(step, pb.DecodeResponse()),
        )

    def _run(self, step_seq: int | None, call: Callable[[], T], encode: Callable[[T], R]) -> "asyncio.Future[R]":
        """Run `call` on the compute thread in its turn, then `encode` what it returns, here."""
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[R] = loop.create_future()

        def compute() -> None:
            try:
                computed = call()
            except Exception as error:
                loop.call_soon_threadsafe(fail, error)
            else:
                loop.call_soon_threadsafe(take, computed)

        def take(computed: T) -> None:
            try:
                encoded = encode(computed)
            except Exception as error:
                fail(error)
            else:
                if not answered.done():
                    answered.set_result(encoded)

        def fail(error: Exception) -> None:
            failure = self._failure(error)
            if not answered.done():
                answered.set_exception(failure)

        def begin() -> None:
            self._compute.submit(compute)

        self._order.begin(step_seq, begin, fail)
        return answered

    def _failure(self, error: Exception) -> FunitelError:
        """What a caller is told of an exception; a fatal one is told of here."""
        if isinstance(error, FunitelError):
            if isinstance(error, ShardFailed):
                self._on_fatal(error)
            return error
        logger.error("step failed", exc_info=error)
        failure = StepFailed(f"{type(error).__name__}: {error}")
        if self._world_size > 1:  # the other ranks may be waiting inside a collective for ever
            self._on_fatal(failure)
        return failure


def _step_seq(
    request: pb.PrefillRequest | pb.DecodeRequest | pb.FilterBatchRequest | pb.ClearCacheRequest,
) -> int | None:
    return request.step_seq if request.HasField("step_seq") else None


def _encoded(step: ComputedStep, response: Response) -> Response:
    wire.encode_result(step.describe(), response)
    return response
