"""What one key, or all keys of one user, have used within a minute. Event loop only; instants are monotonic."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from funitel.proto.errors import RateLimited
from funitel.router.auth.rate_limit import MinuteWindow


class MinuteLimits(Protocol):
    """Limits of a minute; None is no limit."""

    @property
    def requests_per_minute(self) -> int | None:
        """Requests that begin within any minute."""

    @property
    def tokens_per_minute(self) -> int | None:
        """Tokens, prompt and completion, within any minute."""

    @property
    def max_concurrent_requests(self) -> int | None:
        """Requests in flight."""


class LimitReached(RateLimited):
    """A limit is reached; `reason` is its name in metrics."""

    def __init__(self, reason: str, message: str, wait_seconds: float | None = None) -> None:
        super().__init__(message, wait_seconds)
        self.reason = reason


class Meter:
    """Counts requests and tokens of an owner.

    Args:
        owner: as messages name it: `API key` or `user`.
        is_strict: whether a request that may take more than the tokens of a minute is refused, not let in alone.
    """

    def __init__(self, owner: str, *, is_strict: bool = False) -> None:
        self._owner = owner
        self._is_strict = is_strict
        self._num_running = 0
        self._requests = MinuteWindow()
        self._tokens = MinuteWindow()
        self._num_reserved = 0  # tokens of requests that have not ended

    def check_concurrency(self, limits: MinuteLimits) -> None:
        """Raise LimitReached where as many requests run as may."""
        limit = limits.max_concurrent_requests
        if limit is not None and self._num_running >= limit:
            raise LimitReached("concurrency", f"at most {limit} requests of this {self._owner} run at once")

    def check_requests(self, limits: MinuteLimits, now: float) -> None:
        """Raise LimitReached where the requests, or all tokens, of the minute are used."""
        limit = limits.requests_per_minute
        if limit is not None and self._requests.used(now) >= limit:
            wait = self._requests.seconds_until(limit - 1, now)
            raise LimitReached("requests", f"at most {limit} requests a minute with this {self._owner}", wait)
        self.check_tokens(limits, 1, now)

    def check_tokens(self, limits: MinuteLimits, num_tokens: int, now: float) -> None:
        """Raise LimitReached where fewer tokens are left; more than a whole minute's are let in alone, or never."""
        limit = limits.tokens_per_minute
        if limit is None:
            return
        if self._is_strict and num_tokens > limit:
            words = f"at most {limit} tokens a minute with this {self._owner}: this request may take {num_tokens}"
            raise LimitReached("tokens", f"{words}; ask for fewer new tokens")
        wanted = min(num_tokens, limit)
        used, reserved = self._tokens.used(now), self._num_reserved
        if used + reserved + wanted > limit:
            wait = self._tokens.seconds_until(limit - wanted, now)  # those that run may give back what they reserve
            words = f"at most {limit} tokens a minute with this {self._owner}: {used} are used, requests that run may "
            raise LimitReached("tokens", f"{words}take {reserved}, this one {num_tokens}", wait)

    def count_request(self, now: float) -> None:
        """Count a request."""
        self._requests.add(1, now)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count a request as one that runs, as long as the block lasts."""
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    def reserve(self, num_tokens: int) -> None:
        """Reserve tokens that were checked."""
        self._num_reserved += num_tokens

    def settle(self, num_reserved: int, num_used: int, now: float) -> None:
        """End a reservation."""
        self._num_reserved -= num_reserved
        self._tokens.add(num_used, now)

    def restore(self, num_requests: int, num_tokens: int, now: float) -> None:
        """Count what was used at an instant before anything else was."""
        self._requests.add(num_requests, now)
        self._tokens.add(num_tokens, now)
