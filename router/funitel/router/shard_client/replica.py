"""One replica as the engine sees it: a step goes to every rank, one answer comes back. Event loop only.

It tracks the batches that the ranks keep, so that callers handle sequences only. `Ranks` hides the transport: `shards`
calls processes over gRPC, `funitel.llm` an executor of this process.
"""

from collections.abc import Awaitable, Container
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from funitel.proto.errors import ShardUnsound, SlotsLost
from funitel.proto.step import (
    BlockCopy,
    CachedBatch,
    Capability,
    GrammarType,
    RowUpdate,
    SequenceStart,
    ShardInfo,
    ShardMemory,
    StepResult,
    WarmupLimits,
    WarmupResult,
)
from funitel.proto.takeover.state import HeldBatch
from funitel.router.scheduler.plan import StepPlan


class Ranks(Protocol):
    """The ranks of one model copy, called together; results are in rank order.

    Steps, filters and clears are sent by the plain call, before anything is awaited, and executed in the order they
    were sent; several may be in flight where the ranks take numbered calls (`Capability.STEP_SEQ`). A call raises
    InvalidRequest when every rank refused it and changed nothing, StepFailed when it failed and the ranks are sound,
    ShardFailed when a rank is lost.
    """

    infos: tuple[ShardInfo, ...]

    async def warmup(self, sequences: Seq[SequenceStart], limits: WarmupLimits) -> list[WarmupResult]:
        """Size the pool."""

    async def health(self) -> Seq[ShardMemory]:
        """Return the memory that each rank holds, if known; raise ShardFailed unless every rank answers."""

    def prefill(
        self,
        batch_id: int,
        starts: Seq[SequenceStart],
        cached: CachedBatch | None,
        rows: Seq[RowUpdate],
        copies: Seq[BlockCopy],
        step_seq: int | None,
    ) -> Awaitable[tuple[StepResult, ...]]:
        """Add new sequences and run one step, together with `cached` if given."""

    def decode(
        self, batches: Seq[CachedBatch], rows: Seq[RowUpdate], copies: Seq[BlockCopy], step_seq: int | None
    ) -> Awaitable[tuple[StepResult, ...]]:
        """Run one step of cached batches."""

    def filter(self, batch_id: int, request_ids: Seq[int], step_seq: int | None) -> Awaitable[CachedBatch]:
        """Keep some rows of a cached batch."""

    async def compile_grammar(self, kind: GrammarType, text: str) -> None:
        """Compile a grammar beside the steps; a failure leaves steps sound. Raises InvalidRequest for a bad one."""

    async def load_adapter(self, adapter_id: str, path: str) -> int:
        """Load an adapter beside the steps; return the bytes that it takes on all ranks.

        Raises InvalidRequest for one that cannot be served; after a failure no rank has it.
        """

    async def unload_adapter(self, adapter_id: str) -> None:
        """Drop an adapter that no row uses."""

    def clear(self, batch_id: int | None = None, step_seq: int | None = None) -> Awaitable[None]:
        """Drop one cached batch; or all, and restart the numbering of calls."""

    async def dismiss(self, reason: str) -> None:
        """Ask ranks to end that cannot be killed; their answers are ignored from now on."""

    async def close(self) -> None:
        """Close the connections to the ranks."""


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """All ranks' results of one step, in rank order, and their combination."""

    combined: StepResult
    by_rank: tuple[StepResult, ...]
    ended: frozenset[int] = frozenset()  # rows that the ranks dropped with it


@dataclass(frozen=True, slots=True)
class SentStep:
    """A step in flight: its rows, and the future results of the ranks."""

    batch_id: int
    request_ids: tuple[int, ...]
    results: Awaitable[tuple[StepResult, ...]]


class Replica:
    """The ranks of one model copy and the batches they keep.

    `_batches` are those that the ranks will keep once they have executed every call sent, unless rows finish; finished
    rows become known as steps are settled, in the order they were sent.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.infos = ranks.infos
        self.capabilities = frozenset.intersection(*(info.capabilities for info in ranks.infos))
        self.num_stages = 1
        if {Capability.STAGES, Capability.STEP_SEQ, Capability.ROW_UPDATES} <= self.capabilities:
            self.num_stages = max(1, *(info.num_stages for info in ranks.infos))
        self._batches: list[CachedBatch] = []
        self._micro_batches: dict[int, int] = {}  # of which the rows of each batch are, by its id
        self._next_batch_id = 0
        self._step_seq = 0

    @property
    def info(self) -> ShardInfo:
        """Facts all ranks share; those of the last rank, as TGI takes them."""
        return self.infos[-1]

    @property
    def num_batches(self) -> int:
        """Batches the ranks keep."""
        return len(self._batches)

    @property
    def takes_adapters(self) -> bool:
        """Whether adapters can be loaded."""
        return Capability.ADAPTERS in self.capabilities and all(info.max_lora_rank for info in self.infos)

    @property
    def rows(self) -> frozenset[int]:
        """Rows that the ranks will hold once they have executed every call sent, by request id."""
        return frozenset(request_id for batch in self._batches for request_id in batch.request_ids)

    async def warmup(self, sequences: Seq[SequenceStart], limits: WarmupLimits) -> list[WarmupResult]:
        """Size the pool; return every rank's result, in rank order."""
        return await self.ranks.warmup(sequences, limits)

    async def health(self) -> Seq[ShardMemory]:
        """Return the memory that each rank holds, if known; raise ShardFailed unless every rank answers."""
        return await self.ranks.health()

    async def compile_grammar(self, kind: GrammarType, text: str) -> None:
        """Compile a grammar on every rank, so that the first step with it does not wait; may run beside steps."""
        if Capability.GRAMMARS in self.capabilities:
            await self.ranks.compile_grammar(kind, text)

    async def clear(self) -> None:
        """Drop every cached batch on every rank and restart the numbering. No other call may be in flight."""
        self._batches = []
        self._step_seq = 0
        await self.ranks.clear()

    def go_on(self, last_step_seq: int, batches: Seq[HeldBatch]) -> None:
        """Go on with batches that the ranks hold of an earlier router; the next call is numbered `last_step_seq` + 1.

        To be called before any other call.
        """
        ids = [(batch.id, tuple([row.request_id for row in batch.rows])) for batch in batches]
        self._batches = [CachedBatch(batch_id, request_ids) for batch_id, request_ids in ids if request_ids]
        self._micro_batches = {batch.id: 0 for batch in batches}
        self._next_batch_id = max((batch.id + 1 for batch in batches), default=0)
        self._step_seq = last_step_seq

    def drop_all_but(self, keep: Container[int]) -> list[Awaitable[object]]:
        """Drop the rows of all sequences but `keep`; the returned calls only say whether that failed."""
        calls: list[Awaitable[object]] = []
        for batch in tuple(self._batches):
            kept = tuple(request_id for request_id in batch.request_ids if request_id in keep)
            if len(kept) == len(batch.request_ids):
                continue
            self._batches.remove(batch)
            if kept:
                self._batches.append(CachedBatch(batch.id, kept))
                calls.append(self.ranks.filter(batch.id, kept, self._number()))
            else:
                calls.append(self.ranks.clear(batch.id, self._number()))
        return calls

    def send(self, plan: StepPlan) -> SentStep:
        """Send one step to every rank, at once."""
        cached = [each for each in self._batches if self._micro_batches[each.id] == plan.micro_batch]
        starts, copies = plan.starts, plan.copies
        if plan.beams is not None:
            starts, copies = starts + plan.beams.starts, copies + plan.beams.copies
        if not starts:
            batch_id = cached[0].id
            results = self.ranks.decode(cached, plan.rows, copies, self._number())
        else:
            if plan.is_alone:
                cached = []
            assert len(cached) <= 1, "batches are joined by the first decode"
            own_id = self._next_batch_id
            self._next_batch_id += 1
            batch_id = cached[0].id if cached else own_id
            joined = cached[0] if cached else None
            results = self.ranks.prefill(own_id, starts, joined, plan.rows, copies, self._number())
        request_ids = [request_id for batch in cached for request_id in batch.request_ids]
        request_ids += [start.request_id for start in starts]
        self._batches = [batch for batch in self._batches if batch not in cached]
        self._batches.append(CachedBatch(batch_id, tuple(request_ids)))
        self._micro_batches = {batch.id: self._micro_batches.get(batch.id, plan.micro_batch) for batch in self._batches}
        return SentStep(batch_id, tuple(request_ids), results)

    def settle(self, step: SentStep, results: tuple[StepResult, ...]) -> StepAnswer:
        """Apply the results of the oldest step in flight, and combine them as TGI's client does.

        Raises:
            ShardUnsound: ranks disagree, or keep what they were not given.
            SlotsLost: the ranks could not make its copies, and computed nothing.
        """
        if lost := sorted({slot for result in results for slot in result.lost_slots}):
            raise SlotsLost(f"{len(lost)} slots of cached blocks are lost", tuple(lost))
        if len({result.batch and result.batch.request_ids for result in results}) > 1:
            raise ShardUnsound("the shards disagree about which sequences are running")
        ended = self._apply_kept(step, results[-1].batch)
        if len(results) == 1:
            return StepAnswer(results[0], results, ended)
        slowest = max(results, key=lambda result: result.total_ns)
        combined = StepResult(
            generations=tuple(g for result in reversed(results) for g in result.generations),
            batch=results[-1].batch,
            forward_ns=self._in_all_stages([result.forward_ns for result in results]),
            decode_ns=slowest.decode_ns,
            total_ns=self._in_all_stages([result.total_ns for result in results]),
            concat_ns=slowest.concat_ns,
            memories=next((result.memories for result in results if result.memories), ()),
            num_draft_tokens=slowest.num_draft_tokens,
            num_accepted_tokens=slowest.num_accepted_tokens,
        )
        return StepAnswer(combined, results, ended)

    def _in_all_stages(self, spent_ns: Seq[int]) -> int:
        """The time of the slowest rank of each stage, added up; `spent_ns` are those of all ranks."""
        by_stage = [0] * self.num_stages
        for info, spent in zip(self.infos, spent_ns, strict=True):
            place = min(info.stage, self.num_stages - 1)
            by_stage[place] = max(by_stage[place], spent)
        return sum(by_stage)

    def _apply_kept(self, step: SentStep, kept: CachedBatch | None) -> frozenset[int]:
        """Forget rows that the ranks dropped with a step; return their request ids."""
        if kept is not None and kept.id != step.batch_id:
            raise ShardUnsound(f"the shards keep batch {kept.id} of a step of batch {step.batch_id}")
        if kept is not None and kept.request_ids == step.request_ids:
            # Kept as the ranks describe it: TGI's shards expect the same description.
            same = kept.id, kept.request_ids  # it may be joined to another batch since
            self._batches = [kept if (batch.id, batch.request_ids) == same else batch for batch in self._batches]
            return frozenset()
        rows = frozenset(step.request_ids)
        ended = rows.difference(kept.request_ids if kept is not None else ())
        if kept is not None and (unknown := set(kept.request_ids) - rows):
            raise ShardUnsound(f"the shards keep request {min(unknown)}, which was not in the step")
        rest = [
            CachedBatch(batch.id, tuple(request_id for request_id in batch.request_ids if request_id not in ended))
            for batch in self._batches
        ]
        self._batches = [batch for batch in rest if batch.request_ids]
        return ended

    def _number(self) -> int | None:
        if Capability.STEP_SEQ not in self.capabilities:
            return None
        self._step_seq += 1
        return self._step_seq

    async def dismiss(self, reason: str) -> None:
        """Ask ranks to end that cannot be killed; their answers are ignored from now on."""
        await self.ranks.dismiss(reason)

    async def close(self) -> None:
        """Close the connections to the ranks."""
        await self.ranks.close()
