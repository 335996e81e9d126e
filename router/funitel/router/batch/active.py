"""One batch while its requests run: which are next, which are under way, and how often each was tried."""

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field
from math import inf

from funitel.router.batch.records import BatchRequest, StoredBatch

MAX_ATTEMPTS = 3  # of a request that fails for no fault of its own
MAX_DOUBLINGS = 16  # of a pause


@dataclass(eq=False, slots=True)
class ActiveBatch:
    """A batch in progress. Event loop only; instants are of the monotonic clock."""

    batch: StoredBatch
    next: deque[BatchRequest] = field(default_factory=deque)
    last_line: int = 0  # that was read from the store
    is_read: bool = False  # up to its end
    running: "dict[int, asyncio.Task[None]]" = field(default_factory=dict)  # by line
    attempts: Counter[int] = field(default_factory=Counter)  # by line, that failed
    paused_until: float = -inf
    num_refused: int = 0  # pauses in a row that ended in vain: a request found no place

    @property
    def is_done(self) -> bool:
        """Whether every request has a result."""
        return self.is_read and not self.next and not self.running

    def may_retry(self, line: int) -> bool:
        """Count a failure; whether the request is to be tried again."""
        self.attempts[line] += 1
        return self.attempts[line] < MAX_ATTEMPTS

    def refuse(self, request: BatchRequest, now: float, pause_seconds: float, max_pause_seconds: float) -> None:
        """Queue a request that found no place behind the others, and start none for a while, twice as long each time.

        It is tried again until the batch ends: no request is lost.
        """
        self.next.append(request)
        if now < self.paused_until:  # it was under way when the pause began
            return
        seconds = pause_seconds * 2.0 ** min(self.num_refused, MAX_DOUBLINGS)
        self.paused_until = now + min(seconds, max_pause_seconds)
        self.num_refused += 1

    def admit(self) -> None:
        """Note that a request found a place."""
        self.num_refused = 0

    def give_back(self, request: BatchRequest, now: float, pause_seconds: float) -> None:
        """Queue a request again, before the others, and start none for a while."""
        self.next.appendleft(request)
        self.paused_until = max(self.paused_until, now + pause_seconds)
