"""The arrival of a request: its instant, API key, priority, deadline and reservation."""

import asyncio
import math
import re
import time
from dataclasses import dataclass, field

from starlette.requests import Request as HttpRequest

from funitel.proto.errors import InvalidRequest
from funitel.proto.step import SamplingParams, StoppingParams
from funitel.router.auth.accounts import Account
from funitel.router.core.request import MAX_PRIORITY, Request
from funitel.router.middleware.auth import account_of, is_background_request, owner_of_request
from funitel.router.scheduler.admission import Reservation

ARRIVAL = "funitel.arrival"  # in a request's scope, once it has a reservation
ARRIVED = "funitel.arrived"  # in a scope: the instant at which a request came that had to wait for its model
TIMEOUT, PRIORITY = "x-request-timeout", "x-request-priority"
MAX_TIMEOUT_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known of a request before its body is read; instants are of the monotonic clock."""

    at: float
    key: bytes = b""
    account: Account | None = None  # that pays, where a key was asked for
    priority: int = 0
    deadline: float | None = None
    reservation: Reservation | None = None  # where admission was asked
    submitted: asyncio.Event = field(default_factory=asyncio.Event)  # once the engine has all sequences

    def consume_reservation(self) -> None:
        """Release the reservation, right before the request is submitted."""
        if self.reservation is not None:
            self.reservation.release()

    @property
    def cache_owner(self) -> bytes:
        """The owner of the prefixes that it finds in the cache and leaves there; empty where no key was asked for."""
        return b"" if self.account is None else self.account.key.cache_owner

    @property
    def incoming(self) -> Request:
        """The request as far as admission can be asked about it."""
        return incoming_request(self.key, self.priority, self.deadline)

    @classmethod
    def of(cls, http: HttpRequest) -> "Arrival":
        """Note the arrival of a request; to be called first.

        Raises:
            InvalidRequest: a header is not what it must be.
        """
        now = http.scope.get(ARRIVED) or time.monotonic()
        timeout = _timeout(http.headers.get(TIMEOUT))
        return cls(
            now,
            owner_of_request(http.scope),
            account_of(http.scope),
            MAX_PRIORITY if is_background_request(http.scope) else _priority(http.headers.get(PRIORITY)),
            timeout and now + timeout,
        )


def incoming_request(key: bytes = b"", priority: int = 0, deadline: float | None = None) -> Request:
    """Make a request of what is known before its body is read; it has one token at least."""
    return Request(input_ids=(0,), sampling=_ANY, stopping=_ONE, key=key, priority=priority, deadline=deadline)


_ANY, _ONE = SamplingParams(), StoppingParams(max_new_tokens=1)


def _timeout(value: str | None) -> float | None:
    if value is None:
        return None
    try:
        seconds = float(value) if re.fullmatch(r"[0-9.eE+-]+", value) else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_SECONDS:
        raise InvalidRequest(
            f"header {TIMEOUT}: must be seconds > 0 and <= {MAX_TIMEOUT_SECONDS:g}. Given: {value!r}", TIMEOUT
        )
    return seconds


def _priority(value: str | None) -> int:
    if value is None:
        return 0
    if not re.fullmatch(r"[+-]?[0-9]{1,4}", value) or abs(int(value)) > MAX_PRIORITY:
        raise InvalidRequest(
            f"header {PRIORITY}: must be an integer >= -{MAX_PRIORITY} and <= {MAX_PRIORITY}. Given: {value!r}",
            PRIORITY,
        )
    return int(value)
