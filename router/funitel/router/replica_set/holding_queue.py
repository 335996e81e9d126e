"""Where sequences wait while no replica serves: bounded as ever, left by deadlines and cancels. Event loop only."""

from collections.abc import Mapping
from types import MappingProxyType

from funitel.proto.errors import FunitelError
from funitel.router.core.request import Sequence
from funitel.router.core.stream import TokenStream
from funitel.router.engine.request_table import Reception
from funitel.router.scheduler.admission import Admission, InFlight
from funitel.router.scheduler.waiting_queue import FairShares, WaitingQueue
from funitel.router.telemetry.metrics import Metrics


class HoldingQueue:
    """Sequences that ran on replicas that are lost, and those that came since."""

    def __init__(self, metrics: Metrics, admission: Admission) -> None:
        """Open it, empty.

        Args:
            metrics: told who waits.
            admission: bounds and estimates; those of the replica that served last.
        """
        self.shares = FairShares()
        self.waiting = WaitingQueue(self.shares)
        self.running: Mapping[int, Sequence] = MappingProxyType({})
        self.forecaster = None  # when a replica comes back is not known
        self._metrics = metrics
        self._reception = Reception(self, metrics, admission, wake=self._report)
        self._requests = self._reception.requests

    @property
    def num_requests(self) -> int:
        """Requests that wait."""
        return len(self._requests)

    def accept(self, sequence: Sequence) -> TokenStream:
        """Let a new sequence wait, if there is a place for it. Raises: as `Reception.accept`."""
        stream = self._reception.accept(sequence)
        self._add(sequence)
        return stream

    def check_place(self, sequence: Sequence, entering: InFlight) -> None:
        """Find out whether a sequence could wait, behind so many others; raises as `accept`."""
        self._reception.check_place(sequence, self._requests.in_flight(sequence.request.key) + entering)

    def take_over(self, sequence: Sequence, stream: TokenStream) -> None:
        """Let a sequence wait that has lost its replica."""
        self._reception.take_over(sequence, stream)
        self._add(sequence)

    def _add(self, sequence: Sequence) -> None:
        self.shares.join(sequence.request.key)
        self.waiting.add(sequence)
        self._report()

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            self.shares.leave(sequence.request.key)

    def give_up(self) -> list[tuple[Sequence, TokenStream]]:
        """Hand over whoever waits, in the order they came."""
        handed_over = []
        for sequence in sorted(self.waiting, key=lambda sequence: sequence.id):
            self.remove(sequence)
            stream = self._requests.forget(sequence)
            assert stream is not None, "whoever waits has a stream"
            handed_over.append((sequence, stream))
        self._report()
        return handed_over

    def fail_all(self, error: FunitelError) -> None:
        """End whoever waits."""
        self._requests.fail_all(error)
        self._report()

    async def drained(self) -> None:
        """Return once nobody waits."""
        await self._requests.drained()

    def _report(self) -> None:
        self._metrics.set_sequences(len(self.waiting), 0)
        self._metrics.set_queue(self.waiting.num_preempted, self.waiting.num_prompt_tokens)
