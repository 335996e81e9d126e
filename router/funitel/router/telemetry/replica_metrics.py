"""The router's metrics as one of several replicas writes them. The series are those of a router with one replica."""

from prometheus_client import Gauge

from funitel.proto.step import ShardMemory
from funitel.router.core.request import Limits
from funitel.router.telemetry.metrics import Metrics


class ReplicaMetrics(Metrics):
    """Counts into the metrics of the router; of a gauge it keeps one part, so that the gauge is the sum of all parts.

    Ranks are numbered through: those of a second replica of two shards are 2 and 3.
    """

    def __init__(self, router: Metrics, first_rank: int) -> None:
        vars(self).update(vars(router))  # the same counters, histograms and gauges
        self._first_rank = first_rank
        self._parts: dict[Gauge, float] = {}

    def retire(self) -> None:
        """Take this replica's parts out of every gauge: it is lost."""
        for gauge in tuple(self._parts):
            self._set_part(gauge, 0)

    def _set_part(self, gauge: Gauge, value: float) -> None:
        gauge.inc(value - self._parts.get(gauge, 0))
        self._parts[gauge] = value

    def set_limits(self, limits: Limits) -> None:
        """Leave the scale of the histograms to the router: the limits of all replicas count together."""

    def set_sequences(self, waiting: int, running: int) -> None:
        self._set_part(self._queue_size, waiting)
        self._set_part(self._current_size, running)
        self._set_part(self._sequences.labels("waiting"), waiting)
        self._set_part(self._sequences.labels("running"), running)

    def set_queue(self, num_preempted: int, num_tokens: int) -> None:
        self._set_part(self._waiting_preempted, num_preempted)
        self._set_part(self._queued_tokens, num_tokens)

    def set_batch_tokens(self, num_tokens: int) -> None:
        self._set_part(self._current_max_tokens, num_tokens)

    def set_pool(self, used: int, free: int, cached: int) -> None:
        self._set_part(self._blocks.labels("cached"), cached)
        self._set_part(self._blocks.labels("used"), used)
        self._set_part(self._blocks.labels("free"), free)

    def set_pool_tokens(self, num_tokens: int) -> None:
        self._set_part(self._max_total_tokens, num_tokens)

    def set_cached_batches(self, count: int) -> None:
        self._set_part(self._cached_batches, count)

    def set_weights(self, rank: int, num_bytes: int, sharded_bytes: int) -> None:
        self._set_part(self._weight_bytes.labels(self._first_rank + rank), num_bytes)
        self._set_part(self._sharded_weight_bytes.labels(self._first_rank + rank), sharded_bytes)

    def set_memory(self, rank: int, memory: ShardMemory) -> None:
        if memory.resident_bytes:
            self._set_part(self._memory.labels(self._first_rank + rank, "resident"), memory.resident_bytes)
            self._set_part(self._memory.labels(self._first_rank + rank, "peak"), memory.peak_bytes)

    def set_kv(self, rank: int, num_bytes: int) -> None:
        self._set_part(self._kv_bytes.labels(self._first_rank + rank), num_bytes)
