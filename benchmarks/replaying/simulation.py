"""Simulate replicas in virtual time: the router's own scheduler and block pool over a shard that only takes time."""

import heapq
import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from funitel.proto.errors import Overloaded
from funitel.proto.step import (
    FinishReason,
    GeneratedText,
    Generation,
    SamplingParams,
    StepResult,
    StoppingParams,
    Tokens,
)
from funitel.router.core.request import Request, Sequence
from funitel.router.engine.interface import ReplicaLoad
from funitel.router.engine.step_pipeline import lookahead_seconds
from funitel.router.replica_set.load_balancer import choose_replica
from funitel.router.scheduler.admission import Admission, InFlight
from funitel.router.scheduler.plan import StepPlan
from funitel.router.scheduler.scheduler import Scheduler
from replaying.costs import StepCosts
from replaying.measures import Measures
from replaying.trace import Arrival

SAMPLING = SamplingParams()
GROUP_TOKENS = 2**31  # tokens of prefix group g are this + g; all others of a request are its number


@dataclass(slots=True)
class Row:
    """What the simulated shard knows of one sequence."""

    arrival: Arrival
    token: Generation  # what each step gives but the last
    left: int  # completion tokens to come
    length: int = 0  # known tokens
    pending: int = 0  # of them not computed
    last_step: int = -1  # that gave a token


def sequence_of(number: int, arrival: Arrival) -> Sequence:
    """Request `number` as the router would queue it: tokens that are equal where the trace says so."""
    own, shared = number % GROUP_TOKENS, GROUP_TOKENS + arrival.prefix_group
    request = Request(
        input_ids=(shared,) * arrival.prefix_tokens + (own,) * (arrival.prompt_tokens - arrival.prefix_tokens),
        sampling=SAMPLING,
        stopping=StoppingParams(max_new_tokens=arrival.max_new_tokens),
        key=arrival.key.encode(),
        priority=arrival.priority,
    )
    return Sequence(number, request, arrived=arrival.at)


class SimulatedReplica:
    """One scheduler with its pool, and the steps that are planned: one is computed, others have been sent behind it."""

    def __init__(
        self,
        scheduler: Scheduler,
        costs: StepCosts,
        measures: Measures,
        pipeline_steps: int,
        admission: Admission | None = None,
    ) -> None:
        """Begin without requests; without an `admission`, every request that fits into the pool is admitted."""
        self.scheduler = scheduler
        self._admission = admission
        self.is_asleep = True  # nothing is in flight, and no event will wake it
        self.load_tokens = 0  # known tokens of all that wait or run
        self._costs = costs
        self._measures = measures
        self._rows: dict[int, Row] = {}
        self._pipeline_steps = pipeline_steps
        self._plans: deque[StepPlan] = deque()  # sent and not settled, oldest first
        self._result = StepResult((), None)
        self._givers: list[Row] = []  # of a token, in the step that is computed
        self._seconds = 0.0
        self._plan_from = 0.0  # instant from which a second step may be planned
        self._newest = 0.0  # instant at which a request came last
        self._ends = array("d")  # of every step

    def submit(self, sequence: Sequence, arrival: Arrival) -> None:
        """Queue a request; one that could never fit is counted and refused, as the router does."""
        measures, blocks = self._measures, self.scheduler.blocks
        measures.num_requests += 1
        if arrival.prompt_tokens + arrival.max_new_tokens > blocks.num_blocks * blocks.block_size:
            measures.num_refused += 1
            return
        if not self._admits(sequence):
            measures.num_turned_away += 1
            return
        goes_on = arrival.prefix_tokens == arrival.prompt_tokens  # a turn of a chat: its answer is in the next prompt
        token = GROUP_TOKENS + arrival.prefix_group if goes_on else sequence.id % GROUP_TOKENS
        generation = Generation(sequence.id, Tokens((token,), (0.0,), ("",)))
        self._rows[sequence.id] = Row(arrival, generation, arrival.completion_tokens, length=arrival.prompt_tokens)
        self.load_tokens += arrival.prompt_tokens
        self.scheduler.add(sequence)
        self._newest = arrival.at
        if self._plans:
            self._send_steps(arrival.at)

    def _admits(self, sequence: Sequence) -> bool:
        if self._admission is None:
            return True
        scheduler, own = self.scheduler, self.scheduler.shares.sequences_of(sequence.request.key)
        in_flight = InFlight(len(self._rows), own)
        try:
            leaving = self._admission.check(sequence, in_flight, scheduler)
        except Overloaded:
            return False
        if leaving is not None:
            scheduler.remove(leaving)
            self.load_tokens -= self._rows.pop(leaving.id).length
            self._measures.num_turned_away += 1
        return True

    def _send_steps(self, now: float) -> None:
        """Plan as far ahead as may be."""
        while len(self._plans) < self._pipeline_steps and (not self._plans or now >= self._plan_from):
            self.scheduler.preempt()
            plan = self.scheduler.schedule()
            if plan is None:
                return
            self._plans.append(plan)

    def advance(self, now: float) -> float | None:
        """Do what is due: plan a further step, or end one and begin the next.

        Returns when there will be something to do again; None if nothing is in flight.
        """
        if self._ends and now < self._ends[-1]:
            self._send_steps(now)
            return self._ends[-1]
        self._end()
        return self._begin(now)

    def _begin(self, now: float) -> float | None:
        measures = self._measures
        self._plan_from = math.inf  # until the first is known
        self._send_steps(now)
        self.is_asleep = not self._plans
        if self.is_asleep:
            return None
        plan = self._plans[0]
        for start in plan.starts:
            row = self._rows[start.request_id]
            row.pending = row.length - start.cache_len
            if not start.output_ids:
                measures.prompt_tokens += row.length
                measures.cached_tokens += start.cache_len
        self._seconds = self._compute(plan)
        self._measure(self._seconds)
        self._ends.append(now + self._seconds)
        has_several_keys = self.scheduler.shares.num_known_keys > 1
        self._plan_from = now + lookahead_seconds(
            plan.predicted_seconds, now - self._newest, has_several_keys=has_several_keys
        )
        self._send_steps(now)
        return self._ends[-1] if self._plan_from <= now else min(self._plan_from, self._ends[-1])

    def _compute(self, plan: StepPlan) -> float:
        """Do a shard's part of a step; returns the seconds it takes."""
        rows = self._rows
        givers: list[Row] = []
        generations: list[Generation] = []
        prompt_tokens = decode_rows = context = 0
        pairs = 0.0
        for sequence_id, count in plan.computed.items():
            row = rows.get(sequence_id)
            if row is None:
                continue  # it ended, sooner than it might have, in the step before
            if count == row.pending == 1:
                decode_rows += 1
                context += row.length
            else:
                prompt_tokens += count
                pairs += count * (row.length - row.pending + (count + 1) / 2)
                row.pending -= count
                if row.pending:
                    continue
                row.pending = 1
            row.length += 1
            row.left -= 1
            givers.append(row)
            generations.append(row.token if row.left else _last(row))
        self._givers = givers
        self._result = StepResult(tuple(generations), None)
        self._measures.computed_tokens += prompt_tokens
        return self._costs.seconds(prompt_tokens, pairs, decode_rows, context)

    def _measure(self, seconds: float) -> None:
        measures, blocks = self._measures, self.scheduler.blocks
        running, used = len(self.scheduler.running), blocks.num_used / blocks.num_blocks
        measures.num_steps += 1
        measures.running.hold(running, seconds)
        measures.pool_used.hold(used, seconds)
        if self.scheduler.waiting:
            measures.running_queued.hold(running, seconds)
            measures.pool_used_queued.hold(used, seconds)

    def _end(self) -> None:
        """Settle the step that was computed, if any."""
        if not self._plans:
            return
        plan = self._plans.popleft()
        delivered = self.scheduler.commit(plan, self._result, self._seconds)
        if self._admission is not None:
            throughput = self._admission.throughput
            throughput.observe_step(plan.num_tokens, self._seconds, self._ends[-1])
            for sequence, generation in delivered:
                if sequence.estimated_seconds:
                    throughput.observe_first_token(sequence, self._ends[-1])
                if generation.finished is not None:
                    throughput.observe_end(sequence)
        self._note_tokens()

    def _note_tokens(self) -> None:
        measures, ends = self._measures, self._ends
        this = len(ends) - 1
        num_steady = 0  # gave a token in the step before too
        for row in self._givers:
            last, row.last_step = row.last_step, this
            if last < 0:
                measures.note_first_token(row.arrival.key, ends[this] - row.arrival.at)
            elif last == this - 1:
                num_steady += 1
            else:
                measures.between_tokens.add(ends[this] - ends[last])
            if not row.left:
                self.load_tokens -= row.length
                del self._rows[row.token.request_id]
                measures.num_finished += 1
        if num_steady:
            measures.between_tokens.add(ends[this] - ends[this - 1], num_steady)
        self.load_tokens += len(self._givers)
        measures.completion_tokens += len(self._givers)
        measures.ended = max(measures.ended, ends[this])


def _last(row: Row) -> Generation:
    finished = GeneratedText("", row.arrival.completion_tokens, FinishReason.LENGTH)
    return Generation(row.token.request_id, row.token.tokens, finished=finished)


def simulate(arrivals: Iterable[Arrival], replicas: Seq[SimulatedReplica], count: Callable[[int], None]) -> None:
    """Run every arrival to its end; `count` is told how many have come."""
    events: list[tuple[float, int]] = []  # (time, replica): its step ends, it plans, or it wakes

    def work_until(limit: float) -> None:
        while events and events[0][0] < limit:
            now, index = events[0]
            until = replicas[index].advance(now)
            if until is None:
                heapq.heappop(events)
            else:
                heapq.heapreplace(events, (until, index))

    for number, arrival in enumerate(arrivals):
        work_until(arrival.at)
        sequence = sequence_of(number, arrival)
        index = choose(replicas, sequence)
        replicas[index].submit(sequence, arrival)
        if replicas[index].is_asleep:
            replicas[index].is_asleep = False
            heapq.heappush(events, (arrival.at, index))
        count(number + 1)
    work_until(float("inf"))


def choose(replicas: Seq[SimulatedReplica], sequence: Sequence) -> int:
    """Which replica a sequence goes to, by the router's rule."""
    if len(replicas) == 1:
        return 0
    return choose_replica(
        [ReplicaLoad(each.load_tokens, each.scheduler.cached_prefix_len(sequence)) for each in replicas]
    )
