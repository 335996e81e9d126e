"""One replica as the engine sees it: a step goes to every rank, one answer comes back. Event loop only.

It tracks which batches the ranks keep, so that callers think in sequences. How a call reaches the ranks is theirs to
know: `shards` calls processes over gRPC, `funitel.llm` an executor of this process.
"""

from collections.abc import Awaitable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from funitel.proto.errors import ShardFailed
from funitel.proto.step import (
    CachedBatch,
    Capability,
    GrammarType,
    RowUpdate,
    SequenceStart,
    ShardInfo,
    StepResult,
    WarmupLimits,
    WarmupResult,
)
from funitel.router.scheduler import StepPlan


class Ranks(Protocol):
    """The ranks of one model copy, called together; results are in rank order.

    Steps are sent by the plain call, before anything is awaited. A call raises InvalidRequest when every rank refused
    it and changed nothing, StepFailed when it failed and the ranks are sound, ShardFailed when a rank is lost.
    """

    infos: tuple[ShardInfo, ...]

    async def warmup(self, sequences: Seq[SequenceStart], limits: WarmupLimits) -> list[WarmupResult]:
        """Size the pool."""
        ...

    async def health(self) -> None:
        """Raise ShardFailed unless every rank answers."""
        ...

    def prefill(
        self,
        batch_id: int,
        starts: Seq[SequenceStart],
        cached: CachedBatch | None,
        rows: Seq[RowUpdate],
        step_seq: int | None,
    ) -> Awaitable[tuple[StepResult, ...]]:
        """Take new sequences in and run one step, together with `cached` if given."""
        ...

    def decode(
        self, batches: Seq[CachedBatch], rows: Seq[RowUpdate], step_seq: int | None
    ) -> Awaitable[tuple[StepResult, ...]]:
        """Run one step of cached batches."""
        ...

    async def filter(self, batch_id: int, request_ids: Seq[int], step_seq: int | None) -> CachedBatch:
        """Keep some rows of a cached batch."""
        ...

    async def compile_grammar(self, kind: GrammarType, text: str) -> None:
        """Compile a grammar beside the steps; a failure leaves steps sound. Raises InvalidRequest for a bad one."""
        ...

    async def clear(self, batch_id: int | None = None, step_seq: int | None = None) -> None:
        """Drop one cached batch; or all, and begin the numbering of calls again."""
        ...

    async def close(self) -> None:
        """Let go of the ranks."""
        ...


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """All ranks' results of one step, in rank order, and their combination."""

    combined: StepResult
    by_rank: tuple[StepResult, ...]


class Replica:
    """The ranks of one model copy and the batches they keep. One call that changes state at a time."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.infos = ranks.infos
        self.capabilities = frozenset.intersection(*(info.capabilities for info in ranks.infos))
        self._batches: list[CachedBatch] = []
        self._next_batch_id = 0
        self._step_seq = 0

    @property
    def info(self) -> ShardInfo:
        """Facts all ranks share; those of the last rank, as TGI takes them."""
        return self.infos[-1]

    @property
    def held_ids(self) -> frozenset[int]:
        """Sequences the ranks hold rows of."""
        return frozenset(request_id for batch in self._batches for request_id in batch.request_ids)

    @property
    def num_batches(self) -> int:
        """Batches the ranks keep."""
        return len(self._batches)

    async def warmup(self, sequences: Seq[SequenceStart], limits: WarmupLimits) -> list[WarmupResult]:
        """Size the pool; every rank's result, in rank order."""
        return await self.ranks.warmup(sequences, limits)

    async def health(self) -> None:
        """Raise ShardFailed unless every rank answers."""
        await self.ranks.health()

    async def compile_grammar(self, kind: GrammarType, text: str) -> None:
        """Compile a grammar on every rank, so that the step it comes with does not wait; may run beside steps."""
        if Capability.GRAMMARS in self.capabilities:
            await self.ranks.compile_grammar(kind, text)

    async def clear(self) -> None:
        """Drop every cached batch on every rank; numbering starts again."""
        self._batches = []
        self._step_seq = 0
        await self.ranks.clear()

    async def retain(self, keep: frozenset[int]) -> None:
        """Drop the rows of all sequences but `keep`."""
        for batch in tuple(self._batches):
            kept = [request_id for request_id in batch.request_ids if request_id in keep]
            if len(kept) == len(batch.request_ids):
                continue
            self._batches.remove(batch)
            if kept:
                self._batches.append(await self.ranks.filter(batch.id, kept, self._number()))
            else:
                await self.ranks.clear(batch.id, self._number())

    async def step(self, plan: StepPlan) -> StepAnswer:
        """Send one step at once, wait for every rank, combine the answers as TGI's client does.

        Raises:
            InvalidRequest: every rank refused the call before changing anything.
            StepFailed: the call failed and the ranks are sound.
            ShardFailed: a rank does not answer, or ranks disagree.
            After any of them what the ranks hold is unknown here: `clear`.
        """
        results = await self._send_step(plan)
        if len({result.batch and result.batch.request_ids for result in results}) > 1:
            raise ShardFailed("the shards disagree about which sequences are running")
        if results[-1].batch is not None:
            self._batches.append(results[-1].batch)
        slowest = max(results, key=lambda result: result.total_ns)
        combined = StepResult(
            generations=tuple(g for result in reversed(results) for g in result.generations),
            batch=results[-1].batch,
            forward_ns=slowest.forward_ns,
            decode_ns=slowest.decode_ns,
            total_ns=slowest.total_ns,
            concat_ns=slowest.concat_ns,
        )
        return StepAnswer(combined, results)

    def _send_step(self, plan: StepPlan) -> Awaitable[tuple[StepResult, ...]]:
        """Send without yielding to the event loop: what was planned is what is sent."""
        if not plan.starts:
            batches, self._batches = self._batches, []
            return self.ranks.decode(batches, plan.rows, self._number())
        batch_id = self._next_batch_id
        self._next_batch_id += 1
        cached = None
        if self._batches and not plan.is_alone:
            assert len(self._batches) == 1, "batches are joined by the first decode"
            cached = self._batches.pop()
        return self.ranks.prefill(batch_id, plan.starts, cached, plan.rows, self._number())

    def _number(self) -> int | None:
        if Capability.STEP_SEQ not in self.capabilities:
            return None
        self._step_seq += 1
        return self._step_seq

    async def close(self) -> None:
        """Let go of the ranks."""
        await self.ranks.close()
