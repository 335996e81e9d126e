"""Connection limits: all connections of the router, the idle ones, and counts of those that were disconnected.

Knows no HTTP: timeouts belong to each connection. Event loop only.
"""

import asyncio
import logging
from collections import Counter, OrderedDict

from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics
from funitel.router.transport.memory_budget import Client, MemoryBudget

logger = logging.getLogger(__name__)

LOG_SECONDS = 60.0  # between two log lines about disconnected clients


class Connections:
    """The open connections, at most `limit`.

    A connection without a request in flight is idle. At the limit the one that is idle for longest is disconnected for
    an incoming one. `unread` and `bodies` are the memory budgets of all of them.
    """

    def __init__(self, limit: int, settings: RouterSettings, metrics: Metrics) -> None:
        self.limit = limit
        self.unread = MemoryBudget(settings.max_total_unread_bytes, "total_unread_bytes")
        self.bodies = MemoryBudget(settings.max_total_body_bytes, "total_body_bytes")
        self._metrics = metrics
        self._open: set[Client] = set()
        self._idle: OrderedDict[Client, None] = OrderedDict()  # idle for longest first
        self._disconnected: Counter[str] = Counter()  # by reason, since the last log line
        self._next_log: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: Client) -> bool:
        """Count an incoming connection; False if it exceeds the limit."""
        if len(self._open) >= self.limit:
            if not self._idle:
                self.count_disconnect("full")
                return False
            longest = next(iter(self._idle))
            self.leave(longest)
            longest.disconnect("displaced")
        self._open.add(connection)
        self._metrics.set_connections(len(self._open))
        return True

    def leave(self, connection: Client) -> None:
        """Forget a connection that has ended; more than once is fine."""
        self._idle.pop(connection, None)
        self._open.discard(connection)
        self.unread.forget(connection)
        self.bodies.forget(connection)
        self._metrics.set_connections(len(self._open))

    def mark_idle(self, connection: Client) -> None:
        """Note that a connection has no request in flight."""
        if connection in self._open:
            self._idle.setdefault(connection)

    def mark_busy(self, connection: Client) -> None:
        """Note that a connection has a request in flight."""
        self._idle.pop(connection, None)

    def count_disconnect(self, reason: str) -> None:
        """Count a connection that was ended for a reason, with at most one log line a minute."""
        self._metrics.count_cut(reason)
        self._disconnected[reason] += 1
        if self._next_log is None:
            self._log()

    def _log(self) -> None:
        """Log the counts since the last line, if there are any, and wait a minute."""
        self._next_log = None
        if not self._disconnected:
            return
        counts = " ".join(f"{reason}={count}" for reason, count in sorted(self._disconnected.items()))
        logger.warning("disconnected clients: %s; %d open, at most %d", counts, len(self._open), self.limit)
        self._disconnected.clear()
        self._next_log = asyncio.get_running_loop().call_later(LOG_SECONDS, self._log)
