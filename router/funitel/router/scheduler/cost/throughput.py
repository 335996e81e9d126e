"""Throughput: tokens computed per second, and how late first tokens are against their estimates. Pure."""

from math import inf

from funitel.router.core.request import Sequence

DEFAULT_TOKENS_PER_SECOND = 100.0  # before anything was measured
MEMORY_SECONDS = 10.0  # of computing, after which a measurement weighs 1 / e
MEMORY_REQUESTS = 20.0  # as to the share of their maximum length that completions reach
# Of 100 first tokens 99 are to be in time, so estimates are multiplied by the ratio that 99 stay under.
IN_TIME = 0.99
FIRST_LATENESS = 2.0
MAX_LATENESS = 3.0
LATENESS_STEP = 0.05


class Throughput:
    """Measured tokens per second, and the share of their maximum length that completions reach."""

    def __init__(self) -> None:
        self._tokens = DEFAULT_TOKENS_PER_SECOND  # decaying sums, which begin as one second of the default
        self._seconds = 1.0
        self._last = -inf
        self._used_share = 1.0
        self.num_observed = 0  # steps and ends
        self._lateness = FIRST_LATENESS

    @property
    def tokens_per_second(self) -> float:
        """Prompt and completion tokens computed per second of computing; recent seconds weigh more."""
        return self._tokens / self._seconds

    def observe_step(self, num_tokens: int, seconds: float, now: float) -> None:
        """Take into account a step that ends `now`, was sent `seconds` ago, and may have waited for the one before."""
        self.num_observed += 1
        busy = max(1e-6, min(seconds, now - self._last))
        self._last = now
        kept = max(0.0, 1.0 - busy / MEMORY_SECONDS)
        self._tokens = kept * self._tokens + num_tokens
        self._seconds = kept * self._seconds + busy

    def observe_end(self, sequence: Sequence) -> None:
        """Take into account how long a finished completion has become."""
        self.num_observed += 1
        used = len(sequence.output_ids) / sequence.request.stopping.max_new_tokens
        self._used_share += (used - self._used_share) / MEMORY_REQUESTS

    def observe_first_token(self, sequence: Sequence, now: float) -> None:
        """Take into account how late the first token of a sequence is, which it has now, against its estimate."""
        is_late = now - sequence.arrived > self._lateness * sequence.estimated_seconds
        step = LATENESS_STEP * (IN_TIME if is_late else IN_TIME - 1)
        self._lateness = min(MAX_LATENESS, max(1.0, self._lateness + step))
        sequence.estimated_seconds = 0.0

    def cautious(self, seconds: float) -> float:
        """Return the time that 99 of 100 first tokens of such an estimate stay under."""
        return seconds * self._lateness

    def work_of(self, sequence: Sequence) -> float:
        """Estimate the tokens that are still to be computed for a sequence."""
        expected = self._used_share * sequence.request.stopping.max_new_tokens
        return max(1, sequence.num_pending) + max(0.0, expected - len(sequence.output_ids))
