"""The scheduler: which sequences compute how many tokens in the next step. Pure: no I/O, no torch, no clock of its own.

`preempt`, then `schedule` give a plan, `commit` takes its result. Prompts longer than the budget are chunked and share
the step with running sequences; blocks are granted as sequences grow; when none is left a sequence gives its blocks
back and waits to be resumed. Who is next and who gives way depends on what each key was given (`waiting`). Full blocks
are published once computed, and a sequence that begins with the same tokens starts behind them.

`schedule` may be called again while steps are *in flight*: planned, and not committed yet. It plans over what they
promise (`Sequence.ahead`): the tokens they compute, one token for each sequence whose known tokens they complete, an
end for one that has all it may have. Results are committed in the order of the plans, and may exceed the promise: of a
forced span the step that was planned meanwhile computes one token, and nothing of a sequence that has ended.

Blocks of a sequence that leaves are free at once, though a step in flight may still write to them. Whoever is granted
them is granted them by a later step, which the shards execute later, and in which their old owner has no row. What can
be found by its content is published only when committed, and is full: nobody writes there any more.
"""

from collections import Counter, deque
from collections.abc import Sequence as Seq

from funitel.proto.step import Generation, RowUpdate, SequenceStart, StepResult
from funitel.router.blocks import BlockAllocator
from funitel.router.chunking import ChunkBudget, StepLoad
from funitel.router.entrance import Entrance
from funitel.router.giving_way import GivingWay
from funitel.router.plan import Policy, StepPlan
from funitel.router.sequence import Sequence
from funitel.router.step_time import StepTimeModel
from funitel.router.waiting import Shares, WaitingQueue


class Scheduler:
    """Waiting and running sequences over one block pool."""

    def __init__(self, policy: Policy, blocks: BlockAllocator) -> None:
        self.policy = policy
        self.blocks = blocks
        self.step_time = StepTimeModel(policy.target_gap_seconds)
        self.shares = Shares()
        self.waiting = WaitingQueue(self.shares)
        self.running: dict[int, Sequence] = {}  # by id, oldest first
        self.num_preempted = 0
        self._entrance = Entrance(policy, blocks, self.waiting, self.running)
        self._giving_way = GivingWay(self.shares, self._entrance, self.running)
        self._in_flight: deque[StepPlan] = deque()  # oldest first
        self._steps_since_join = 0

    @property
    def can_resume(self) -> bool:
        """Whether a sequence can go on behind tokens that it has got already, here or elsewhere."""
        return not self.policy.is_plain

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.shares.join(sequence.request.key)
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, finished or cancelled, wherever it is; its blocks are free at once."""
        if self.running.pop(sequence.id, None) is None:
            if sequence not in self.waiting:
                return
            self.waiting.remove(sequence)
        self.shares.leave(sequence.request.key)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.blocks.free(sequence.blocks)
        sequence.blocks.clear()

    # Planning -------------------------------------------------------------------------------------------------------

    def preempt(self) -> None:
        """Take blocks back until every other sequence can compute what it holds, and room for a key short of its share.

        To be called, and the rows of preempted sequences dropped on the shard, before `schedule`. Only with no step in
        flight: what a sequence is resumed from must be known.
        """
        while not self._in_flight and (sequence := self._next_to_give_way()) is not None:
            self._preempt(sequence)

    def preempt_all(self) -> None:
        """Take every running sequence's blocks back; all wait to be resumed, in the order they had."""
        assert not self._in_flight, "steps in flight come first"
        for sequence in tuple(self.running.values()):
            self._preempt(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        del self.running[sequence.id]
        self._release(sequence)
        sequence.num_repeated += sequence.num_computed
        sequence.num_computed = 0
        self.waiting.add(sequence)
        self.num_preempted += 1

    def _next_to_give_way(self) -> Sequence | None:
        """Who is to be preempted: while blocks are missing, or another key has not had its share of what is taken."""
        if self._missing_blocks() > self.blocks.num_free:
            return self._giving_way.to_growth()
        if not self.waiting or self.policy.is_plain:
            return None
        return self._giving_way.to_newcomer()

    def _missing_blocks(self) -> int:
        """Blocks to be granted before every running sequence can compute what it holds."""
        size = self.blocks.block_size
        missing = 0
        for sequence in self.running.values():
            computed, pending = sequence.ahead()
            missing += max(0, -(-(computed + pending) // size) - len(sequence.blocks))
        return missing

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None when there is nothing to compute before a step in flight is committed."""
        if self._in_flight and self._next_to_give_way() is not None:
            return None  # what is in flight comes first
        if not self.policy.is_chunked:
            return self._schedule_unchunked()
        return self._mixed_step(self._chunk_budget(), may_enter=True)

    def _mixed_step(self, budget: ChunkBudget, *, may_enter: bool) -> StepPlan | None:
        """Let every decoding sequence compute a token, and share `budget` among prompts and forced spans.

        One that ends with a step in flight computes nothing.
        """
        computed: dict[int, int] = {}
        told: dict[int, tuple[tuple[int, ...], int]] = {}  # blocks granted, tokens pending
        hungry: list[Sequence] = []
        for i, sequence in self.running.items():
            begun, pending = sequence.ahead()
            if not pending:
                continue
            granted = self._grant(sequence, begun + pending)
            computed[i] = int(sequence.brings_token(begun, pending))
            self.shares.charge(sequence, computed[i])
            if pending > computed[i]:
                hungry.append(sequence)
            if granted or pending > 1:
                told[i] = granted, pending
        starts = self._share_out(budget, hungry, computed, may_enter=may_enter)
        rows = [RowUpdate(i, granted, computed[i] if pending > 1 else None) for i, (granted, pending) in told.items()]
        return self._plan(starts, rows, computed, budget)

    def _grant(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        """Give a sequence the blocks that its first `num_tokens` need; returns the new ones."""
        missing = self.blocks.blocks_for(num_tokens) - len(sequence.blocks)
        if missing <= 0:
            return ()
        granted = self.blocks.allocate(missing)
        sequence.blocks.extend(granted)
        return granted

    def _share_out(
        self, budget: ChunkBudget, hungry: list[Sequence], computed: dict[int, int], *, may_enter: bool
    ) -> list[SequenceStart]:
        """Give `budget` to running sequences that have more to compute and to waiting ones, in fair order.

        Of one key, those that run come first. The first that finds no room keeps all behind it out.
        """
        starts: list[SequenceStart] = []
        passed_over: Counter[bytes] = Counter()
        while not budget.is_spent:
            found = self._entrance.next_ready(passed_over) if may_enter else None
            oldest = min(hungry, key=self._level, default=None)
            if oldest is not None and (found is None or self._level(oldest) <= self._level(found[0])):
                hungry.remove(oldest)
                self._go_on(oldest, budget, computed)
            elif found is not None:
                newcomer, prefix = found
                num_cached = len(prefix) * self.blocks.block_size
                first = budget.fit(num_cached, newcomer.num_known - num_cached)
                may_enter = not (starts and newcomer.enters_alone) and self._entrance.has_room(newcomer, prefix, first)
                if may_enter:
                    self._entrance.take(newcomer, prefix)
                    self.running[newcomer.id] = newcomer
                    computed[newcomer.id] = budget.take(num_cached, newcomer.num_pending)
                    self.shares.charge(newcomer, computed[newcomer.id])
                    starts.append(self._entrance.start(newcomer, computed[newcomer.id]))
                    may_enter = not newcomer.enters_alone
            else:
                break
        return starts

    def _go_on(self, sequence: Sequence, budget: ChunkBudget, computed: dict[int, int]) -> None:
        """Let a running sequence take what it can of `budget`."""
        begun = computed[sequence.id]
        num_computed, pending = sequence.ahead()
        count = budget.take(num_computed + begun, pending - begun)
        computed[sequence.id] += count
        self.shares.charge(sequence, count)

    def _level(self, sequence: Sequence) -> tuple[int, int]:
        return self.shares.level(sequence.request.key)

    def _schedule_unchunked(self) -> StepPlan | None:
        """Either a prefill of whole prompts by themselves, or a decode of everything that runs."""
        most = self.policy.max_batch_prefill_tokens
        if self._should_join():
            budget = ChunkBudget(most)
            computed: dict[int, int] = {}
            starts = self._share_out(budget, [], computed, may_enter=True)
            if starts:
                self._steps_since_join = 0
                return self._plan(starts, [], computed, budget, is_alone=True)
        plan = self._mixed_step(ChunkBudget(most, load=self._decode_load()), may_enter=False)
        if plan is not None:
            self._steps_since_join += 1
        return plan

    @property
    def reason_to_join(self) -> str:
        """Why sequences that the next step lets in would join running ones, in TGI's words."""
        if self.policy.is_chunked:
            return "chunking"
        return "wait_exceeded" if self._has_waited_long else "backpressure"

    @property
    def _has_waited_long(self) -> bool:
        """Without chunked prefill: whether so many steps passed that who waits is let in whatever the ratio."""
        return self._steps_since_join >= self.policy.max_waiting_tokens

    def _should_join(self) -> bool:
        if not self.running or self._has_waited_long:
            return True
        return len(self.waiting) >= max(1, self.policy.waiting_served_ratio * len(self.running))

    def _plan(
        self,
        starts: Seq[SequenceStart],
        rows: Seq[RowUpdate],
        computed: dict[int, int],
        budget: ChunkBudget,
        is_alone: bool = False,
    ) -> StepPlan | None:
        if not computed:
            return None
        plan = StepPlan(tuple(starts), tuple(rows), computed, budget.load, is_alone)
        self._in_flight.append(plan)
        for sequence_id, count in computed.items():
            self.running[sequence_id].in_flight.append(count)
        return plan

    def _chunk_budget(self) -> ChunkBudget:
        return self.step_time.budget(self.policy.max_batch_prefill_tokens, self._decode_load())

    def _decode_load(self) -> StepLoad:
        """What the sequences that are already decoding make of the next step."""
        contexts = [s.num_known for s in self.running.values() if s.brings_token(*s.ahead())]
        return StepLoad(len(contexts), sum(contexts))

    def cached_prefix_len(self, sequence: Sequence) -> int:
        """Tokens at the beginning of a sequence, whoever has it, that are found computed here right now."""
        return len(self._entrance.prefix(sequence)) * self.blocks.block_size

    @property
    def load_tokens(self) -> int:
        """Tokens known of every sequence that runs or waits here."""
        return sum(sequence.num_known for sequence in (*self.running.values(), *self.waiting))

    # Results --------------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, seconds: float) -> list[tuple[Sequence, Generation]]:
        """Take the result of the oldest step in flight into account; finished sequences leave.

        Returns what to deliver, in plan order. Sequences that have left since the step was planned are skipped. One
        that should have got a token and did not raises KeyError, and nothing is taken into account: the shards have
        diverged from the plan.
        """
        assert self._in_flight, "no step is in flight"
        assert plan is self._in_flight[0], "results come in the order of their plans"
        by_id = {generation.request_id: generation for generation in result.generations}
        for sequence_id, count in plan.computed.items():
            sequence = self.running.get(sequence_id)
            if sequence is not None and sequence.num_pending == count and sequence_id not in by_id:
                raise KeyError(sequence_id)
        self._in_flight.popleft()
        # What the ranks measured, for steps wait for one another; `seconds` when they measured nothing.
        self.step_time.observe(plan.load, result.total_ns / 1e9 or seconds)
        delivered = []
        for sequence_id, count in plan.computed.items():
            sequence = self.running.get(sequence_id)
            if sequence is None:
                continue
            sequence.in_flight.pop(0)
            self._advance(sequence, count)
            if sequence.num_pending > 0:
                continue
            generation = by_id[sequence_id]
            sequence.output_ids.extend(generation.tokens.ids)
            if self.policy.is_plain:  # of several tokens, which were speculated, such a shard has computed all but one
                sequence.num_computed = sequence.num_known - 1
            if generation.finished is not None:
                self.remove(sequence)
            delivered.append((sequence, generation))
        return delivered

    def abandon(self) -> None:
        """Forget the steps in flight: one has failed, and what the others did is not taken into account."""
        self._in_flight.clear()
        for sequence in self.running.values():
            sequence.in_flight.clear()

    def _advance(self, sequence: Sequence, count: int) -> None:
        """Note that `count` more tokens are computed, and publish the blocks they have filled."""
        size = self.blocks.block_size
        first = sequence.num_computed // size
        sequence.num_computed += count
        if self.policy.has_prefix_cache:
            for i in range(first, sequence.num_computed // size):
                self.blocks.publish(sequence.blocks[i], sequence.block_key(i, size))
