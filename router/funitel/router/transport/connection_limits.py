"""Connection limits: all connections, the idle ones, those that were disconnected, and the limit on open files.

Knows no HTTP: timeouts belong to each connection. Event loop only.
"""

import asyncio
import logging
import resource
from collections import Counter, OrderedDict
from collections.abc import Container

from funitel.proto.errors import SettingsError
from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics
from funitel.router.transport.memory_budget import Client, MemoryBudget

logger = logging.getLogger(__name__)

LOG_SECONDS = 60.0  # between two log lines about disconnected clients
USUAL_CONNECTIONS = 16_384
OTHER_FILES = 256  # listeners, shards, workers, logs and temporary files
OTHER_SHARE = 0.75  # of few files that may be open: at most that much is kept for them
LEAST_FILES = 48  # 26 are open in a router of one shard, and more while requests are answered
MAX_FILES = 1 << 20  # where the system has no limit


class Connections:
    """The open connections, at most `limit`.

    A connection without a request in flight is idle. At the limit the one that is idle for longest is disconnected for
    an incoming one. `unread` and `bodies` are the memory budgets of all of them. `journalled_paths` are those of POST
    requests without any effect before their handler has put them into the journal.
    """

    def __init__(
        self, limit: int, settings: RouterSettings, metrics: Metrics, journalled_paths: Container[str] = ()
    ) -> None:
        self.limit = limit
        self.journalled_paths = journalled_paths
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


def allow_open_files() -> int:
    """Raise the limit on open files to the highest this process may have; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # the kernel has a lower limit
            return soft
    return wanted


def max_connections(wanted: int | None, num_files: int) -> int:
    """Return the limit on connections, where so many files may be open.

    Raises:
        SettingsError: `wanted` exceeds the limit, or the files are too few for a router.
    """
    if num_files < LEAST_FILES:
        raise SettingsError(f"{num_files} files may be open (ulimit -Hn), a router needs at least {LEAST_FILES}")
    other_files = min(OTHER_FILES, int(num_files * OTHER_SHARE))
    possible = num_files - other_files
    if wanted is None:
        if possible < USUAL_CONNECTIONS:
            logger.warning("%d files may be open (ulimit -Hn): at most %d connections", num_files, possible)
        return min(USUAL_CONNECTIONS, possible)
    if wanted > possible:
        raise SettingsError(
            f"--max-connections {wanted} needs {wanted + other_files} open files, at most {num_files} are allowed "
            "(ulimit -Hn)"
        )
    return wanted
