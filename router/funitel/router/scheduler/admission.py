"""Admission: bounds on requests in flight and queued tokens, deadlines, the target of the time to first token. Pure.

Waiting times are estimates from the measured throughput. The engine asks before it queues a sequence.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from funitel.proto.errors import Overloaded
from funitel.router.core.request import Sequence, is_background
from funitel.router.scheduler.cost.throughput import Throughput
from funitel.router.scheduler.cost.ttft_estimate import TtftEstimate, TtftEstimator
from funitel.router.scheduler.waiting_queue import FairShares, WaitingQueue

OTHERS_SHARE = 8  # where several keys are known, one leaves an eighth of the places to the others


@dataclass(frozen=True, slots=True)
class InFlight:
    """Requests that have not ended: all, and those of one key. For a key that is no background one, without those."""

    num_requests: int
    of_key: int

    @classmethod
    def of(cls, num_by_key: Mapping[bytes, int], key: bytes) -> "InFlight":
        """Count the requests of all keys that one competes with, and its own."""
        if is_background(key):
            return cls(sum(num_by_key.values()), num_by_key.get(key, 0))
        return cls(sum(n for other, n in num_by_key.items() if not is_background(other)), num_by_key.get(key, 0))

    def __add__(self, other: "InFlight") -> "InFlight":
        return InFlight(self.num_requests + other.num_requests, self.of_key + other.of_key)


class Reservations:
    """Places held for requests that are not submitted yet, by API key: they count as in flight."""

    def __init__(self) -> None:
        self._held: Counter[bytes] = Counter()

    def in_flight(self, key: bytes) -> InFlight:
        """Count the reservations: all, and those of an API key."""
        return InFlight.of(self._held, key)

    def hold(self, key: bytes) -> "Reservation":
        """Hold a place for a request."""
        self._held[key] += 1
        return Reservation(self._held, key)


class Reservation:
    """The place of one request until it is submitted, or goes no further."""

    def __init__(self, held: Counter[bytes], key: bytes) -> None:
        self._held = held
        self._key = key
        self._is_released = False

    def release(self) -> None:
        """Count it no more; may be called again."""
        if not self._is_released:
            self._is_released = True
            self._held[self._key] -= 1
            if not self._held[self._key]:
                del self._held[self._key]


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """The place of a sequence in the queue: 1 enters next. Seconds until it enters are an estimate."""

    position: int
    wait_seconds: float


class SequenceHolder(Protocol):
    """What has the sequences: a scheduler, or the holding queue where none runs."""

    waiting: WaitingQueue
    shares: FairShares

    @property
    def ttft_estimator(self) -> TtftEstimator | None:
        """Estimates the time to first token, where that is possible."""

    @property
    def running(self) -> Mapping[int, Sequence]:
        """Running sequences by id."""

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is."""


@dataclass(frozen=True, slots=True)
class Exceeded:
    """A bound that one more request would exceed: its name, and the words of a refusal."""

    reason: str
    words: str


class Admission:
    """The bounds of one queue, and its estimates.

    Args:
        max_requests: maximum of sequences that wait or run.
        max_queued_tokens: maximum of prompt tokens that wait; None for no bound. One prompt may always wait.
        has_several_keys: whether a single key must leave places to others.
        target_seconds: maximum of the estimated time to first token; None for any.
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
        self._max_of_a_key = max(1, max_requests - left_to_others)
        # Of incoming requests, by key and priority; kept until something happens, for a flood asks many times a step.
        self._positions: dict[tuple[bytes, int], QueuePosition] = {}
        self._estimates: dict[tuple[bytes, int], TtftEstimate] = {}
        self._happened = (0, 0, 0)

    # Bounds ---------------------------------------------------------------------------------------------------------

    def exceeded_count(self, in_flight: InFlight) -> Exceeded | None:
        """Return the bound on requests that one more would exceed."""
        count, own = in_flight.num_requests, in_flight.of_key
        if count >= self._max_requests:
            return Exceeded("requests", f"{count} requests in flight, at most {self._max_requests}")
        if own >= self._max_of_a_key:
            return Exceeded("key", f"{own} requests of this API key in flight, at most {self._max_of_a_key}")
        return None

    def exceeded_tokens(self, num_waiting: int, num_queued_tokens: int, num_tokens: int) -> Exceeded | None:
        """Return the bound on queued tokens, if a prompt of `num_tokens` would exceed it behind what waits."""
        tokens = num_queued_tokens + num_tokens
        if not num_waiting or self._max_queued_tokens is None or tokens <= self._max_queued_tokens:
            return None
        return Exceeded("queued_tokens", f"{tokens} prompt tokens would wait, at most {self._max_queued_tokens}")

    @staticmethod
    def exceeded_deadline(wait_seconds: float, left_seconds: float) -> Exceeded | None:
        """Return the deadline of a request, if it would wait longer than it has."""
        if wait_seconds <= left_seconds:
            return None
        return Exceeded("deadline", f"it would wait {wait_seconds:.1f} s, more than the {left_seconds:.1f} s it has")

    def check(self, incoming: Sequence, in_flight: InFlight, holder: SequenceHolder) -> Sequence | None:
        """Return the waiting sequence that must leave for an incoming one, if one must.

        That is the last of the key with most sequences, where the incoming one's has fewer by more than one.

        Args:
            incoming: it is not counted yet.
            in_flight: requests here and wherever else the bounds count them.
            holder: would queue it.

        Raises:
            Overloaded: there is no place for it, or it would wait longer than its deadline, or for its first token
                longer than the target.
        """
        displaced = self.check_count(incoming, in_flight, holder) or self._check_tokens(incoming, in_flight, holder)
        if displaced is None and incoming.request.deadline is not None:
            position = self._position_of(incoming, holder)
            late = self.exceeded_deadline(position.wait_seconds, incoming.request.deadline - incoming.arrived)
            if late is not None:
                raise _refusal(late, position)
        self._check_target(incoming, holder)
        return displaced

    def check_count(self, incoming: Sequence, in_flight: InFlight, holder: SequenceHolder) -> Sequence | None:
        """Check the bounds on requests alone, whatever the prompt; as `check`."""
        exceeded = self.exceeded_count(in_flight)
        if exceeded is None:
            return None
        displaced = (
            _newest_of_heaviest_key(incoming, in_flight.of_key, holder) if exceeded.reason == "requests" else None
        )
        if displaced is None:
            raise _refusal(exceeded, self._position_of(incoming, holder))
        return displaced

    def _check_tokens(self, incoming: Sequence, in_flight: InFlight, holder: SequenceHolder) -> Sequence | None:
        """Check the bound on queued tokens; as `check`."""
        queue, num_tokens = holder.waiting, len(incoming.request.input_ids)
        num_waiting, num_queued = queue.num_foreground, queue.num_foreground_tokens
        if is_background(incoming.request.key):
            num_waiting, num_queued = len(queue), queue.num_prompt_tokens
        exceeded = self.exceeded_tokens(num_waiting, num_queued, num_tokens)
        if exceeded is None:
            return None
        displaced = _newest_of_heaviest_key(incoming, in_flight.of_key, holder)
        freed = 0 if displaced is None else len(displaced.request.input_ids)
        if displaced is None or self.exceeded_tokens(num_waiting, num_queued - freed, num_tokens):
            raise _refusal(exceeded, self._position_of(incoming, holder))
        return displaced

    def _check_target(self, incoming: Sequence, holder: SequenceHolder) -> None:
        target, ttft_estimator = self._target_seconds, holder.ttft_estimator
        if target is None or ttft_estimator is None or is_background(incoming.request.key):
            return
        seconds = self._seconds_to_first_token(incoming, holder, ttft_estimator)
        if holder.running or len(holder.waiting):  # else nothing can come between
            incoming.estimated_seconds = seconds
            seconds = self.throughput.cautious(seconds)
        if seconds > target:
            position = self._position_of(incoming, holder)
            why = f": its first token would come after {seconds:.1f} s, the target is {target:g} s"
            raise Overloaded(why, position.position, max(position.wait_seconds, seconds - target), "first_token")

    # Estimates ------------------------------------------------------------------------------------------------------

    def position_of(self, incoming: Sequence, holder: SequenceHolder) -> QueuePosition:
        """Estimate the place of an incoming sequence; with none ahead it waits at most for a running one to end."""
        ahead = holder.waiting.ahead_of(incoming)
        return QueuePosition(
            len(ahead) + 1, self._seconds(ahead, holder.running.values()) if len(holder.waiting) else 0.0
        )

    def waits(self, queue: Iterable[Sequence], running: Iterable[Sequence]) -> list[float]:
        """Estimate the seconds until each sequence of a queue enters, in this order."""
        seconds, waits = self._seconds((), running), []
        for sequence in queue:
            waits.append(seconds)
            seconds += self.throughput.work_of(sequence) / self.throughput.tokens_per_second
        return waits

    def _position_of(self, incoming: Sequence, holder: SequenceHolder) -> QueuePosition:
        self._forget_what_has_changed(holder)
        turn = incoming.request.key, incoming.request.priority
        if turn not in self._positions:
            self._positions[turn] = self.position_of(incoming, holder)
        return self._positions[turn]

    def _seconds_to_first_token(
        self, incoming: Sequence, holder: SequenceHolder, ttft_estimator: TtftEstimator
    ) -> float:
        """Estimate the time to first token; where not all ahead fit, it waits for others to end."""
        self._forget_what_has_changed(holder)
        turn = incoming.request.key, incoming.request.priority
        if turn not in self._estimates:
            self._estimates[turn] = ttft_estimator.behind(holder.waiting.ahead_of(incoming))
        estimate = self._estimates[turn]
        seconds = ttft_estimator.seconds(incoming, estimate)
        if estimate.has_room:
            return seconds
        return seconds + self._seconds(holder.waiting.ahead_of(incoming), holder.running.values())

    def _forget_what_has_changed(self, holder: SequenceHolder) -> None:
        happened = holder.waiting.num_changes, self.throughput.num_observed, len(holder.running)
        if happened != self._happened:
            self._positions.clear()
            self._estimates.clear()
            self._happened = happened

    def _seconds(self, ahead: Iterable[Sequence], running: Iterable[Sequence]) -> float:
        left = [self.throughput.work_of(sequence) for sequence in running]
        soonest = min(left, default=0.0) * len(left)  # all running sequences advance alike
        work = soonest + sum(map(self.throughput.work_of, ahead))
        return work / self.throughput.tokens_per_second


def _refusal(exceeded: Exceeded, position: QueuePosition) -> Overloaded:
    return Overloaded(f": {exceeded.words}", position.position, position.wait_seconds, exceeded.reason)


def _newest_of_heaviest_key(incoming: Sequence, own: int, holder: SequenceHolder) -> Sequence | None:
    """Return the sequence to displace for a key that has `own`; None unless another key has more by two.

    Those of batches displace none, and take no place that could be given to another.
    """
    if is_background(incoming.request.key):
        return None
    counts, queue = {key: n for key, n in holder.shares.sequences.items() if not is_background(key)}, holder.waiting
    lasts = [last for key in counts if counts[key] > own + 1 and (last := queue.newest_of(key)) is not None]
    return max(lasts, key=lambda last: counts[last.request.key], default=None)
