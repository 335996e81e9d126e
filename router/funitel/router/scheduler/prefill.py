"""How a waiting sequence enters: behind which blocks, with which more, and whether there is room. Pure.

Who computes prompt tokens in a step, and how many: keys take turns by what they were given. Pure.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from math import ceil

from funitel.proto.step import SequenceStart
from funitel.router.core.request import Sequence
from funitel.router.kv_cache.block_pool import BlockPool
from funitel.router.scheduler.chunk_budget import ChunkBudget
from funitel.router.scheduler.decode import RunningSet
from funitel.router.scheduler.fault_bisect import FaultBisector
from funitel.router.scheduler.plan import SchedulerPolicy
from funitel.router.scheduler.waiting_queue import FairShares, WaitingQueue


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a sequence begins behind: published blocks, then content that the host tier holds, by its keys."""

    blocks: tuple[int, ...] = ()
    keys: tuple[bytes, ...] = ()

    def __len__(self) -> int:
        """How many blocks need not be computed."""
        return len(self.blocks) + len(self.keys)


# A newcomer leaves a block free for each running sequence, else it would soon be preempted again; but at most this
# share of the pool, for what is free for growth is not used. On simulated loads of 64 requests for 4 times the pool 84
# to 95 % of it were used without a bound, and 92 to 98 % with it, for some 5 % more tokens computed again.
MOST_RESERVED = 1 / 25


class PrefillPlanner:
    """From those that wait to those that run, through the blocks that are free or can be shared."""

    def __init__(
        self,
        policy: SchedulerPolicy,
        blocks: BlockPool,
        waiting: WaitingQueue,
        running: RunningSet,
        suspects: FaultBisector,
    ) -> None:
        self.block_size = blocks.block_size
        self._policy = policy
        self._blocks = blocks
        self._waiting = waiting
        self._running = running
        self._suspects = suspects

    def next_ready(self, passed_over: Counter[bytes]) -> tuple[Sequence, Prefix] | None:
        """Who is next of those that wait, and what it begins behind.

        One whose next block a running sequence is computing right now is passed over until that block is published, and
        while whoever failed a step is looked for all others.
        """
        while (sequence := self._waiting.first(passed_over)) is not None:
            if self._suspects.may_enter(sequence.id):
                prefix = self.prefix(sequence)
                if not self._is_being_computed(sequence, len(prefix)):
                    return sequence, prefix
            passed_over[sequence.request.key] += 1
        return None

    def prefix(self, sequence: Sequence) -> Prefix:
        """What a sequence can begin behind; its last known token is always computed."""
        if not self.may_share(sequence):
            return Prefix()
        size = self.block_size
        most = (sequence.num_known - 1) // size
        blocks = self._blocks.match(sequence.block_key(i, size) for i in range(most))
        keys = self._blocks.match_host(sequence.block_key(i, size) for i in range(len(blocks), most))
        return Prefix(blocks, keys)

    def may_share(self, sequence: Sequence) -> bool:
        """Whether a sequence may begin behind what others have computed."""
        return self._policy.has_prefix_cache and not sequence.request.prefill_logprobs

    def _is_being_computed(self, sequence: Sequence, index: int) -> bool:
        size = self.block_size
        if not self.may_share(sequence) or (index + 1) * size >= sequence.num_known:
            return False
        key = sequence.block_key(index, size)
        return any(
            other.num_pending > 1 and other.num_known >= (index + 1) * size and other.block_key(index, size) == key
            for other in self._running.unsettled.values()
        )

    def has_room(self, sequence: Sequence, prefix: Prefix, count: int) -> bool:
        """Whether a waiting sequence may enter, behind `prefix`, to compute `count` tokens first."""
        # A resumed sequence may have outgrown the budget: it enters first, and takes the rest in its next step.
        whole = min(sequence.num_known - len(prefix) * self.block_size, self._policy.max_batch_prefill_tokens)
        if count < (1 if self._policy.is_chunked else whole):
            return False
        return self.has_slot() and self.has_blocks(self.missing_blocks(sequence, prefix), prefix)

    def has_slot(self) -> bool:
        """Whether one more sequence may run."""
        return self._has_slots(1)

    def _has_slots(self, count: int) -> bool:
        bounds = (self._policy.max_batch_size, self._suspects.most_sequences)
        return all(most is None or len(self._running.by_id) + count <= most for most in bounds)

    def has_blocks(self, needed: int, prefix: Prefix) -> bool:
        """Whether so many blocks can be had beside `prefix`, and some are left for those that run."""
        reserved = min(len(self._running.by_id), ceil(self._blocks.num_blocks * MOST_RESERVED))
        return needed + reserved <= self._blocks.num_free - self._blocks.num_idle(prefix.blocks)

    def has_room_for(self, newcomers: Collection[Sequence]) -> bool:
        """Whether so many waiting sequences, and one more, may all run beside those that do."""
        needed = sum(self.missing_blocks(newcomer, Prefix()) for newcomer in newcomers)
        return self._has_slots(len(newcomers) + 1) and self.has_blocks(needed + 1, Prefix())

    def missing_blocks(self, sequence: Sequence, prefix: Prefix) -> int:
        """Blocks a sequence must be granted on entry beside those of its prefix; what the host holds needs some too."""
        return self._blocks.blocks_for(self._admission_tokens(sequence)) - len(prefix.blocks)

    def _admission_tokens(self, sequence: Sequence) -> int:
        """Tokens a sequence gets blocks for on entry: what is known, or all it may ever need."""
        if not self._policy.is_chunked:  # the last token is returned but never computed
            return sequence.num_prompt + sequence.request.stopping.max_new_tokens - 1
        return sequence.num_known

    def take(self, sequence: Sequence, prefix: Prefix) -> None:
        """Let a sequence wait no more: it gets its blocks, behind `prefix`."""
        self._waiting.remove(sequence)
        self._blocks.share(prefix.blocks)
        sequence.blocks.extend(prefix.blocks)
        sequence.blocks.extend(self._blocks.load(prefix.keys))
        missing = self.missing_blocks(sequence, prefix) - len(prefix.keys)
        sequence.blocks.extend(self._blocks.allocate(missing))
        sequence.num_computed = sequence.num_cached = len(prefix) * self.block_size
        sequence.num_repeated = max(0, sequence.num_repeated - sequence.num_computed)
        sequence.was_started = True

    def start(self, sequence: Sequence, count: int) -> SequenceStart:
        """Say to the shard how a sequence enters to compute `count` tokens."""
        request, size = sequence.request, self.block_size
        is_plain = self._policy.is_plain
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
            name="" if is_plain else request.request_id,
        )


# A longer prompt would take so many steps that those who stream beside it were slow for a while.
MOST_URGENT_TOKENS = 1024


class PrefillSpending:
    """Gives the budget of a step to running sequences that have more to compute and to waiting ones, in fair order."""

    def __init__(self, shares: FairShares, entrance: PrefillPlanner, running: RunningSet) -> None:
        self._shares = shares
        self._entrance = entrance
        self._running = running

    def share_out(
        self,
        budget: ChunkBudget,
        computed: dict[int, int],
        hungry: list[Sequence],
        *,
        may_enter: bool,
    ) -> list[SequenceStart]:
        """Spend `budget`; returns who enters.

        Of one key, those that run come first. The first that finds no room keeps all behind it out, and the first that
        is not urgent when the budget is spent all others.

        Args:
            budget: what may be computed.
            computed: tokens by id that the step computes already; more are added.
            hungry: running sequences that have more to compute.
            may_enter: whether waiting sequences may enter.
        """
        starts: list[SequenceStart] = []
        passed_over: Counter[bytes] = Counter()
        while True:
            found = self._entrance.next_ready(passed_over) if may_enter else None
            oldest = min(hungry, key=self._level, default=None)
            if oldest is not None and (found is None or self._level(oldest) <= self._level(found[0])):
                is_urgent = self._is_urgent(oldest, oldest.num_cached)
                if budget.is_spent and not is_urgent:
                    break
                hungry.remove(oldest)
                self._go_on(oldest, budget, computed, is_urgent=is_urgent)
            elif found is not None:
                newcomer, prefix = found
                num_cached = len(prefix) * self._entrance.block_size
                is_urgent = self._is_urgent(newcomer, num_cached)
                if budget.is_spent and not is_urgent:
                    break
                first = budget.fit(num_cached, newcomer.num_known - num_cached, is_urgent=is_urgent)
                may_enter = self._entrance.has_room(newcomer, prefix, first)
                if may_enter:
                    self._entrance.take(newcomer, prefix)
                    self._running.enter(newcomer)
                    computed[newcomer.id] = budget.take(num_cached, newcomer.num_pending, is_urgent=is_urgent)
                    self._shares.charge(newcomer, computed[newcomer.id])
                    starts.append(self._entrance.start(newcomer, computed[newcomer.id]))
            else:
                break
        return starts

    def _go_on(self, sequence: Sequence, budget: ChunkBudget, computed: dict[int, int], *, is_urgent: bool) -> None:
        """Let a running sequence take what it can of `budget`."""
        begun = computed[sequence.id]
        num_computed, pending = sequence.ahead()
        count = budget.take(num_computed + begun, pending - begun, is_urgent=is_urgent)
        computed[sequence.id] += count
        self._shares.charge(sequence, count)

    def _is_urgent(self, sequence: Sequence, num_cached: int) -> bool:
        """Whether streams of other keys may wait longer for a prompt: a short one of a key that was given less.

        Less than each other key that has requests, even once it has been given the whole prompt.
        """
        if sequence.output_ids or sequence.num_known - num_cached > MOST_URGENT_TOKENS:
            return False
        left = sequence.num_known - max(num_cached, sequence.ahead()[0])
        return self._shares.stays_least(sequence.request.key, left)

    def _level(self, sequence: Sequence) -> tuple[int, int]:
        return self._shares.level(sequence.request.key)
