"""The admission gate: asked before a body is read, and for a reservation before it is parsed. Knows no HTTP.

Event loop only. No more is parsed and tokenized than there is room for: a reservation counts as a request in flight
until it is released, because its request is submitted or goes no further.
"""

from funitel.proto.errors import Overloaded
from funitel.router.core.request import Request
from funitel.router.sandbox.fair_semaphore import FairSemaphore
from funitel.router.scheduler.admission import Reservation, Reservations
from funitel.router.telemetry.metrics import Metrics


def one_at_a_time() -> FairSemaphore:
    """Let one body of many values be checked at a time; the keys of those that wait take turns."""
    return FairSemaphore(1, 1)


class TokenizeLimit:
    """Bounds the requests that only tokenize to `max_requests` at once."""

    def __init__(self, max_requests: int, metrics: Metrics) -> None:
        self._max_requests = max_requests
        self._metrics = metrics
        self._reservations = Reservations()

    def check_room(self, incoming: Request) -> None:
        """Raise Overloaded if there are as many as may be."""
        count = self._reservations.in_flight(incoming.key).num_requests
        if count >= self._max_requests:
            self._metrics.count_refused("tokenizing")
            raise Overloaded(
                f": {count} requests are being tokenized, at most {self._max_requests}", reason="tokenizing"
            )

    def reserve(self, incoming: Request) -> Reservation:
        """Hold a place while a request is tokenized; raises as `check_room`."""
        self.check_room(incoming)
        return self._reservations.hold(incoming.key)
