"""Limit of wrong passwords: of each address and of each user. Pure: instants are seconds of a monotonic clock."""

from collections.abc import Sequence
from dataclasses import dataclass

from funitel.proto.errors import RateLimited

MAX_FAILURES = 5
WAIT_SECONDS, MAX_WAIT_SECONDS = 1.0, 300.0  # doubled by each failure beyond
FORGET_SECONDS = 900.0
MAX_SUBJECTS = 10_000  # counted at once; of more the one that failed longest ago is forgotten


@dataclass(slots=True)
class _Failures:
    number: int
    last: float

    @property
    def free_at(self) -> float:
        """From when on another try is allowed."""
        over = self.number - MAX_FAILURES
        return self.last + min(MAX_WAIT_SECONDS, WAIT_SECONDS * 2.0**over) if over >= 0 else self.last


class LoginTries:
    """Counts failed logins by subject: an address, or a user."""

    def __init__(self) -> None:
        self._failures: dict[str, _Failures] = {}

    def check(self, subjects: Sequence[str], now: float) -> None:
        """Raise RateLimited, with the time to wait, while one of the subjects may not try."""
        for subject in subjects:
            found = self._failures.get(subject)
            if found is not None and now < found.free_at:
                raise RateLimited("too many wrong passwords", found.free_at - now)

    def count(self, subjects: Sequence[str], now: float) -> None:
        """Note that a try begins, which counts as failed until `succeed`; so tries at once are counted, too."""
        for subject in subjects:
            found = self._failures.pop(subject, None)
            if found is None or now - found.last > FORGET_SECONDS:
                found = _Failures(0, now)
            found.number += 1
            found.last = now
            self._failures[subject] = found
        while len(self._failures) > MAX_SUBJECTS:
            del self._failures[next(iter(self._failures))]

    def succeed(self, subjects: Sequence[str]) -> None:
        """Forget the failures of subjects."""
        for subject in subjects:
            self._failures.pop(subject, None)
