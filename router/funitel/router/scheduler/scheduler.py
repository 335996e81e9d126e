"""The scheduler: which sequences compute how many tokens in the next step. Pure: no I/O, no torch, no clock of its own.

`preempt`, then `schedule` give a plan, `commit` takes its result. Prompts longer than the budget are chunked and share
the step with running sequences; blocks are granted as sequences grow; when none is left a sequence is preempted, and
waits to be resumed. Which one is next and which is preempted depends on what each key was given (`waiting_queue`). Full
blocks are published once computed, and a sequence that begins with the same tokens starts behind them.

`schedule` may be called again while steps are *in flight*: planned, and not committed yet. It plans over what they
promise (`Sequence.ahead`): the tokens they compute, one token for each sequence that decodes by then, an
end for one that has all it may have. Results are committed in the order of the plans, and may exceed the promise: of a
forced span the step that was planned meanwhile computes one token, and nothing of a sequence that has ended.

Where the shards are pipeline stages, the running sequences are in as many micro-batches, of which each step has one: a
stage computes the step of one while the next stage computes another's.

Blocks of a sequence that leaves are free at once, though a step in flight may still write to them. They are granted to
another by a later step only, which the shards execute later, and in which their old owner has no row. What can be found
by its content is published only when committed, and is full: no step writes there any more.
"""

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import inf

from funitel.proto.step import Generation, RowUpdate, SequenceStart, StateSave, StepResult
from funitel.router.core.request import Sequence, is_background
from funitel.router.kv_cache.block_pool import BlockPool
from funitel.router.scheduler.background import BackgroundShare
from funitel.router.scheduler.beam_planner import BeamPlanner
from funitel.router.scheduler.cost.chunk_budget import Allowance, ChunkBudget, StepLoad
from funitel.router.scheduler.cost.draft_gain import DraftGain
from funitel.router.scheduler.cost.step_cost import StepCostModel
from funitel.router.scheduler.cost.ttft_estimate import TtftEstimator
from funitel.router.scheduler.decode import HELD, RunningSet
from funitel.router.scheduler.fault_bisect import FaultBisector
from funitel.router.scheduler.plan import BeamStep, SchedulerPolicy, StepPlan
from funitel.router.scheduler.preemption import PreemptionPolicy
from funitel.router.scheduler.prefill import PrefillPlanner
from funitel.router.scheduler.state_checkpoints import StateCheckpoints
from funitel.router.scheduler.waiting_queue import FairShares, WaitingQueue


def _id_of(delivered: tuple[Sequence, Generation]) -> int:
    return delivered[0].id


class Scheduler:
    """Waiting and running sequences over one block pool."""

    def __init__(self, policy: SchedulerPolicy, blocks: BlockPool) -> None:
        self.policy = policy
        self.blocks = blocks
        self.step_time = StepCostModel(policy.target_gap_seconds)
        self.draft_gain = DraftGain()
        self.background = BackgroundShare(self.step_time)
        self.shares = FairShares(credit=policy.max_batch_prefill_tokens)
        self.waiting = WaitingQueue(self.shares)
        self.num_preempted = self.num_swapped = 0
        self._checkpoints: StateCheckpoints | None = None  # of models with recurrent layers
        if blocks.states is not None:
            self._checkpoints = StateCheckpoints(blocks.states, blocks.block_size, has_cache=policy.has_prefix_cache)
        self._running = RunningSet(blocks, self.shares, self._checkpoints, policy.num_micro_batches)
        self.running = self._running.by_id  # oldest first
        self.bisector = FaultBisector(may_shrink=policy.is_chunked)
        self._prefill = PrefillPlanner(
            policy, blocks, self.shares, self.waiting, self._running, self.bisector, self._checkpoints
        )
        self._searching = self._running.searching
        self._beams = BeamPlanner(blocks, self.shares, self._running, self._prefill, self._checkpoints)
        self._preemption = PreemptionPolicy(policy.preemption_victim, self.shares, self._prefill, self.running)
        self.ttft_estimator = TtftEstimator(self.step_time, self._prefill, self.shares, self.running)
        self._in_flight: deque[StepPlan] = deque()  # oldest first
        self._steps_since_join = 0

    @property
    def can_resume(self) -> bool:
        """Whether a sequence can be resumed behind the tokens it has got, here or elsewhere."""
        return not self.policy.is_plain

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.shares.join(sequence.request.key)
        self.waiting.add(sequence)

    def go_on(self, sequence: Sequence, blocks: Seq[int], num_computed: int) -> None:
        """Let a sequence run that the shards have in a row already, with blocks that the pool holds for it.

        `num_computed` of its tokens have keys and values. Not beside states of recurrent layers.
        """
        assert self._checkpoints is None, "its state is not known"
        self.shares.join(sequence.request.key)
        sequence.blocks.extend(blocks)
        sequence.num_computed = num_computed
        sequence.was_started = True
        sequence.has_drafts = not self._running.drafts_pay  # so that the shard is told
        self._running.enter(sequence)
        if self.policy.has_prefix_cache:
            self._publish(sequence, 0, num_computed // self.blocks.block_size)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, finished or cancelled, wherever it is; its blocks are free at once."""
        if not self._running.leave(sequence):
            if sequence not in self.waiting:
                return
            self.waiting.remove(sequence)
        if sequence.swapped:
            self.blocks.host.release(sequence.swapped)
            sequence.swapped = ()
        self.shares.leave(sequence.request.key)

    # Planning -------------------------------------------------------------------------------------------------------

    def preempt(self) -> None:
        """Preempt until every other sequence can compute what it holds, and no key is short of its share.

        To be called, and the rows of preempted sequences dropped on the shard, before `schedule`. Only with no step in
        flight: what a sequence is resumed from must be known.
        """
        while not self._in_flight and (sequence := self._victim()) is not None:
            if self.policy.swaps:
                self._swap_out(sequence)
            self._preempt(sequence)

    def preempt_all(self) -> None:
        """Preempt every running sequence; all wait to be resumed, in the order they had."""
        assert not self._in_flight, "steps in flight come first"
        for sequence in tuple(self.running.values()):
            self._preempt(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self._running.leave(sequence)
        sequence.num_repeated += sequence.num_computed
        sequence.num_computed = 0
        if sequence.beams is not None:  # a search begins again
            sequence.output_ids.clear()
        self.waiting.add(sequence)
        self.num_preempted += 1

    def _swap_out(self, sequence: Sequence) -> None:
        """Save the full blocks of a sequence that is preempted next, if there are slots for all of them.

        Not those of a search, which begins again, and not beside states of recurrent layers, which have no slots there.
        """
        if sequence.beams is not None or self._checkpoints is not None or not self._prefill.may_share(sequence):
            return
        size = self.blocks.block_size
        keys = tuple(sequence.block_key(i, size) for i in range(sequence.num_computed // size))
        if keys and self.blocks.host.swap_out(keys, sequence.blocks[: len(keys)]):
            sequence.swapped = keys
            self.num_swapped += 1

    def _victim(self) -> Sequence | None:
        """Return the sequence to preempt, while blocks are missing or another key has not had its share."""
        missing = self._running.missing_blocks()
        if self._searching:
            missing += self._beams.missing_blocks()
        if missing > self.blocks.num_free:
            return self._preemption.victim_for_growth()
        if not self.waiting or self.policy.is_plain:
            return None
        return self._preemption.victim_for_waiting()

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None when there is nothing to compute before a step in flight is committed."""
        # What is in flight comes first where a sequence is to leave.
        if self._in_flight and self._victim() is not None:
            return None
        busy, count = self.shares.num_busy, self.policy.num_micro_batches
        # With batches alone nothing is planned ahead, so that another request waits for one step.
        most = 1 if busy[True] and not busy[False] else self.policy.max_steps_each if count > 1 else inf
        turn = self._running.micro_batch + 1  # micro-batches take turns
        for micro_batch in (each % count for each in range(turn, turn + count)):
            if sum(plan.micro_batch == micro_batch for plan in self._in_flight) >= most:
                continue
            self._running.micro_batch = micro_batch
            plan = self._mixed_step(may_enter=True) if self.policy.is_chunked else self._schedule_unchunked()
            if plan is not None:
                return plan
        return None

    def _mixed_step(self, *, may_enter: bool, may_hold: bool = True) -> StepPlan | None:
        """Let every decoding sequence compute a token, and spend the budget on prompts and forced spans."""
        holds_background, max_background, most_seconds = False, None, None
        if self.shares.num_busy[True] and may_hold and self.policy.is_chunked and not self.bisector.on_trial:
            holds_background = self._holds_background(may_enter=may_enter)
            max_background = 0
            if not holds_background:
                max_background, most_seconds = self.background.max_rows(self.running.values())
        num_reserved = self._beams.missing_blocks() if self._searching else 0
        part = self._running.decode(max_background, num_reserved=num_reserved)
        self.background.num_held = part.num_held
        if most_seconds is not None and any(not is_background(sequence.request.key) for sequence in part.with_pending):
            most_seconds = None  # what others have left to compute is not bounded for batches
        if self._running.num_speculating:
            part.load.num_drafts = round(self.draft_gain.drafts_per_row * part.load.num_decodes)
            self._running.drafts_pay = self.draft_gain.pays(self.step_time.token_share(part.load))
        beams = self._beams.plan(part.load, part.held_searches) if self._searching else None
        starts: list[SequenceStart] = []
        if part.with_pending or (may_enter and self.waiting):
            starts = self._prefill.spend(
                self._budget(
                    part.load,
                    most_seconds,
                    num_prompts=len(part.with_pending) + (self.waiting.num_foreground if may_enter else 0),
                    has_media=self._has_media(part.with_pending, may_enter=may_enter),
                ),
                part.computed,
                part.with_pending,
                may_enter=may_enter,
                holds_background=holds_background,
            )
        rows = [
            RowUpdate(i, granted, 0) if pending == HELD else self._update(i, granted, pending, part.computed[i])
            for i, (granted, pending) in part.updates.items()
        ]
        plan = self._plan(starts, rows, part.computed, part.load, beams=beams)
        if plan is None and holds_background and not self._in_flight:  # what they are held for cannot go on
            return self._mixed_step(may_enter=may_enter, may_hold=False)
        return plan

    def _holds_background(self, *, may_enter: bool) -> bool:
        """Whether sequences of batches sit the next step out: another has its first token before it."""
        return bool(may_enter and self.waiting.num_foreground) or self._running.awaits_first_token()

    def _update(self, sequence_id: int, granted: tuple[int, ...], pending: int, count: int) -> RowUpdate:
        """Describe to the shard what a running sequence gets, which computes `count` of its pending tokens."""
        saves: tuple[StateSave, ...] = ()
        if self._checkpoints is not None:
            sequence = self.running[sequence_id]
            begun, _ = sequence.ahead()
            end = begun + count
            if sequence.request.speculate and count == 1:
                end = min(sequence.most_ahead(end, 1), len(sequence.blocks) * self.blocks.block_size)
            saves = self._checkpoints.save(sequence, self._running.reach(sequence, begun), end)
        return RowUpdate(sequence_id, granted, count if pending > 1 else None, saves, self._speculate(sequence_id))

    def _speculate(self, sequence_id: int) -> int | None:
        """How many drafts the shard is told that a sequence may have; None where it knows."""
        sequence, pays = self.running[sequence_id], self._running.drafts_pay
        if sequence.has_drafts == pays or not sequence.request.speculate:
            return None
        sequence.has_drafts = pays
        return sequence.request.speculate if pays else 0

    def _has_media(self, with_pending: Seq[Sequence], *, may_enter: bool) -> bool:
        """Whether a prompt has media of those that the next step may compute tokens of."""
        first = self.waiting.first() if may_enter and self.waiting else None
        return any(each.request.media for each in (*with_pending, *([] if first is None else [first])))

    def _budget(
        self, load: StepLoad, most_seconds: float | None = None, *, num_prompts: int = 1, has_media: bool = False
    ) -> ChunkBudget:
        """What may be computed of prompts beside the decoding sequences of `load`, in a step of so many seconds."""
        max_tokens = self.policy.max_batch_prefill_tokens
        if self.bisector.max_tokens is not None:
            max_tokens = min(max_tokens, self.bisector.max_tokens)
        if not self.policy.is_chunked:
            return ChunkBudget(Allowance(max_tokens), load=load)
        return self.step_time.budget(
            max_tokens,
            load,
            num_prompts=num_prompts,
            has_several_keys=self.shares.has_several_keys,
            has_media=has_media,
            most_seconds=most_seconds or None,
        )

    def _schedule_unchunked(self) -> StepPlan | None:
        """Either a prefill of whole prompts by themselves, or a decode of everything that runs."""
        if self._should_join():
            budget = self._budget(StepLoad())
            computed: dict[int, int] = {}
            starts = self._prefill.spend(budget, computed, [], may_enter=True)
            if starts:
                self._steps_since_join = 0
                return self._plan(starts, [], computed, budget.load, is_alone=True)
        plan = self._mixed_step(may_enter=False)
        if plan is not None:
            self._steps_since_join += 1
        return plan

    @property
    def reason_to_join(self) -> str:
        """Return why sequences that enter the next step would join running ones, in TGI's words."""
        if self.policy.is_chunked:
            return "chunking"
        return "wait_exceeded" if self._has_waited_long else "backpressure"

    @property
    def _has_waited_long(self) -> bool:
        """Without chunked prefill: whether so many steps passed that waiting sequences enter whatever the ratio."""
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
        load: StepLoad,
        is_alone: bool = False,
        beams: BeamStep | None = None,
    ) -> StepPlan | None:
        if not computed and beams is None:
            return None
        predicted = self.step_time.seconds(load)
        self.background.num_quiet_steps = 0 if self.shares.num_busy[False] else self.background.num_quiet_steps + 1
        copies = self.blocks.host.take_copies() if self.blocks.host.num_slots else ()
        micro_batch = self._running.micro_batch
        plan = StepPlan(tuple(starts), tuple(rows), computed, load, is_alone, copies, predicted, beams, micro_batch)
        self._in_flight.append(plan)
        running = self.running
        for sequence_id, count in computed.items():
            running[sequence_id].in_flight.append(count)
        if beams is not None:
            computed.update((start.request_id, 1) for start in beams.starts)
        return plan

    def cached_prefix_len(self, sequence: Sequence) -> int:
        """Return the tokens of the cached prefix of a sequence, which need not be here."""
        return self._prefill.cached_prefix_len(sequence)

    @property
    def load_tokens(self) -> int:
        """Tokens known of every sequence that runs or waits here."""
        return sum(sequence.num_known for sequence in (*self.running.values(), *self.waiting))

    # Results --------------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, seconds: float) -> list[tuple[Sequence, Generation]]:
        """Take the result of the oldest step in flight into account; finished sequences leave.

        Returns what to deliver, by ascending ids: an order that another router can tell. Sequences that have left since
        the step was planned are skipped. The result must not contradict the plan (`check_result`).
        """
        assert self._in_flight, "no step is in flight"
        assert plan is self._in_flight[0], "results come in the order of their plans"
        by_id = {generation.request_id: generation for generation in result.generations}
        self._in_flight.popleft()
        # What the ranks measured, for steps wait for one another; `seconds` when they measured nothing.
        load = plan.load
        if load.num_drafts or result.num_draft_tokens:
            self.draft_gain.observe(load.num_decodes, result.num_draft_tokens, result.num_accepted_tokens)
            load = replace(load, num_drafts=result.num_draft_tokens)
        self.step_time.observe(load, result.total_ns / 1e9 or seconds)
        if self.bisector.is_recovering:
            self.bisector.succeed()
        delivered = []
        running, publishes, size = self.running, self.policy.has_prefix_cache, self.blocks.block_size
        for sequence_id, count in plan.computed.items():
            sequence = running.get(sequence_id)
            if sequence is None:
                continue
            del sequence.in_flight[0]
            begun = sequence.num_computed
            sequence.num_computed = computed = begun + count
            if publishes and begun // size != computed // size:
                self._publish(sequence, begun // size, computed // size)
            if sequence.num_prompt + len(sequence.output_ids) > computed:  # some of what it knows is not computed yet
                continue
            generation = by_id[sequence_id]
            if not sum(generation.tokens.logprobs) < inf:  # or not a number
                self._end_broken(sequence)
                delivered.append((sequence, generation))
                continue
            ids = generation.tokens.ids
            sequence.output_ids.extend(ids)
            if len(ids) != 1:
                self._note_several_tokens(sequence, generation)
            if generation.finished is not None:
                if sequence.beams is not None:
                    ending = self._beams.begin(sequence, generation)
                    if ending is None:
                        continue
                    generation = ending
                self.remove(sequence)
            delivered.append((sequence, generation))
        if plan.beams is not None:
            delivered += self._commit_beams(plan.beams, by_id)
        if result.memories:
            memories = dict(result.memories)
            for sequence, _ in delivered:
                sequence.mirostat_mu = memories.get(sequence.id)
        if self._running.is_disordered or plan.beams is not None:
            delivered.sort(key=_id_of)
        return delivered

    def _commit_beams(self, step: BeamStep, by_id: Mapping[int, Generation]) -> list[tuple[Sequence, Generation]]:
        """Take what beams computed into account; searches that are over leave."""
        ended = self._beams.commit(step, by_id)
        for sequence, _ in ended:
            if sequence.is_broken:
                self._end_broken(sequence)
            else:
                self.remove(sequence)
        return ended

    def _end_broken(self, sequence: Sequence) -> None:
        """End a sequence of broken scores; what it computed since its last token, maybe as broken, is never shared."""
        sequence.is_broken = True
        first = sequence.num_cached // self.blocks.block_size if sequence.output_ids else 0
        self.blocks.withdraw(sequence.blocks[first:])
        size = self.blocks.block_size
        ends = range(first, min(sequence.num_computed, sequence.num_known) // size)
        if self.blocks.host.num_slots:
            self.blocks.host.discard(sequence.block_key(i, size) for i in ends)
        if self.blocks.states is not None:  # also where the block of a key is another sequence's
            for i in ends:
                self.blocks.states.withdraw(sequence.block_key(i, size))
        self.remove(sequence)

    def _note_several_tokens(self, sequence: Sequence, generation: Generation) -> None:
        """A sequence got more than the one token expected: accepted drafts, the rest of a forced span, or both."""
        accepted, size = generation.num_accepted, self.blocks.block_size
        if accepted:
            begun = sequence.num_computed
            sequence.num_computed = computed = begun + accepted
            self.shares.charge(sequence, accepted)
            if self.policy.has_prefix_cache and begun // size != computed // size:
                self._publish(sequence, begun // size, computed // size)
        if len(generation.tokens.ids) - accepted != 1:
            self._running.mark_not_plain(sequence)
        if self.policy.is_plain:  # such a shard has computed all but one of those that it speculated
            sequence.num_computed = sequence.num_known - 1

    def _publish(self, sequence: Sequence, first: int, end: int) -> None:
        """Make blocks known that have been filled: those from `first` up to `end`."""
        for i in range(first, end):
            self.blocks.publish(sequence.blocks[i], sequence.block_key(i, self.blocks.block_size))
        if self._checkpoints is not None:
            self._checkpoints.publish(sequence)

    def goals(self, plan: StepPlan) -> dict[int, int]:
        """By id, the tokens that each running sequence of the oldest step in flight would have computed with it."""
        running = self.running
        goals = {i: running[i].num_computed + count for i, count in plan.computed.items() if i in running}
        if plan.beams is not None:
            searching = [sequence for sequence, _ in plan.beams.rows if sequence.id in running]
            goals |= {sequence.id: sequence.num_computed + 1 for sequence in searching}
        return goals

    def computed(self) -> dict[int, int]:
        """By id, the tokens computed of every sequence that runs or waits."""
        return {sequence.id: sequence.num_computed for sequence in (*self.running.values(), *self.waiting)}

    def abandon(self) -> None:
        """Forget the steps in flight: one has failed, and what the others did is not taken into account."""
        self.blocks.forget_copies(copy for plan in self._in_flight for copy in plan.copies)
        self._in_flight.clear()
        self._running.forget_steps()
