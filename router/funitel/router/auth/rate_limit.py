"""Rate limit: a sliding window of what was used within a minute. Pure: instants are seconds of a monotonic clock."""

from collections import deque

MINUTE = 60


class MinuteWindow:
    """What was used of one thing, by second, so that a minute is never more than 61 numbers.

    A second is forgotten once all of it is a minute old: no minute, wherever it begins, has more than was allowed.
    """

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int]] = deque()  # when it is forgotten, and how much was used in it
        self._total = 0

    def add(self, amount: int, now: float) -> None:
        """Note that so much was used."""
        self._total += amount
        end = int(now) + 1 + MINUTE
        if self._seconds and self._seconds[-1][0] == end:
            amount += self._seconds.pop()[1]
        self._seconds.append((end, amount))

    def used(self, now: float) -> int:
        """What was used within the last minute."""
        while self._seconds and self._seconds[0][0] <= now:
            self._total -= self._seconds.popleft()[1]
        return self._total

    def seconds_until(self, amount: int, now: float) -> float:
        """How long until at most so much was used within a minute, if nothing is used meanwhile."""
        used = self.used(now)
        free_at = now
        for end, spent in self._seconds:
            if used <= amount:
                break
            used -= spent
            free_at = end
        return free_at - now
