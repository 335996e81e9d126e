"""The holding queue: where sequences wait while no replica serves, under the usual bounds. Event loop only."""

from collections.abc import Mapping
from types import MappingProxyType

from funitel.router.core.request import Sequence
from funitel.router.core.stream import TokenStream
from funitel.router.engine.request_table import RequestTable
from funitel.router.scheduler.admission import Admission
from funitel.router.scheduler.waiting_queue import FairShares, WaitingQueue
from funitel.router.telemetry.metrics import Metrics


class HoldingQueue:
    """Sequences that ran on lost replicas, and those that came since."""

    def __init__(self, metrics: Metrics, admission: Admission) -> None:
        """Open it, empty.

        Args:
            metrics: reports what waits.
            admission: bounds and estimates; those of the replica that served last.
        """
        self.shares = FairShares()
        self.waiting = WaitingQueue(self.shares)
        self.running: Mapping[int, Sequence] = MappingProxyType({})
        self.ttft_estimator = None  # when a replica comes back is not known
        self.requests = RequestTable(self, metrics, admission, enqueue=self._add, wake=self._report)
        self.fail_all = self.requests.fail_all
        self._metrics = metrics

    def _add(self, sequence: Sequence) -> None:
        self.shares.join(sequence.request.key)
        self.waiting.add(sequence)
        self._report()

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            self.shares.leave(sequence.request.key)

    def evacuate(self) -> list[tuple[Sequence, TokenStream]]:
        """Hand over what waits, oldest first."""
        handed_over = []
        for sequence in sorted(self.waiting, key=lambda sequence: sequence.id):
            self.remove(sequence)
            stream = self.requests.remove(sequence)
            assert stream is not None, "a waiting sequence has a stream"
            handed_over.append((sequence, stream))
        self._report()
        return handed_over

    def _report(self) -> None:
        self._metrics.set_sequences(len(self.waiting), 0)
        self._metrics.set_queue(self.waiting.num_preempted, self.waiting.num_prompt_tokens)
