"""A histogram and a summary cheap enough to be told of every token: plain sums, no locks. Event loop only.

prometheus_client's own take some microseconds for each observation; its registry collects these as well.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class HistogramTally(Collector):
    """How many observations fell up to each bound; exposed as prometheus_client's Histogram without labels is."""

    def __init__(self, name: str, help: str, bounds: Sequence[float], registry: CollectorRegistry) -> None:
        """Register; `bounds` ascend, the bucket without one is added."""
        self._name, self._help = name, help
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Note one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        """What the registry shows."""
        buckets, total = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), float(total)))  # type: ignore[no-untyped-call]
        yield HistogramMetricFamily(self._name, self._help, buckets, self._sum)


class SummaryTally(Collector):
    """How many observations there were, and their sum; exposed as prometheus_client's Summary is."""

    def __init__(self, name: str, help: str, registry: CollectorRegistry) -> None:
        """Register."""
        self._name, self._help = name, help
        self._count = 0
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Note one value."""
        self._count += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        """What the registry shows."""
        yield SummaryMetricFamily(self._name, self._help, self._count, self._sum)
