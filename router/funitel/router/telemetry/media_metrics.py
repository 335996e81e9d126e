"""Metrics of media items: what the shards have encoded, and how often a sequence found its items encoded."""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector


class MediaMetrics(Collector):
    """The media items of all replicas of a model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._replicas: list[Callable[[], int]] = []
        self._num_encoded = self._num_failed = self._num_held = self._num_evicted = 0
        self._seconds = 0.0
        registry.register(self)

    def watch(self, num_bytes: Callable[[], int]) -> None:
        """Report a replica from now on."""
        self._replicas.append(num_bytes)

    def unwatch(self, num_bytes: Callable[[], int]) -> None:
        """Report a replica no longer."""
        if num_bytes in self._replicas:
            self._replicas.remove(num_bytes)

    def count_encoded(self, seconds: float) -> None:
        """Count an item that was encoded in so many seconds."""
        self._num_encoded += 1
        self._seconds += seconds

    def count_failure(self) -> None:
        """Count an item that could not be encoded."""
        self._num_failed += 1

    def count_held(self, count: int) -> None:
        """Count the items that a sequence begins with, encoded for it or before."""
        self._num_held += count

    def count_evictions(self, count: int) -> None:
        """Count items that were dropped for others."""
        self._num_evicted += count

    def collect(self) -> Iterable[Metric]:
        """Yield the samples."""
        encoded = CounterMetricFamily("funitel_media_encoded", "Images and sounds encoded, or not.", labels=["outcome"])
        encoded.add_metric(["encoded"], self._num_encoded)
        encoded.add_metric(["failed"], self._num_failed)
        yield encoded
        uses = CounterMetricFamily(
            "funitel_media_uses", "Images and sounds of sequences that began; beyond those encoded, cache hits."
        )
        uses.add_metric([], self._num_held)
        yield uses
        evictions = CounterMetricFamily("funitel_media_evictions", "Images and sounds evicted for others.")
        evictions.add_metric([], self._num_evicted)
        yield evictions
        seconds = CounterMetricFamily(
            "funitel_media_encode_seconds", "Seconds in which images and sounds were encoded."
        )
        seconds.add_metric([], self._seconds)
        yield seconds
        size = GaugeMetricFamily("funitel_media_bytes", "Bytes of features of one rank of each replica, added up.")
        size.add_metric([], sum(num_bytes() for num_bytes in self._replicas))
        yield size
