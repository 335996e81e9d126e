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
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import ceil

from funitel.proto.step import Generation, RowUpdate, SequenceStart, StepResult
from funitel.router.blocks import BlockAllocator
from funitel.router.chunking import ChunkBudget, StepLoad
from funitel.router.sequence import Sequence
from funitel.router.step_time import StepTimeModel
from funitel.router.waiting import Shares, WaitingQueue

# A newcomer leaves a block free for each running sequence, else it would soon be preempted again; but at most this
# share of the pool, for what is free for growth is not used. On simulated loads of 64 requests for 4 times the pool 84
# to 95 % of it were used without a bound, and 92 to 98 % with it, for some 5 % more tokens computed again.
MOST_RESERVED = 1 / 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Limits and rules of scheduling. `max_*` in tokens or sequences as named."""

    max_batch_prefill_tokens: int
    max_batch_size: int | None = None
    is_chunked: bool = True  # prompts may be split and share steps; else blocks for whole requests at admission
    has_prefix_cache: bool = False  # computed blocks are found again by their tokens
    is_plain: bool = False  # the peer speaks TGI v3 without funitel's additions; never chunked
    waiting_served_ratio: float = 0.3
    max_waiting_tokens: int = 20
    target_gap_seconds: float | None = None  # most time between a running stream's tokens; some plain steps if None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: sequences that enter the shard, decisions about running rows, tokens computed per sequence.

    `is_alone`: running rows sit out; the new ones become a batch of their own.
    """

    starts: tuple[SequenceStart, ...]
    rows: tuple[RowUpdate, ...]
    computed: dict[int, int]
    load: StepLoad  # prompt tokens are all but one for each sequence that was already decoding
    is_alone: bool = False

    @property
    def method(self) -> str:
        """The call of the wire it is sent by, in lower case."""
        return "prefill" if self.starts else "decode"


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
        self._in_flight: deque[StepPlan] = deque()  # oldest first
        self._steps_since_join = 0

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
            return self._last(self.running.values(), self._blocks_held())
        if not self.waiting or self.policy.is_plain:
            return None
        found = self._next_ready(Counter())
        if found is None:
            return None
        newcomer, prefix = found
        needed = self._missing_on_entry(newcomer, prefix)
        if not self._has_slot():
            taken = Counter(sequence.request.key for sequence in self.running.values())
            return self._richer_than(newcomer, 1, taken, dict.fromkeys(self.running, 1))
        if not self._has_blocks(needed, prefix):
            sizes = {sequence.id: len(sequence.blocks) for sequence in self.running.values()}
            return self._richer_than(newcomer, needed, self._blocks_held(), sizes)
        return None

    def _richer_than(
        self, newcomer: Sequence, needed: int, taken: Counter[bytes], sizes: Mapping[int, int]
    ) -> Sequence | None:
        """Who gives way to a newcomer: of a key that was given more, and still has as much taken without the sequence.

        Args:
            newcomer: whose turn it is.
            needed: how much it would take, of whatever is short.
            taken: how much of it each key has.
            sizes: how much of it each running sequence has.
        """
        level, most = self._level(newcomer), taken[newcomer.request.key] + needed
        richer = [
            sequence
            for sequence in self.running.values()
            if self._level(sequence) > level and taken[sequence.request.key] - sizes[sequence.id] >= most
        ]
        return self._last(richer, taken) if richer else None

    def _blocks_held(self) -> Counter[bytes]:
        """How many blocks the sequences of each key hold."""
        held: Counter[bytes] = Counter()
        for sequence in self.running.values():
            held[sequence.request.key] += len(sequence.blocks)
        return held

    def _last(self, sequences: Iterable[Sequence], taken: Mapping[bytes, int]) -> Sequence:
        """Who gives way first: of the key that has taken most and was given most, the least urgent, then the newest."""

        def place(sequence: Sequence) -> tuple[float, ...]:
            request = sequence.request
            given = self.shares.tokens_of(request.key)
            return taken[request.key], given, request.priority, sequence.arrived, sequence.id

        return max(sequences, key=place)

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
            found = self._next_ready(passed_over) if may_enter else None
            oldest = min(hungry, key=self._level, default=None)
            if oldest is not None and (found is None or self._level(oldest) <= self._level(found[0])):
                hungry.remove(oldest)
                self._go_on(oldest, budget, computed)
            elif found is not None:
                newcomer, prefix = found
                num_cached = len(prefix) * self.blocks.block_size
                first = budget.fit(num_cached, newcomer.num_known - num_cached)
                may_enter = not (starts and newcomer.enters_alone) and self._has_room(newcomer, prefix, first)
                if may_enter:
                    self._enter(newcomer, prefix)
                    computed[newcomer.id] = budget.take(num_cached, newcomer.num_pending)
                    self.shares.charge(newcomer, computed[newcomer.id])
                    starts.append(self._start(newcomer, computed[newcomer.id]))
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

    def _next_ready(self, passed_over: Counter[bytes]) -> tuple[Sequence, tuple[int, ...]] | None:
        """Who is next of those that wait, and the published blocks it begins behind.

        One whose next block a running sequence is computing right now is passed over until that block is published.
        """
        while (sequence := self.waiting.first(passed_over)) is not None:
            prefix = self._prefix(sequence)
            if not self._is_being_computed(sequence, len(prefix)):
                return sequence, prefix
            passed_over[sequence.request.key] += 1
        return None

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
    def has_waited_long(self) -> bool:
        """Without chunked prefill: whether so many steps passed that who waits is let in whatever the ratio."""
        return self._steps_since_join >= self.policy.max_waiting_tokens

    def _should_join(self) -> bool:
        if not self.running or self.has_waited_long:
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

    def _prefix(self, sequence: Sequence) -> tuple[int, ...]:
        """Published blocks a waiting sequence can begin behind; its last known token is always computed."""
        if not self._may_share(sequence):
            return ()
        size = self.blocks.block_size
        return self.blocks.match(sequence.block_key(i, size) for i in range((sequence.num_known - 1) // size))

    def cached_prefix_len(self, sequence: Sequence) -> int:
        """Tokens at the beginning of a sequence, whoever has it, that are found computed here right now."""
        return len(self._prefix(sequence)) * self.blocks.block_size

    @property
    def load_tokens(self) -> int:
        """Tokens known of every sequence that runs or waits here."""
        return sum(sequence.num_known for sequence in (*self.running.values(), *self.waiting))

    def _may_share(self, sequence: Sequence) -> bool:
        return self.policy.has_prefix_cache and not sequence.request.prefill_logprobs

    def _is_being_computed(self, sequence: Sequence, index: int) -> bool:
        size = self.blocks.block_size
        if not self._may_share(sequence) or (index + 1) * size >= sequence.num_known:
            return False
        key = sequence.block_key(index, size)
        return any(
            other.num_pending > 1 and other.num_known >= (index + 1) * size and other.block_key(index, size) == key
            for other in self.running.values()
        )

    def _has_room(self, sequence: Sequence, prefix: Seq[int], count: int) -> bool:
        """Whether a waiting sequence may enter, behind `prefix`, to compute `count` tokens first."""
        # A resumed sequence may have outgrown the budget: it enters first, and takes the rest in its next step.
        whole = min(sequence.num_known - len(prefix) * self.blocks.block_size, self.policy.max_batch_prefill_tokens)
        if count < (1 if self.policy.is_chunked else whole):
            return False
        return self._has_slot() and self._has_blocks(self._missing_on_entry(sequence, prefix), prefix)

    def _has_slot(self) -> bool:
        return self.policy.max_batch_size is None or len(self.running) < self.policy.max_batch_size

    def _has_blocks(self, needed: int, prefix: Seq[int]) -> bool:
        reserved = min(len(self.running), ceil(self.blocks.num_blocks * MOST_RESERVED))
        return needed + reserved <= self.blocks.num_free - self.blocks.num_idle(prefix)

    def _enter(self, sequence: Sequence, prefix: Seq[int]) -> None:
        """Make a waiting sequence a running one, behind `prefix`."""
        self.waiting.remove(sequence)
        self.blocks.share(prefix)
        sequence.blocks.extend(prefix)
        sequence.blocks.extend(self.blocks.allocate(self._missing_on_entry(sequence, prefix)))
        sequence.num_computed = sequence.num_cached = len(prefix) * self.blocks.block_size
        sequence.num_repeated = max(0, sequence.num_repeated - sequence.num_computed)
        sequence.was_started = True
        self.running[sequence.id] = sequence

    def _missing_on_entry(self, sequence: Sequence, prefix: Seq[int]) -> int:
        """Blocks a sequence must be granted on entry beside its prefix."""
        return self.blocks.blocks_for(self._admission_tokens(sequence)) - len(prefix)

    def _admission_tokens(self, sequence: Sequence) -> int:
        """Tokens a sequence gets blocks for on entry: what is known, or all it may ever need."""
        if not self.policy.is_chunked:  # the last token is returned but never computed
            return len(sequence.request.input_ids) + sequence.request.stopping.max_new_tokens - 1
        return sequence.num_known

    def _start(self, sequence: Sequence, count: int) -> SequenceStart:
        request, size = sequence.request, self.blocks.block_size
        is_plain = self.policy.is_plain
        num_slots = self._admission_tokens(sequence) if is_plain else 0
        return SequenceStart(
            request_id=sequence.id,
            sampling=request.sampling,
            stopping=request.stopping,
            input_ids=() if is_plain else request.input_ids,
            output_ids=tuple(sequence.output_ids),
            blocks=tuple(sequence.blocks),
            slots=tuple(sequence.blocks[i // size] * size + i % size for i in range(num_slots)),
            cache_len=sequence.num_cached,
            chunk_len=None if is_plain else count,
            prefill_logprobs=request.prefill_logprobs,
            top_n_tokens=request.top_n_tokens,
            inputs=request.inputs if is_plain else "",
            truncate=len(request.input_ids) if is_plain else 0,
            add_special_tokens=request.add_special_tokens,
        )

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
