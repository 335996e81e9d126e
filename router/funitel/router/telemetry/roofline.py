"""The roofline of decoding: the memory bandwidth that steps reach, as a share of the peak.

A step that decodes reads every weight once, and the keys and values of all its sequences, so the bytes are known. Of a
mixture of experts they are those of all experts, more than a small batch reads.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from funitel.proto.step import StepResult

KEPT = 0.98  # of what was read, at each further step: the last fifty steps count


@dataclass(slots=True)
class _Rank:
    """Bytes that one rank reads in a step and has read, and the seconds of those steps."""

    weight_bytes: int = 0
    token_bytes: float = 0.0  # of keys and values, for each token of a context
    total_bytes: float = 0.0
    total_seconds: float = 0.0
    recent_bytes: float = 0.0
    recent_seconds: float = 0.0


class Roofline(Collector):
    """The ranks of all replicas, numbered across them. Cheap enough for every step. Event loop only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register; ranks are exposed once they have reported."""
        self.roof: float | None = None  # peak bytes a second of a rank's memory, if known
        self._ranks: dict[int, _Rank] = {}
        registry.register(self)

    def set_reads(self, rank: int, weight_bytes: int, token_bytes: float) -> None:
        """Set what a rank reads in a step, and for each token of a context."""
        known = self._ranks.setdefault(rank, _Rank())
        known.weight_bytes, known.token_bytes = weight_bytes, token_bytes

    def remove(self, rank: int) -> None:
        """Forget a rank, if it is known."""
        self._ranks.pop(rank, None)

    def observe(self, first_rank: int, context_tokens: int, results: Sequence[StepResult]) -> None:
        """Observe a step that only decoded, for sequences of so many tokens in all."""
        for number, result in enumerate(results, first_rank):
            rank = self._ranks.get(number)
            if rank is None or not result.forward_ns:
                continue
            num_bytes, seconds = rank.weight_bytes + context_tokens * rank.token_bytes, result.forward_ns / 1e9
            rank.total_bytes += num_bytes
            rank.total_seconds += seconds
            rank.recent_bytes = KEPT * rank.recent_bytes + num_bytes
            rank.recent_seconds = KEPT * rank.recent_seconds + seconds

    def collect(self) -> Iterable[Metric]:
        """Yield the samples."""
        read = CounterMetricFamily(
            "funitel_decode_read_bytes", "Bytes that decoding steps had to read: weights and KV.", labels=["rank"]
        )
        seconds = CounterMetricFamily("funitel_decode_read_seconds", "Time of decoding steps.", labels=["rank"])
        rate = GaugeMetricFamily(
            "funitel_decode_bandwidth_bytes_per_second",
            "Memory bandwidth of the last fifty decoding steps.",
            labels=["rank"],
        )
        share = GaugeMetricFamily(
            "funitel_decode_bandwidth_share", "Share of the peak bandwidth in decoding steps.", labels=["rank"]
        )
        roof = GaugeMetricFamily(
            "funitel_memory_bandwidth_bytes_per_second",
            "Peak memory bandwidth of a rank, if --memory-bandwidth gives it.",
        )
        for number, rank in self._ranks.items():
            label = [str(number)]
            read.add_metric(label, rank.total_bytes)
            seconds.add_metric(label, rank.total_seconds)
            if rank.recent_seconds:
                recent = rank.recent_bytes / rank.recent_seconds
                rate.add_metric(label, recent)
                if self.roof:
                    share.add_metric(label, recent / self.roof)
        if self.roof:
            roof.add_metric([], self.roof)
        yield from (read, seconds, rate, share, roof)
