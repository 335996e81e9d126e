"""Restart policy of a replica, or of a router: maximum of restarts in a row, with exponential back-off. Pure."""

STEADY_SECONDS = 180.0  # of service, after which the count starts again
STEADY_ROUTER_SECONDS = 2.0  # the same of a router or a keeper: every second without it is silence for all clients
FIRST_DELAY_SECONDS, MAX_DELAY_SECONDS = 1.0, 60.0


class RestartPolicy:
    """Counts the restarts of one process or replica; the first has no delay, each further one waits longer."""

    def __init__(self, max_in_a_row: int, steady_seconds: float = STEADY_SECONDS) -> None:
        """Allow this many restarts in a row; after so many seconds of service the count starts again."""
        self.max_in_a_row = max_in_a_row
        self._steady_seconds = steady_seconds
        self.num_in_a_row = 0

    def delay_after(self, served_seconds: float) -> float | None:
        """Seconds to wait before the next restart; None when the maximum is reached.

        Args:
            served_seconds: how long the replica was ready before it ended.
        """
        if served_seconds >= self._steady_seconds:
            self.num_in_a_row = 0
        if self.num_in_a_row >= self.max_in_a_row:
            return None
        self.num_in_a_row += 1
        if self.num_in_a_row == 1:
            return 0.0
        # The exponent is bounded, so that a very large maximum of restarts cannot overflow.
        return min(FIRST_DELAY_SECONDS * 2.0 ** min(self.num_in_a_row - 2, 30), MAX_DELAY_SECONDS)
