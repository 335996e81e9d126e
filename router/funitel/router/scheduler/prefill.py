"""Prefill planning: which waiting sequences enter, behind which cached prefix, and the prompt tokens of a step. Pure.

Keys take turns by the tokens they were given.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import ceil

from funitel.proto.step import SequenceStart, StateSave, StoppingParams
from funitel.router.core.request import RequestMedia, Sequence, is_background
from funitel.router.kv_cache.block_pool import BlockPool
from funitel.router.scheduler.cost.chunk_budget import ChunkBudget
from funitel.router.scheduler.decode import RunningSet
from funitel.router.scheduler.fault_bisect import FaultBisector
from funitel.router.scheduler.plan import SchedulerPolicy
from funitel.router.scheduler.state_checkpoints import StateCheckpoints
from funitel.router.scheduler.waiting_queue import FairShares, Level, WaitingQueue

# An entering sequence leaves a block free for each running one, else it would soon be preempted again; but at most this
# share of the pool, for what is free for growth is not used. On simulated loads of 64 requests for 4 times the pool 84
# to 95 % of it were used without a bound, and 92 to 98 % with it, for some 5 % more tokens computed again.
MAX_RESERVED = 1 / 25
# A longer prompt would take so many steps that streams beside it were slow for a while.
MAX_URGENT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Prefix:
    """The cached prefix of a sequence: published blocks, then content that the host tier holds, by its keys.

    With recurrent layers it ends at a checkpoint of the state, and `num_matched` blocks are cached in all.
    """

    blocks: tuple[int, ...] = ()
    keys: tuple[bytes, ...] = ()
    num_matched: int = 0

    def __len__(self) -> int:
        """Count the blocks that need not be computed."""
        return len(self.blocks) + len(self.keys)


def num_rows(sequence: Sequence) -> int:
    """Rows that a step may have of a sequence: its beams."""
    return 1 if sequence.beams is None else sequence.beams.params.width


def whole_spans(media: Seq[RequestMedia], begun: int, count: int, *, may_extend: bool) -> int:
    """Return how many of `count` tokens behind `begun` others to compute so that the chunk ends within no media item.

    The chunk ends where the item begins; one that begins with the item, or within it behind a cached prefix, has all of
    it if it `may_extend`, and else no token.
    """
    place = bisect_right(media, begun + count, key=lambda each: each.span.end)
    span = media[place].span if place < len(media) else None
    if span is None or span.position >= begun + count:
        return count
    if span.position > begun:
        return span.position - begun
    return span.end - begun if may_extend else 0


class PrefillPlanner:
    """Moves sequences from waiting to running, and spends the prompt tokens of a step."""

    def __init__(
        self,
        policy: SchedulerPolicy,
        blocks: BlockPool,
        shares: FairShares,
        waiting: WaitingQueue,
        running: RunningSet,
        bisector: FaultBisector,
        checkpoints: StateCheckpoints | None,
    ) -> None:
        self._policy = policy
        self._checkpoints = checkpoints
        self._blocks = blocks
        self._block_size = blocks.block_size
        self._shares = shares
        self._waiting = waiting
        self._running = running
        self._bisector = bisector

    # Which one, and whether it fits ---------------------------------------------------------------------------------

    def next_schedulable(self, passed_over: Counter[bytes]) -> tuple[Sequence, Prefix] | None:
        """Return the next waiting sequence and its cached prefix; `passed_over` counts by key, and is added to.

        A sequence is passed over while a running one computes its next block, until that block is published, and while
        a fault is bisected without it.
        """
        while (sequence := self._waiting.first(passed_over)) is not None:
            if not self._bisector.on_trial or sequence.id in self._bisector.on_trial:
                prefix = self.prefix(sequence)
                if not self._is_being_computed(sequence, len(prefix)):
                    return sequence, prefix
            passed_over[sequence.request.key] += 1
        return None

    def prefix(self, sequence: Sequence) -> Prefix:
        """Return the cached prefix of a sequence; its last known token is always computed."""
        if not self.may_share(sequence):
            return Prefix()
        size = self._block_size
        count = (sequence.num_known - 1) // size
        blocks = self._blocks.match(sequence.block_key(i, size) for i in range(count))
        keys = self._blocks.match_host(sequence.block_key(i, size) for i in range(len(blocks), count))
        num_matched = len(blocks) + len(keys)
        if self._checkpoints is None:
            return Prefix(blocks, keys, num_matched)
        usable = self._checkpoints.usable_blocks(sequence, num_matched)
        return Prefix(blocks[:usable], keys[: max(0, usable - len(blocks))], num_matched)

    def cached_prefix_len(self, sequence: Sequence) -> int:
        """Return the tokens of the cached prefix of a sequence, which need not be here."""
        return len(self.prefix(sequence)) * self._block_size

    def may_share(self, sequence: Sequence) -> bool:
        """Whether a sequence may begin behind a cached prefix."""
        return self._policy.has_prefix_cache and not sequence.request.prefill_logprobs

    def _is_being_computed(self, sequence: Sequence, index: int) -> bool:
        size = self._block_size
        if not self.may_share(sequence) or (index + 1) * size >= sequence.num_known:
            return False
        running: Iterable[Sequence] = self._running.not_plain.values()
        if not is_background(sequence.request.key):  # it waits for none of a batch, which may be held
            running = [other for other in running if not is_background(other.request.key)]
        if (checkpoints := self._checkpoints) is not None:
            return any(checkpoints.is_expected(sequence, index, other) for other in running)
        key = sequence.block_key(index, size)
        return any(
            other.num_pending > 1 and other.num_known >= (index + 1) * size and other.block_key(index, size) == key
            for other in running
        )

    def fits(self, sequence: Sequence, prefix: Prefix, count: int) -> bool:
        """Whether a waiting sequence may enter, behind `prefix`, to compute `count` tokens first."""
        # A resumed sequence may have outgrown the budget: it enters first, and takes the rest in its next step.
        whole = min(sequence.num_known - len(prefix) * self._block_size, self._policy.max_batch_prefill_tokens)
        if count < (1 if self._policy.is_chunked else whole):
            return False
        if not self._has_place():
            return False
        return self.has_slots(num_rows(sequence)) and self.has_blocks(self.needed_blocks(sequence, prefix), prefix)

    def _has_place(self) -> bool:
        """Whether the micro-batch that is planned may have another sequence: each is to have as many as the others."""
        running = self._running
        num_sequences = len(running.by_id) + len(self._waiting)
        return running.sizes[running.micro_batch] < -(-num_sequences // len(running.sizes))

    def all_fit(self, sequences: Collection[Sequence]) -> bool:
        """Whether so many waiting sequences, and one more, may all run beside those that do."""
        needed = sum(self.missing_blocks(sequence, Prefix()) for sequence in sequences)
        return self.has_slots(len(sequences) + 1) and self.has_blocks(needed + 1, Prefix())

    def has_slots(self, count: int = 1) -> bool:
        """Whether so many more sequences may run."""
        bounds = (self._policy.max_batch_size, self._bisector.max_sequences)
        is_within = all(bound is None or self._running.num_rows + count <= bound for bound in bounds)
        return is_within and (self._checkpoints is None or self._checkpoints.has_slots(count))

    def has_blocks(self, needed: int, prefix: Prefix) -> bool:
        """Whether so many blocks can be had beside `prefix`, and some are left for running sequences."""
        reserved = min(len(self._running.by_id), ceil(self._blocks.num_blocks * MAX_RESERVED))
        return needed + reserved <= self._blocks.num_free - self._blocks.num_idle(prefix.blocks)

    def needed_blocks(self, sequence: Sequence, prefix: Prefix) -> int:
        """Count the blocks to be free for a sequence to enter: those missing, and one for each of its beams."""
        beams = 0 if sequence.beams is None else sequence.beams.params.width
        return self.missing_blocks(sequence, prefix) + beams

    def missing_blocks(self, sequence: Sequence, prefix: Prefix) -> int:
        """Count the blocks a sequence needs on entry beside those of its prefix; the host tier's need some too."""
        return self._blocks.blocks_for(self._admission_tokens(sequence)) - len(prefix.blocks)

    def _admission_tokens(self, sequence: Sequence) -> int:
        """Count the tokens a sequence gets blocks for on entry: what is known, or all it may ever need."""
        if not self._policy.is_chunked:  # the last token is returned but never computed
            return sequence.num_prompt + sequence.request.stopping.max_new_tokens - 1
        return sequence.num_known

    # Entering -------------------------------------------------------------------------------------------------------

    def allocate(self, sequence: Sequence, prefix: Prefix) -> None:
        """Let a waiting sequence run: it gets its blocks, behind `prefix`."""
        self._waiting.remove(sequence)
        self._blocks.share(prefix.blocks)
        sequence.blocks.extend(prefix.blocks)
        sequence.blocks.extend(self._blocks.load(prefix.keys))
        missing = self.missing_blocks(sequence, prefix) - len(prefix.keys)
        sequence.blocks.extend(self._blocks.allocate(missing))
        sequence.num_computed = sequence.num_cached = len(prefix) * self._block_size
        sequence.num_loaded = len(prefix.keys) * self._block_size
        if sequence.swapped:
            self._blocks.host.release(sequence.swapped)
            sequence.swapped = ()
        sequence.num_repeated = max(0, sequence.num_repeated - sequence.num_computed)
        sequence.was_started = sequence.has_drafts = True
        if self._checkpoints is not None:
            self._checkpoints.enter(sequence, prefix.num_matched)
            if sequence.beams is not None:
                sequence.beams.spare_slots = self._checkpoints.reserve(num_rows(sequence) - 1)
        self._running.enter(sequence)

    def to_start(self, sequence: Sequence, count: int) -> SequenceStart:
        """Describe to the shard how a sequence enters to compute `count` tokens."""
        request, size = sequence.request, self._block_size
        stopping, top_n_tokens = request.stopping, request.top_n_tokens
        if request.beams is not None:  # a row of one token, which tells the likeliest ones
            stopping = StoppingParams(max_new_tokens=1, ignore_eos=True)
            top_n_tokens = max(top_n_tokens, request.beams.num_candidates)
        is_plain = self._policy.is_plain
        num_slots = self._admission_tokens(sequence) if is_plain else 0
        state = sequence.state
        saves: tuple[StateSave, ...] = ()
        if self._checkpoints is not None:
            saves = self._checkpoints.save(sequence, sequence.num_cached, sequence.num_cached + count)
        return SequenceStart(
            request_id=sequence.id,
            sampling=request.sampling,
            stopping=stopping,
            input_ids=() if is_plain else request.input_ids,
            output_ids=tuple(sequence.output_ids),
            blocks=tuple(sequence.blocks),
            slots=tuple(sequence.blocks[i // size] * size + i % size for i in range(num_slots)),
            cache_len=sequence.num_cached,
            chunk_len=None if is_plain else count,
            prefill_logprobs=request.prefill_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            top_n_tokens=top_n_tokens,
            inputs=request.inputs if is_plain else "",
            truncate=len(request.input_ids) if is_plain else 0,
            add_special_tokens=request.add_special_tokens,
            name="" if is_plain else request.request_id,
            state_slot=0 if state is None else state.slot,
            state_from=0 if state is None else state.source,
            state_saves=saves,
            mirostat_mu=sequence.mirostat_mu,
            adapter_id=None if request.adapter is None else request.adapter.id,
            speculate=request.speculate,
            media=tuple([each.span for each in request.media]),
            output_key="" if is_plain or request.beams is not None else request.output_key,
        )

    # Spending -------------------------------------------------------------------------------------------------------

    def spend(
        self,
        budget: ChunkBudget,
        computed: dict[int, int],
        with_pending: list[Sequence],
        *,
        may_enter: bool,
        holds_background: bool = False,
    ) -> list[SequenceStart]:
        """Spend the budget of a step on running sequences with pending tokens and on waiting ones, in fair order.

        Of one key, running ones come first. The first that does not fit keeps all behind it out, and the first that is
        not urgent when the budget is spent all others.

        Args:
            budget: what may be computed.
            computed: tokens by id that the step computes already; more are added.
            with_pending: running sequences that have more to compute.
            may_enter: whether waiting sequences may enter.
            holds_background: whether those of batches may not.

        Returns: the sequences that enter.
        """
        starts: list[SequenceStart] = []
        passed_over: Counter[bytes] = Counter()
        while True:
            found = self.next_schedulable(passed_over) if may_enter else None
            if found is not None and holds_background and is_background(found[0].request.key):
                found = None
            oldest = min(with_pending, key=self._level, default=None)
            if oldest is not None and (found is None or self._level(oldest) <= self._level(found[0])):
                is_urgent = self._is_urgent(oldest, oldest.num_cached)
                if budget.is_spent and not is_urgent:
                    break
                with_pending.remove(oldest)
                self._continue(oldest, budget, computed, is_urgent=is_urgent)
            elif found is not None:
                sequence, prefix = found
                num_cached = len(prefix) * self._block_size
                is_urgent = self._is_urgent(sequence, num_cached)
                if budget.is_spent and not is_urgent:
                    break
                first = self._fit(sequence, num_cached, sequence.num_known - num_cached, budget, is_urgent=is_urgent)
                may_enter = self.fits(sequence, prefix, first)
                if may_enter:
                    self.allocate(sequence, prefix)
                    computed[sequence.id] = self._take(
                        sequence, num_cached, sequence.num_pending, budget, is_urgent=is_urgent
                    )
                    self._shares.charge(sequence, computed[sequence.id])
                    starts.append(self.to_start(sequence, computed[sequence.id]))
            else:
                break
        return starts

    def _continue(self, sequence: Sequence, budget: ChunkBudget, computed: dict[int, int], *, is_urgent: bool) -> None:
        """Let a running sequence take what it can of `budget`."""
        begun = computed[sequence.id]
        num_computed, pending = sequence.ahead()
        count = self._take(sequence, num_computed + begun, pending - begun, budget, is_urgent=is_urgent)
        computed[sequence.id] += count
        self._shares.charge(sequence, count)

    def _fit(self, sequence: Sequence, begun: int, wanted: int, budget: ChunkBudget, *, is_urgent: bool) -> int:
        """How many of `wanted` tokens behind `begun` others fit into a step."""
        count = budget.fit(begun, wanted, is_urgent=is_urgent)
        if not (count and self._has_whole_spans(sequence)):
            return count
        return whole_spans(sequence.request.media, begun, count, may_extend=budget.has_no_chunk)

    def _take(self, sequence: Sequence, begun: int, wanted: int, budget: ChunkBudget, *, is_urgent: bool) -> int:
        """Spend the budget on as many tokens as `_fit` says; returns how many that is."""
        if not self._has_whole_spans(sequence):
            return budget.take(begun, wanted, is_urgent=is_urgent)
        count = self._fit(sequence, begun, wanted, budget, is_urgent=is_urgent)
        budget.spend(begun, count)
        return count

    def _has_whole_spans(self, sequence: Sequence) -> bool:
        return self._policy.has_whole_spans and bool(sequence.request.media)

    def _is_urgent(self, sequence: Sequence, num_cached: int) -> bool:
        """Whether streams of other keys may wait longer for a prompt: a short one of a key that was given less.

        Less than each other key that has requests, even once it has been given the whole prompt.
        """
        if sequence.output_ids or sequence.num_known - num_cached > MAX_URGENT_TOKENS:
            return False
        left = sequence.num_known - max(num_cached, sequence.ahead()[0])
        return self._shares.stays_least(sequence.request.key, left)

    def _level(self, sequence: Sequence) -> Level:
        return self._shares.level(sequence.request.key)
