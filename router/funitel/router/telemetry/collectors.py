"""Prometheus collectors cheap enough for every token and step: plain sums, no locks. Event loop only.

Those of prometheus_client take some microseconds for each observation; its registry collects these as well. A collector
with a label keeps a series for each of its values.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class FastCounter(Collector):
    """A sum that only grows; exposed as prometheus_client's Counter is."""

    def __init__(self, name: str, help: str, registry: CollectorRegistry, *labels: str) -> None:
        """Register."""
        self._name, self._help = name, help
        self._labels = labels
        self._sums: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}
        registry.register(self)

    def inc(self, amount: float = 1, *series: str) -> None:
        """Add; `series` are the values of the labels."""
        self._sums[series] = self._sums.get(series, 0.0) + amount

    def remove(self, *series: str) -> None:
        """Forget a series, if it is there."""
        self._sums.pop(series, None)

    @property
    def total(self) -> float:
        """The sum of all series."""
        return sum(self._sums.values())

    def collect(self) -> Iterable[Metric]:
        """Yield the samples."""
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for series, value in self._sums.items():
            family.add_metric(series, value)
        yield family


class FastHistogram(Collector):
    """Counts of observations up to each bound; exposed as prometheus_client's Histogram is."""

    def __init__(
        self, name: str, help: str, bounds: Sequence[float], registry: CollectorRegistry, label: str | None = None
    ) -> None:
        """Register; `bounds` ascend, the bucket without one is added."""
        self._name, self._help = name, help
        self._bounds = tuple(bounds)
        self._labels = [label] if label else []
        self._series: dict[str, list[float]] = {} if label else {"": self._nothing()}
        # The newest value, its series and how often it came in a row: streams of one step wait equally long.
        self._value, self._of, self._count = 0.0, "", 0
        registry.register(self)

    def _nothing(self) -> list[float]:
        """A count for each bucket, then the sum."""
        return [0] * (len(self._bounds) + 1) + [0.0]

    def observe(self, value: float, series: str = "") -> None:
        """Note one value; `series` is the value of the label, if there is one."""
        if value == self._value and series == self._of:
            self._count += 1
            return
        self._add_newest()
        self._value, self._of, self._count = value, series, 1

    def _add_newest(self) -> None:
        if not self._count:
            return
        counts = self._series.get(self._of)
        if counts is None:
            counts = self._series[self._of] = self._nothing()
        counts[bisect_left(self._bounds, self._value)] += self._count
        counts[-1] += self._value * self._count
        self._count = 0

    @property
    def total(self) -> tuple[float, float]:
        """How many values were noted, and their sum, of all series."""
        self._add_newest()
        series = self._series.values()
        return sum(sum(counts[:-1]) for counts in series), sum(counts[-1] for counts in series)

    def collect(self) -> Iterable[Metric]:
        """Yield the samples."""
        self._add_newest()
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for series, (*counts, total) in self._series.items():
            buckets, reached = [], 0.0
            for bound, count in zip((*self._bounds, float("inf")), counts, strict=True):
                reached += count
                buckets.append((floatToGoString(bound), reached))  # type: ignore[no-untyped-call]
            family.add_metric([series] if self._labels else [], buckets, total)
        yield family


class FastSummary(Collector):
    """The count and the sum of observations; exposed as prometheus_client's Summary is."""

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
        """Yield the samples."""
        yield SummaryMetricFamily(self._name, self._help, self._count, self._sum)
