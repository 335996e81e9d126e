"""All connections of the router: how many there may be, which of them rest, and how many were cut, and why.

Knows no HTTP: what a connection waits for, and how long it may, is its own business. Event loop only.
"""

import asyncio
import logging
from collections import Counter, OrderedDict

from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics
from funitel.router.transport.memory_budget import Client, MemoryBudget

logger = logging.getLogger(__name__)

LOG_SECONDS = 60.0  # between two lines about connections that were cut


class Connections:
    """The connections that are open, `most` at once.

    One that has no request under way rests. When there is no place left for a newcomer, the one that has rested for
    longest gives its own: a client that connects and says nothing keeps out nobody. `unread` and `bodies` are what is
    kept for all of them.
    """

    def __init__(self, most: int, settings: RouterSettings, metrics: Metrics) -> None:
        self.most = most
        self.unread = MemoryBudget(settings.max_total_unread_bytes, "total_unread_bytes")
        self.bodies = MemoryBudget(settings.max_total_body_bytes, "total_body_bytes")
        self._metrics = metrics
        self._open: set[Client] = set()
        self._resting: OrderedDict[Client, None] = OrderedDict()  # for longest first
        self._cut: Counter[str] = Counter()  # since the last line of the log
        self._next_line: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: Client) -> bool:
        """Count a connection among the open ones; False if there is no place for it."""
        if len(self._open) >= self.most:
            if not self._resting:
                self.note_cut("full")
                return False
            longest = next(iter(self._resting))
            self.leave(longest)
            longest.cut("displaced")
        self._open.add(connection)
        self._metrics.set_connections(len(self._open))
        return True

    def leave(self, connection: Client) -> None:
        """Forget a connection that has ended; it may be forgotten already."""
        self._resting.pop(connection, None)
        self._open.discard(connection)
        self.unread.forget(connection)
        self.bodies.forget(connection)
        self._metrics.set_connections(len(self._open))

    def rest(self, connection: Client) -> None:
        """Note that a connection has no request under way."""
        if connection in self._open:
            self._resting.setdefault(connection)

    def work(self, connection: Client) -> None:
        """Note that a connection has a request under way."""
        self._resting.pop(connection, None)

    def note_cut(self, reason: str) -> None:
        """Count a connection that was cut; one line a minute tells the log."""
        self._metrics.count_cut(reason)
        self._cut[reason] += 1
        if self._next_line is None:
            self._log()

    def _log(self) -> None:
        """Write about what was cut since the last line, if anything was, and no more for a minute."""
        self._next_line = None
        if not self._cut:
            return
        counts = " ".join(f"{reason}={count}" for reason, count in sorted(self._cut.items()))
        logger.warning("cut connections: %s; %d open, at most %d", counts, len(self._open), self.most)
        self._cut.clear()
        self._next_line = asyncio.get_running_loop().call_later(LOG_SECONDS, self._log)
