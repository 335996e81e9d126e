"""Adapt a local executor to the engine's `Ranks` interface: the calls of a shard, made on a thread instead of gRPC."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from funitel.llm.workers.threads import ComputeThread
from funitel.model_server.executor.executor import Executor
from funitel.model_server.executor.interface import PendingStep
from funitel.proto.errors import StepFailed, translating
from funitel.proto.step import (
    BlockCopy,
    CachedBatch,
    GrammarType,
    RowUpdate,
    SequenceStart,
    ShardInfo,
    ShardMemory,
    StepResult,
    WarmupLimits,
    WarmupResult,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")


class LocalRanks:
    """One rank on one compute thread; calls run in the order in which they are made."""

    def __init__(self, executor: Executor, info: ShardInfo, compute: ComputeThread) -> None:
        self.infos: tuple[ShardInfo, ...] = (info,)
        self._executor = executor
        self._compute = compute
        self._answers = ComputeThread() if executor.sampling.describing_waits else None
        self._describing = asyncio.Lock()  # first come, first served

    async def warmup(self, sequences: Sequence[SequenceStart], limits: WarmupLimits) -> list[WarmupResult]:
        """Size the pool."""
        return [await self._run(lambda: self._executor.warmup(sequences, limits))]

    async def health(self) -> tuple[ShardMemory, ...]:
        """No memory is reported: the model is in the caller's process."""
        return ()

    def prefill(
        self,
        batch_id: int,
        starts: Sequence[SequenceStart],
        cached: CachedBatch | None,
        rows: Sequence[RowUpdate],
        copies: Sequence[BlockCopy],
        step_seq: int | None,
    ) -> Awaitable[tuple[StepResult, ...]]:
        """Add new sequences and run one step."""
        return self._described(
            lambda: self._executor.compute_prefill(
                batch_id, starts, cached, rows, copies, is_ahead=step_seq is not None
            )
        )

    def decode(
        self,
        batches: Sequence[CachedBatch],
        rows: Sequence[RowUpdate],
        copies: Sequence[BlockCopy],
        step_seq: int | None,
    ) -> Awaitable[tuple[StepResult, ...]]:
        """Run one step of cached batches."""
        return self._described(
            lambda: self._executor.compute_decode(batches, rows, copies, is_ahead=step_seq is not None)
        )

    def filter(self, batch_id: int, request_ids: Sequence[int], step_seq: int | None) -> Awaitable[CachedBatch]:
        """Keep some rows of a cached batch."""
        is_ahead = step_seq is not None
        filtering = self._run(lambda: self._executor.begin_filter(batch_id, request_ids, is_ahead=is_ahead))
        return self._finished(filtering, lambda kept: kept())

    async def compile_grammar(self, kind: GrammarType, text: str) -> None:
        """Compile a grammar between two steps."""
        await self._run(lambda: self._executor.compile_grammar(kind, text))

    async def load_adapter(self, adapter_id: str, path: str) -> int:
        """Load an adapter beside the steps; returns the bytes that it takes."""
        with translating(_step_failed):
            adapter = await asyncio.to_thread(self._executor.load_adapter, adapter_id, path)
        return adapter.weights.num_bytes

    async def unload_adapter(self, adapter_id: str) -> None:
        """Drop an adapter."""
        with translating(_step_failed):
            self._executor.unload_adapter(adapter_id)

    def clear(self, batch_id: int | None = None, step_seq: int | None = None) -> Awaitable[None]:
        """Drop one cached batch, or all."""
        return self._run(lambda: self._executor.clear(batch_id))

    async def dismiss(self, reason: str) -> None:
        """Do nothing: the model is in the caller's process."""

    async def close(self) -> None:
        """End the threads after the step in flight."""
        self._compute.close()
        if self._answers is not None:
            self._answers.close()

    def _described(self, call: Callable[[], PendingStep]) -> Awaitable[tuple[StepResult, ...]]:
        """Queue a step now; its result is described while the next step computes."""
        return self._finished(self._run(call), lambda step: (step.describe(),))

    async def _finished(self, computing: Awaitable[T], finish: Callable[[T], R]) -> R:
        """Apply `finish` to the result, on the caller's thread, or on another if it blocks; in the order of the calls.

        Texts of tokens are decoded with state: a step that is described before the one ahead of it would say their
        characters in the wrong order.
        """
        async with self._describing:
            computed = await computing
            if self._answers is None:
                return finish(computed)
            finishing = self._answers.submit(lambda: finish(computed))
        return await _translated(asyncio.wrap_future(finishing))

    def _run(self, call: Callable[[], T]) -> Awaitable[T]:
        """Queue a call now; its exceptions are translated to FunitelError."""
        return _translated(asyncio.wrap_future(self._compute.submit(call)))


async def _translated(future: "asyncio.Future[T]") -> T:
    with translating(_step_failed):
        return await future


def _step_failed(error: Exception) -> StepFailed:
    logger.error("step failed", exc_info=error)
    return StepFailed(f"{type(error).__name__}: {error}")
