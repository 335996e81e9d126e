"""The door to what does the work: who would find no room behind it is turned away, before its body is read.

And again before anything is made of the body, for reading may take long. Whoever was let in counts as if it were inside
already, from then until it is: parsing and tokenizing are never done for more than there is room for. Knows no HTTP.
Event loop only.
"""

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from funitel.proto.errors import Overloaded
from funitel.proto.step import SamplingParams, StoppingParams
from funitel.router.core.request import Request
from funitel.router.scheduler.admission import InFlight
from funitel.router.telemetry.metrics import Metrics


class Admits(Protocol):
    """What is behind a door."""

    def check_room(self, newcomer: Request, entering: InFlight) -> None:
        """Raise Overloaded if a request would find no room, behind those that are about to enter."""
        ...


def newcomer(key: bytes = b"", priority: int = 0, deadline: float | None = None) -> Request:
    """A request as much as is known of it before its body is read: it has one token at least."""
    return Request(input_ids=(0,), sampling=_ANY, stopping=_ONE, key=key, priority=priority, deadline=deadline)


_ANY, _ONE = SamplingParams(), StoppingParams(max_new_tokens=1)


class AdmissionGate:
    """The door to one room, which is asked for whenever somebody comes: it may not be there yet."""

    def __init__(self, room: Callable[[], Admits]) -> None:
        self._room = room
        self._entering: Counter[bytes] = Counter()  # by key

    def check(self, request: Request) -> None:
        """Turn a request away if there is no room for it.

        Raises:
            Overloaded: there is none.
            FunitelError: what is behind the door is not there, or not for this request.
        """
        entering = InFlight(self._entering.total(), self._entering[request.key])
        self._room().check_room(request, entering)

    def enter(self, request: Request) -> "Reservation":
        """Let a request in, if there is room for it; raises as `check`."""
        self.check(request)
        self._entering[request.key] += 1
        return Reservation(self._entering, request.key)


class Reservation:
    """A request on its way from the door to where it is counted."""

    def __init__(self, entering: Counter[bytes], key: bytes) -> None:
        self._entering = entering
        self._key = key
        self._has_left = False

    def leave(self) -> None:
        """Count it no more: it has arrived, or goes no further. May be called again."""
        if not self._has_left:
            self._has_left = True
            self._entering[self._key] -= 1
            if not self._entering[self._key]:
                del self._entering[self._key]


class TokenizeLimit:
    """Where texts are tokenized for those who want nothing but their tokens: `most` requests at once."""

    def __init__(self, most: int, metrics: Metrics) -> None:
        self._most = most
        self._metrics = metrics

    def check_room(self, newcomer: Request, entering: InFlight) -> None:
        """Raise Overloaded if there are as many as may be."""
        count = entering.num_requests
        if count >= self._most:
            self._metrics.count_refused("tokenizing")
            raise Overloaded(f": {count} requests are being tokenized, at most {self._most}", reason="tokenizing")
