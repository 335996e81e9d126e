"""When a request came, whose it is, how urgent, and until when its answer is wanted."""

import math
import re
import time
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest

from funitel.proto.errors import InvalidRequest
from funitel.router.api.common.schema_base import MOST_PRIORITY
from funitel.router.auth.accounts import Account
from funitel.router.core.request import Request
from funitel.router.middleware.auth import account_of, owner_of_request
from funitel.router.serving.admission_gate import Reservation, newcomer

ARRIVAL = "funitel.arrival"  # in a request's scope, once it was let in
TIMEOUT, PRIORITY = "x-request-timeout", "x-request-priority"
MOST_TIMEOUT_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known of a request before its body is read; instants are of the monotonic clock."""

    at: float
    key: bytes = b""
    account: Account | None = None  # that pays, where a key was asked for
    priority: int = 0
    deadline: float | None = None
    entry: Reservation | None = None  # where it was let in by a door

    def arrive(self) -> None:
        """Be counted where the work is done from now on, and by the door no more."""
        if self.entry is not None:
            self.entry.leave()

    @property
    def newcomer(self) -> Request:
        """As a door is asked about it."""
        return newcomer(self.key, self.priority, self.deadline)

    @classmethod
    def of(cls, http: HttpRequest) -> "Arrival":
        """Note the arrival of a request; to be called first. Called again it gives what was noted.

        Raises:
            InvalidRequest: a header is not what it must be.
        """
        noted: Arrival | None = http.scope.get(ARRIVAL)
        if noted is not None:
            return noted
        now = time.monotonic()
        timeout = _timeout(http.headers.get(TIMEOUT))
        return cls(
            now,
            owner_of_request(http.scope),
            account_of(http.scope),
            _priority(http.headers.get(PRIORITY)),
            timeout and now + timeout,
        )


def _timeout(value: str | None) -> float | None:
    if value is None:
        return None
    try:
        seconds = float(value) if re.fullmatch(r"[0-9.eE+-]+", value) else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MOST_TIMEOUT_SECONDS:
        raise InvalidRequest(
            f"header {TIMEOUT}: must be seconds > 0 and <= {MOST_TIMEOUT_SECONDS:g}. Given: {value!r}", TIMEOUT
        )
    return seconds


def _priority(value: str | None) -> int:
    if value is None:
        return 0
    if not re.fullmatch(r"[+-]?[0-9]{1,4}", value) or abs(int(value)) > MOST_PRIORITY:
        raise InvalidRequest(
            f"header {PRIORITY}: must be an integer >= -{MOST_PRIORITY} and <= {MOST_PRIORITY}. Given: {value!r}",
            PRIORITY,
        )
    return int(value)
