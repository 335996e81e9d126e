"""Snapshot of an engine's state for `funitel top`: numbers and names, never a word of a prompt or an answer.

Its cost is bounded: of a long queue and a large batch the first are shown, and the counts are of all.
"""

from collections import deque
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from itertools import islice

from pydantic import BaseModel

from funitel.router.core.request import Sequence
from funitel.router.core.stream import TokenStream
from funitel.router.scheduler.admission import Admission
from funitel.router.scheduler.plan import StepPlan
from funitel.router.scheduler.scheduler import Scheduler
from funitel.router.telemetry.adapter_metrics import AdapterUse


class WaitingRequest(BaseModel):
    """A sequence that waits to enter, or to be resumed."""

    id: int
    request_id: str
    key: str | None
    position: int
    age_seconds: float
    estimated_wait_seconds: float
    prompt_tokens: int
    tokens: int
    priority: int
    was_started: bool


class RunningRequest(BaseModel):
    """A sequence that runs; `gap_seconds` since its last token, or since it came."""

    id: int
    request_id: str
    key: str | None
    age_seconds: float
    gap_seconds: float
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    tokens: int
    max_new_tokens: int
    blocks: int
    priority: int


class Pool(BaseModel):
    """The pool in blocks; `cached` ones are among the free."""

    blocks: int
    block_size: int
    used: int
    free: int
    cached: int
    evicted: int
    preempted: int


class StateSlotPool(BaseModel):
    """The slots of recurrent states; `cached` ones are among the free."""

    slots: int
    used: int
    free: int
    cached: int
    evicted: int


class LoadedAdapter(BaseModel):
    """An adapter in memory, by its bytes on all ranks."""

    name: str
    bytes: int


class AdapterPool(BaseModel):
    """The adapters of a replica: those in memory, and the names of those that run and that requests wait for."""

    max_loaded: int
    loaded: list[LoadedAdapter]
    running: list[str]
    waiting: list[str]


class Step(BaseModel):
    """A step that was answered; what it was predicted to take is 0 where nothing was known."""

    kind: str
    ago_seconds: float
    rows: int
    prompt_tokens: int
    tokens: int
    seconds: float
    predicted_seconds: float


class ReplicaState(BaseModel):
    """One model copy; the counts are of whole lists."""

    index: int
    ranks: int
    tokens_per_second: float
    num_waiting: int
    num_queued_tokens: int
    num_running: int
    waiting: list[WaitingRequest]
    running: list[RunningRequest]
    pool: Pool
    states: StateSlotPool | None
    adapters: AdapterPool
    steps: list[Step]


class SchedulerState(BaseModel):
    """All replicas, at one instant."""

    model_id: str
    version: str
    time: float
    replicas: list[ReplicaState]


MAX_SHOWN = 100  # sequences of either list
MAX_STEPS = 32  # remembered
DIGITS = 6  # of seconds


@dataclass(frozen=True, slots=True)
class PastStep:
    """A step that was answered; `at` is an instant of the monotonic clock."""

    plan: StepPlan
    seconds: float
    at: float


PastSteps = deque[PastStep]  # oldest first


@dataclass(frozen=True, slots=True)
class EngineView:
    """What a state is read from."""

    scheduler: Scheduler
    streams: Mapping[int, TokenStream]
    admission: Admission
    past: PastSteps
    num_ranks: int
    adapters: Callable[[], AdapterUse]

    def state(self, index: int, now: float, keys: Container[str | None] | None = None) -> ReplicaState:
        """Describe the engine.

        Args:
            index: of the replica.
            now: on the monotonic clock.
            keys: names of the API keys of which sequences are listed; None for all. The counts are of all.
        """
        scheduler = self.scheduler
        waiting = self._waiting(now)
        running = [self._running(each, now) for each in islice(scheduler.running.values(), MAX_SHOWN)]
        return ReplicaState(
            index=index,
            ranks=self.num_ranks,
            tokens_per_second=round(self.admission.throughput.tokens_per_second, 3),
            num_waiting=len(scheduler.waiting),
            num_queued_tokens=scheduler.waiting.num_prompt_tokens,
            num_running=len(scheduler.running),
            waiting=[each for each in waiting if keys is None or each.key in keys],
            running=[each for each in running if keys is None or each.key in keys],
            pool=self._pool(),
            states=self._states(),
            adapters=self._adapters(),
            steps=[_step(each, now) for each in self.past],
        )

    def _waiting(self, now: float) -> list[WaitingRequest]:
        queue = self.scheduler.waiting.in_order(MAX_SHOWN)
        waits = self.admission.waits(queue, self.scheduler.running.values())
        return [
            WaitingRequest(
                id=sequence.id,
                request_id=sequence.request.request_id,
                key=sequence.request.key_name,
                position=place,
                age_seconds=round(now - sequence.arrived, DIGITS),
                estimated_wait_seconds=round(wait, DIGITS),
                prompt_tokens=sequence.num_prompt,
                tokens=len(sequence.output_ids),
                priority=sequence.request.priority,
                was_started=sequence.was_started,
            )
            for place, (sequence, wait) in enumerate(zip(queue, waits, strict=True), 1)
        ]

    def _running(self, sequence: Sequence, now: float) -> RunningRequest:
        stream = self.streams.get(sequence.id)
        latest = stream.timings.latest if stream is not None else None
        return RunningRequest(
            id=sequence.id,
            request_id=sequence.request.request_id,
            key=sequence.request.key_name,
            age_seconds=round(now - sequence.arrived, DIGITS),
            gap_seconds=round(now - (latest or sequence.arrived), DIGITS),
            prompt_tokens=sequence.num_prompt,
            cached_tokens=sequence.num_cached,
            computed_tokens=sequence.num_computed,
            tokens=len(sequence.output_ids),
            max_new_tokens=sequence.request.stopping.max_new_tokens,
            blocks=len(sequence.blocks),
            priority=sequence.request.priority,
        )

    def _pool(self) -> Pool:
        blocks = self.scheduler.blocks
        return Pool(
            blocks=blocks.num_blocks,
            block_size=blocks.block_size,
            used=blocks.num_used,
            free=blocks.num_free,
            cached=blocks.num_cached,
            evicted=blocks.num_evicted,
            preempted=self.scheduler.num_preempted,
        )

    def _adapters(self) -> AdapterPool:
        use = self.adapters()
        return AdapterPool(
            max_loaded=use.max_loaded,
            loaded=[LoadedAdapter(name=name, bytes=size) for name, size in use.loaded.items()],
            running=list(use.running),
            waiting=list(use.waiting),
        )

    def _states(self) -> StateSlotPool | None:
        states = self.scheduler.blocks.states
        if states is None:
            return None
        return StateSlotPool(
            slots=states.num_slots,
            used=states.num_used,
            free=states.num_free,
            cached=states.num_cached,
            evicted=states.num_evicted,
        )


def _step(past: PastStep, now: float) -> Step:
    load = past.plan.load
    kind = "decode" if not load.num_prompt_tokens else "mixed" if load.num_decodes else "prefill"
    return Step(
        kind=kind,
        ago_seconds=round(now - past.at, DIGITS),
        rows=len(past.plan.computed),
        prompt_tokens=load.num_prompt_tokens,
        tokens=past.plan.num_tokens,
        seconds=round(past.seconds, DIGITS),
        predicted_seconds=round(past.plan.predicted_seconds, DIGITS),
    )
