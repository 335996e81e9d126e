"""What may wait, and how long it will: bounds on requests and queued tokens, estimates from measured throughput. Pure.

The engine asks before it queues a sequence, and tells what steps have computed and how sequences have ended.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import inf

from funitel.proto.errors import Overloaded
from funitel.router.core.request import Sequence
from funitel.router.scheduler.cost.ttft_estimate import Forecaster, TtftEstimate
from funitel.router.scheduler.waiting_queue import FairShares, WaitingQueue

DEFAULT_TOKENS_PER_SECOND = 100.0  # before anything was measured
MEMORY_SECONDS = 10.0  # of computing, after which a measurement weighs 1 / e
MEMORY_REQUESTS = 20.0  # of that many, as to how much of their allowed length they use
# Of 100 first tokens 99 are to be in time, so more is expected than is foreseen, by the ratio that 99 stay under.
IN_TIME = 0.99
FIRST_LATENESS = 2.0
MOST_LATENESS = 3.0
LATENESS_STEP = 0.05
OTHERS_SHARE = 8  # where several keys are known, one leaves an eighth of the places to the others


class Throughput:
    """How fast tokens are computed, and how much of what requests may generate they do generate."""

    def __init__(self) -> None:
        self._tokens = DEFAULT_TOKENS_PER_SECOND  # decaying sums, which begin as one second of the default
        self._seconds = 1.0
        self._last = -inf
        self._used_share = 1.0
        self.num_observed = 0  # steps and ends
        self._lateness = FIRST_LATENESS

    @property
    def tokens_per_second(self) -> float:
        """Prompt and completion tokens computed per second of computing; recent seconds weigh more."""
        return self._tokens / self._seconds

    def observe_step(self, num_tokens: int, seconds: float, now: float) -> None:
        """Take into account a step that ends `now`, was sent `seconds` ago, and may have waited for the one before."""
        self.num_observed += 1
        busy = max(1e-6, min(seconds, now - self._last))
        self._last = now
        kept = max(0.0, 1.0 - busy / MEMORY_SECONDS)
        self._tokens = kept * self._tokens + num_tokens
        self._seconds = kept * self._seconds + busy

    def observe_end(self, sequence: Sequence) -> None:
        """Take into account how long a finished completion has become."""
        self.num_observed += 1
        used = len(sequence.output_ids) / sequence.request.stopping.max_new_tokens
        self._used_share += (used - self._used_share) / MEMORY_REQUESTS

    def observe_first_token(self, sequence: Sequence, now: float) -> None:
        """Take into account how well it was foreseen when a sequence would have its first token, which it has now."""
        is_late = now - sequence.arrived > self._lateness * sequence.foreseen_seconds
        step = LATENESS_STEP * (IN_TIME if is_late else IN_TIME - 1)
        self._lateness = min(MOST_LATENESS, max(1.0, self._lateness + step))
        sequence.foreseen_seconds = 0.0

    def cautious(self, seconds: float) -> float:
        """What a foreseen time comes to at most, for 99 of 100 first tokens."""
        return seconds * self._lateness

    def work_of(self, sequence: Sequence) -> float:
        """Tokens that are probably still to be computed for a sequence."""
        expected = self._used_share * sequence.request.stopping.max_new_tokens
        return max(1, sequence.num_pending) + max(0.0, expected - len(sequence.output_ids))


@dataclass(frozen=True, slots=True)
class InFlight:
    """Sequences that have not ended: all, and those of one key."""

    num_requests: int
    of_key: int

    def __add__(self, other: "InFlight") -> "InFlight":
        return InFlight(self.num_requests + other.num_requests, self.of_key + other.of_key)


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """Where a sequence stands, or would stand: 1 enters next. Seconds until it enters are an estimate."""

    position: int
    wait_seconds: float


class Admission:
    """The bounds of one queue.

    Args:
        max_requests: most sequences that wait or run.
        max_queued_tokens: most prompt tokens that wait; None for no bound. One prompt may always wait.
        has_several_keys: whether a single key must leave places to others.
        target_seconds: most until the first token of whoever is let in, as far as can be foreseen; None for any.
    """

    def __init__(
        self,
        max_requests: int,
        max_queued_tokens: int | None = None,
        *,
        has_several_keys: bool = False,
        target_seconds: float | None = None,
    ) -> None:
        self.throughput = Throughput()
        self._target_seconds = target_seconds
        self._max_requests = max_requests
        self._max_queued_tokens = max_queued_tokens
        left_to_others = max(1, max_requests // OTHERS_SHARE) if has_several_keys else 0
        self._most_of_a_key = max(1, max_requests - left_to_others)
        self._places: dict[
            tuple[bytes, int], QueuePosition
        ] = {}  # of newcomers by key and priority, until something happens
        self._forecasts: dict[tuple[bytes, int], TtftEstimate] = {}  # likewise
        self._happened = (0, 0, 0)

    def _place_of_newcomer(
        self, newcomer: Sequence, queue: WaitingQueue, running: Collection[Sequence]
    ) -> QueuePosition:
        """The same for whoever asks until something happens: a flood is refused many times a step."""
        self._forget_what_has_changed(queue, running)
        turn = newcomer.request.key, newcomer.request.priority
        if turn not in self._places:
            self._places[turn] = self.place_of(newcomer, queue, running)
        return self._places[turn]

    def _forget_what_has_changed(self, queue: WaitingQueue, running: Collection[Sequence]) -> None:
        happened = queue.num_changes, self.throughput.num_observed, len(running)
        if happened != self._happened:
            self._places.clear()
            self._forecasts.clear()
            self._happened = happened

    def _seconds_to_first_token(
        self, newcomer: Sequence, queue: WaitingQueue, running: Collection[Sequence], forecaster: Forecaster
    ) -> float:
        """When a newcomer would have its first token, which waits for others to end where not all find room."""
        self._forget_what_has_changed(queue, running)
        turn = newcomer.request.key, newcomer.request.priority
        if turn not in self._forecasts:
            self._forecasts[turn] = forecaster.behind(queue.ahead_of(newcomer))
        forecast = self._forecasts[turn]
        seconds = forecaster.seconds(newcomer, forecast)
        return seconds if forecast.has_room else seconds + self._seconds(queue.ahead_of(newcomer), running)

    def place_of(self, newcomer: Sequence, queue: WaitingQueue, running: Iterable[Sequence]) -> QueuePosition:
        """Where a newcomer would stand; with nobody ahead it waits at most for the first running one to end."""
        ahead = queue.ahead_of(newcomer)
        return QueuePosition(len(ahead) + 1, self._seconds(ahead, running) if len(queue) else 0.0)

    def waits(self, queue: Iterable[Sequence], running: Iterable[Sequence]) -> list[float]:
        """Seconds until each of a queue enters, who enter in this order."""
        seconds, waits = self._seconds((), running), []
        for sequence in queue:
            waits.append(seconds)
            seconds += self.throughput.work_of(sequence) / self.throughput.tokens_per_second
        return waits

    def _seconds(self, ahead: Iterable[Sequence], running: Iterable[Sequence]) -> float:
        left = [self.throughput.work_of(sequence) for sequence in running]
        soonest = min(left, default=0.0) * len(left)  # all that runs advances alike
        work = soonest + sum(map(self.throughput.work_of, ahead))
        return work / self.throughput.tokens_per_second

    def check(
        self,
        newcomer: Sequence,
        in_flight: "InFlight",
        queue: WaitingQueue,
        shares: FairShares,
        running: Collection[Sequence],
        forecaster: Forecaster | None = None,
    ) -> Sequence | None:
        """Say who must leave the queue for a newcomer, if somebody must.

        That is the last of the key with most sequences, where the newcomer's has fewer by more than one.

        Args:
            newcomer: it is not counted yet.
            in_flight: sequences here and wherever else the bounds count them.
            queue: those that wait here.
            shares: what each key has here.
            running: those that run here.
            forecaster: what foresees first tokens here, where that can be done.

        Raises:
            Overloaded: there is no place for it, or it would wait longer than its deadline, or for its first token
                longer than the target.
        """
        own, num_requests = in_flight.of_key, in_flight.num_requests
        tokens = queue.num_prompt_tokens + len(newcomer.request.input_ids)
        most_tokens = inf if self._max_queued_tokens is None or not len(queue) else self._max_queued_tokens
        leaving, why, reason = None, "", ""
        if num_requests >= self._max_requests:
            leaving = self._last_of_the_greediest(own, queue, shares)
            why, reason = f"{num_requests} requests in flight, at most {self._max_requests}", "requests"
        elif own >= self._most_of_a_key:
            why, reason = f"{own} requests of this API key in flight, at most {self._most_of_a_key}", "key"
        elif tokens > most_tokens:
            leaving = self._last_of_the_greediest(own, queue, shares)
            if leaving is not None and tokens - len(leaving.request.input_ids) > most_tokens:
                leaving = None
            why, reason = f"{tokens} prompt tokens would wait, at most {self._max_queued_tokens}", "queued_tokens"
        place = (
            self._place_of_newcomer(newcomer, queue, running) if why or newcomer.request.deadline is not None else None
        )
        if place is not None and leaving is None:
            left = inf if newcomer.request.deadline is None else newcomer.request.deadline - newcomer.arrived
            if not why and place.wait_seconds > left:
                why, reason = f"it would wait {place.wait_seconds:.1f} s, more than the {left:.1f} s it has", "deadline"
            if why:
                raise Overloaded(f": {why}", place.position, place.wait_seconds, reason)
        if forecaster is not None and self._target_seconds is not None:
            seconds = self._seconds_to_first_token(newcomer, queue, running, forecaster)
            if running or len(queue):  # else nothing can come between
                newcomer.foreseen_seconds = seconds
                seconds = self.throughput.cautious(seconds)
            self._check_target(seconds, self._place_of_newcomer(newcomer, queue, running))
        return leaving

    def _check_target(self, seconds: float, place: QueuePosition) -> None:
        target = self._target_seconds
        if target is not None and seconds > target:
            why = f": its first token would come after {seconds:.1f} s, the target is {target:g} s"
            raise Overloaded(why, place.position, max(place.wait_seconds, seconds - target), "first_token")

    def _last_of_the_greediest(self, own: int, queue: WaitingQueue, shares: FairShares) -> Sequence | None:
        """Who gives its place to a key that has `own` sequences: nobody unless a key has more by two."""
        counts = shares.sequences
        lasts = [last for key in counts if counts[key] > own + 1 and (last := queue.newest_of(key)) is not None]
        return max(lasts, key=lambda last: counts[last.request.key], default=None)
