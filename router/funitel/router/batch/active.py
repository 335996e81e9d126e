"""One batch while its requests run: which are next, which are under way, and how often each was tried."""

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field
from math import inf

from funitel.router.batch.records import BatchRequest, StoredBatch

MAX_ATTEMPTS = 3  # of a request that fails for no fault of its own


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

    @property
    def is_done(self) -> bool:
        """Whether every request has a result."""
        return self.is_read and not self.next and not self.running

    def may_retry(self, line: int) -> bool:
        """Count a failure; whether the request is to be tried again."""
        self.attempts[line] += 1
        return self.attempts[line] < MAX_ATTEMPTS

    def give_back(self, request: BatchRequest, now: float, pause_seconds: float) -> None:
        """Queue a request again, before the others, and start none for a while."""
        self.next.appendleft(request)
        self.paused_until = max(self.paused_until, now + pause_seconds)
