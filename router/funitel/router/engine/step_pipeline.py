"""The step pipeline: calls to a replica in flight, lookahead of the next plan, and hang detection. Event loop only.

While the ranks compute one step the next has reached them already, so they do not wait for the router between two.
Calls are settled in the order they were sent. The plan of the next step waits until shortly before the step in flight
ends, so that requests which come until then are in it. Where none is expected it does not wait: a timer for each step
costs more than the planning.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

from funitel.proto.errors import FunitelError, ShardUnsound
from funitel.router.scheduler.plan import StepPlan
from funitel.router.shard_client.replica import Replica, SentStep, StepAnswer

# Planning, sending and whatever else the router does come to less than this, and a step takes less of its predicted
# time only now and then; the shards wait when both fail.
MARGIN_SECONDS = 0.006
MARGIN_SHARE = 0.25
MIN_LOOKAHEAD_SECONDS = 0.005  # a shorter wait is not worth a timer
QUIET_SECONDS = 2.0  # with no request for so long, none is expected within a step


def lookahead_seconds(predicted_seconds: float, quiet_seconds: float, *, has_several_keys: bool) -> float:
    """Return the seconds from the begin of a step until the one after it is planned.

    Args:
        predicted_seconds: what the step is thought to take; 0 where unknown.
        quiet_seconds: since a sequence came last.
        has_several_keys: one that asks now and then is expected beside one that asks for much.
    """
    if quiet_seconds >= QUIET_SECONDS and not has_several_keys:
        return 0.0
    seconds = predicted_seconds * (1 - MARGIN_SHARE) - MARGIN_SECONDS
    return seconds if seconds >= MIN_LOOKAHEAD_SECONDS else 0.0


# Nothing was learnt yet of the first steps of a kind, and they may compile what they run.
FIRST_FACTOR = 5
# A step that takes so many times what it was predicted to is not slow but hangs: noise, swapping and neighbours
# stretch one by less.
LATE_FACTOR = 10


def step_timeout_seconds(plan: StepPlan | None, step_timeout_s: float) -> float:
    """Return the seconds from the answer before it to its own that a call may take; one without a plan drops rows."""
    if plan is None:
        return step_timeout_s
    if not plan.predicted_seconds:
        return FIRST_FACTOR * step_timeout_s
    return max(step_timeout_s, LATE_FACTOR * plan.predicted_seconds)


@dataclass(slots=True, eq=False)
class StepCall:
    """A call in flight: a step with its plan, or else one that drops rows. Instants are of the monotonic clock."""

    answer: asyncio.Future[Any]
    plan: StepPlan | None = None
    step: SentStep | None = None
    sent: float = field(default_factory=time.monotonic)
    answered: float | None = None
    age: float = 0.0  # seconds that it was the oldest, of this process's own time
    failure: FunitelError | None = None  # it was given up


@dataclass(frozen=True, slots=True)
class CompletedCall:
    """A call that succeeded: a step's plan and answer, and seconds it took after the call before it."""

    plan: StepPlan | None
    answer: StepAnswer | None
    seconds: float


class Pipeline:
    """At most `num_steps` steps in flight; with one, no other call is either. `wake` is called at every answer."""

    def __init__(self, replica: Replica, num_steps: int, wake: Callable[[], None]) -> None:
        self.num_steps = num_steps
        self._replica = replica
        self._wake = wake
        self._calls: deque[StepCall] = deque()
        self._last_answered = 0.0

    @property
    def has_room(self) -> bool:
        """Whether another step may be sent now."""
        if self.num_steps == 1:
            return not self._calls
        return sum(call.plan is not None for call in self._calls) < self.num_steps

    def seconds_to_plan(self, newest: float, *, has_several_keys: bool) -> float:
        """How long the plan of the next step can wait, where there is room for it; `newest`: when a sequence came."""
        num_stages = self._replica.num_stages  # which compute at once
        steps = [call for call in self._calls if call.plan is not None]
        num_waiting = len(steps) - num_stages  # of those in flight, behind the ones that are computed
        if num_waiting < 0 or steps[0].answered is not None:
            return 0.0
        begin, now = max(steps[0].sent, self._last_answered), time.monotonic()
        if num_waiting:
            begin += (
                sum(step.plan.predicted_seconds for step in steps[:num_waiting] if step.plan is not None) / num_stages
            )
        last = steps[num_waiting].plan
        assert last is not None
        seconds = last.predicted_seconds / num_stages
        return begin + lookahead_seconds(seconds, now - newest, has_several_keys=has_several_keys) - now

    @property
    def oldest(self) -> StepCall | None:
        """The call that is settled next."""
        return self._calls[0] if self._calls else None

    @property
    def is_answered(self) -> bool:
        """Whether the oldest call can be settled."""
        return bool(self._calls) and self._calls[0].answered is not None

    def drop_all_but(self, keep: Container[int]) -> None:
        """Send what drops the rows of all sequences but `keep`; later steps are without them."""
        for answer in self._replica.drop_all_but(keep):
            self._add(StepCall(asyncio.ensure_future(answer)))

    def send(self, plan: StepPlan) -> None:
        """Send a step now: what was planned is what is sent."""
        step = self._replica.send(plan)
        self._add(StepCall(asyncio.ensure_future(step.results), plan, step))

    def _add(self, call: StepCall) -> None:
        self._calls.append(call)
        call.answer.add_done_callback(lambda _: self._note(call))

    def _note(self, call: StepCall) -> None:
        if call.failure is not None:
            return
        call.answered = time.monotonic()
        if not call.answer.cancelled():
            call.answer.exception()  # retrieved: after a loss of shards no further answer is settled
        self._wake()

    def tick(self, seconds: float, timeout_of: Callable[[StepPlan | None], float]) -> None:
        """Note that time has passed, and give the oldest call up if it has been the oldest for longer than it may."""
        call = self.oldest
        if call is None or call.answered is not None:
            return
        call.age += seconds
        timeout = timeout_of(call.plan)
        if call.age > timeout:
            call.failure = ShardUnsound(
                f"the shards have not answered a call for {call.age:.3g} s, {timeout:g} s it may take"
            )
            call.answered = time.monotonic()
            self._wake()

    def settle(self) -> CompletedCall:
        """Take the oldest call's answer into account; it stays the oldest until it is `done` with.

        Raises:
            InvalidRequest: every rank refused the call before changing anything.
            StepFailed: the call failed and the ranks are sound.
            ShardFailed: a rank does not answer, or was given up, or ranks disagree.
            After any of them what the ranks hold is unknown: `drain`, then clear the replica.
        """
        call = self._calls[0]
        assert call.answered is not None, "it is not answered"
        if call.failure is not None:
            raise call.failure
        seconds = call.answered - max(call.sent, self._last_answered)
        result = call.answer.result()
        answer = self._replica.settle(call.step, result) if call.step is not None else None
        self._last_answered = call.answered
        return CompletedCall(call.plan, answer, seconds)

    def done(self) -> None:
        """Let go of the oldest call."""
        self._calls.popleft()

    async def answered(self) -> None:
        """Return once the calls that are in flight now are answered, whatever they brought."""
        calls = [call.answer for call in self._calls if not call.answer.done()]
        if calls:
            await asyncio.wait(calls)

    async def drain(self) -> None:
        """Wait until no call is in flight, whatever comes of them; behind one that was given up for none."""
        if any(call.failure is not None for call in self._calls):
            for call in self._calls:
                call.answer.cancel()
        await asyncio.gather(*(call.answer for call in self._calls), return_exceptions=True)
        self._calls.clear()
