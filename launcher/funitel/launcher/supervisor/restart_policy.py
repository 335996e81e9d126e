"""How often and how soon a replica is started again that has ended. Pure: what has happened is passed in."""

STEADY_SECONDS = 180.0  # of service, after which an end has nothing to do with the ones before
FIRST_DELAY_SECONDS, MOST_DELAY_SECONDS = 1.0, 60.0


class Restarts:
    """The restarts of one replica: at once the first time, then later and later; none when there were too many."""

    def __init__(self, most: int) -> None:
        """Allow `most` in a row."""
        self.most = most
        self.num_in_a_row = 0

    def delay_after(self, served_seconds: float) -> float | None:
        """How long to wait before the next one; None when there is none.

        Args:
            served_seconds: how long the replica had answered when it ended.
        """
        if served_seconds >= STEADY_SECONDS:
            self.num_in_a_row = 0
        if self.num_in_a_row >= self.most:
            return None
        self.num_in_a_row += 1
        if self.num_in_a_row == 1:
            return 0.0
        # The exponent is bounded: whoever allows restarts without end gets them.
        return min(FIRST_DELAY_SECONDS * 2.0 ** min(self.num_in_a_row - 2, 30), MOST_DELAY_SECONDS)
