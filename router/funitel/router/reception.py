"""Who is let in, and how those inside leave before their time: bounds, deadlines, cancels. Event loop only.

The same for an engine, whose sequences run, and for the lobby, where they wait for a replica to run on.
"""

from collections.abc import Callable
from functools import partial

from funitel.proto.errors import DeadlineExceeded, Overloaded
from funitel.router.admission import Admission, InFlight
from funitel.router.metrics import Metrics
from funitel.router.requests import Holder, Requests
from funitel.router.sequence import Sequence
from funitel.router.stream import TokenStream


class Reception:
    """The requests of one holder. `wake` is called when one has left early, so that it is in no later step."""

    def __init__(self, holder: Holder, metrics: Metrics, admission: Admission, wake: Callable[[], None]) -> None:
        self.requests = Requests(holder, self._expire)
        self._holder = holder
        self._metrics = metrics
        self._admission = admission
        self._wake = wake

    def accept(self, sequence: Sequence, in_flight: InFlight | None = None) -> TokenStream:
        """Find a place for a sequence whose id is new here; one of a key with more may lose its own.

        The bounds on requests hold for `in_flight`, when others than those here count too.

        Raises:
            Overloaded: there is no place for it, or it would wait longer than it may.
            DeadlineExceeded: its deadline has passed.
        """
        self._admit(sequence, in_flight or self.requests.in_flight(sequence.request.key))
        stream = TokenStream(sequence.request, cancel=partial(self._cancel, sequence))
        self.requests.add(sequence, stream)
        return stream

    def take_over(self, sequence: Sequence, stream: TokenStream) -> None:
        """Take in what was accepted elsewhere, without asking for a place."""
        stream.move(partial(self._cancel, sequence))
        self.requests.add(sequence, stream)

    def check_place(self, sequence: Sequence, in_flight: InFlight) -> Sequence | None:
        """Return who must leave the queue for a sequence, if somebody must; raises as `accept`."""
        if sequence.request.deadline is not None and sequence.request.deadline <= sequence.arrived:
            self._metrics.count_expired("arriving")
            raise DeadlineExceeded("the deadline passed before the request was queued")
        holder = self._holder
        try:
            return self._admission.check(
                sequence, in_flight, holder.waiting, holder.shares, holder.running.values(), holder.forecaster
            )
        except Overloaded as refused:
            self._metrics.count_refused(refused.reason)
            raise

    def _admit(self, sequence: Sequence, in_flight: InFlight) -> None:
        """Make sure that there is a place for a sequence."""
        leaving = self.check_place(sequence, in_flight)
        if leaving is not None:
            place = self._admission.place_of(leaving, self._holder.waiting, self._holder.running.values())
            self._metrics.count_refused("displaced")
            lost = ": its place went to an API key that has fewer"
            self.requests.fail(leaving, Overloaded(lost, place.position, place.wait_seconds, "displaced"))

    def _expire(self, sequence: Sequence) -> None:
        """End a sequence whose deadline has passed; it is in no later step."""
        is_running = sequence.id in self._holder.running
        self._metrics.count_expired("running" if is_running else "waiting")
        done = f"after {len(sequence.output_ids)} tokens" if sequence.output_ids else "before its first token"
        self.requests.fail(sequence, DeadlineExceeded(f"the deadline passed {done}"))
        self._wake()

    def _cancel(self, sequence: Sequence) -> None:
        """Take a sequence out of every later step."""
        self.requests.forget(sequence)
        self._holder.remove(sequence)
        self._metrics.count_cancelled()
        self._wake()
