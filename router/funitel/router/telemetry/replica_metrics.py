"""Metrics of each replica beside the totals, read when they are asked for.

The label `replica` is the replica's id, which a lost replica keeps. The series of a replica that was drained or removed
vanish, so that their number does not grow with the replicas that there have been.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector


class RankNumbers:
    """Numbers of ranks across replicas: those of one replica are consecutive, and free again once it is removed."""

    def __init__(self) -> None:
        self._taken: set[int] = set()

    def take(self, count: int) -> int:
        """Return the first of the lowest `count` consecutive numbers that are free, and take them."""
        first = 0
        while any(number in self._taken for number in range(first, first + count)):
            first += 1
        self._taken.update(range(first, first + count))
        return first

    def give_back(self, first: int, count: int) -> None:
        """Free the numbers of a replica."""
        self._taken.difference_update(range(first, first + count))


@dataclass(eq=False, slots=True)
class ReplicaNumbers:
    """What a replica has and has done; the counts of what it has done outlive its losses. Blocks are those of KV."""

    replica_id: int
    is_up: bool = False
    weight: float = 1.0
    num_waiting: int = 0
    num_running: int = 0
    used_blocks: int = 0
    num_blocks: int = 0
    num_requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    num_losses: int = 0

    def retire(self) -> None:
        """Note that it is lost."""
        self.is_up = False
        self.num_waiting = self.num_running = self.used_blocks = self.num_blocks = 0

    @property
    def kv_utilisation(self) -> float:
        """Share of the blocks that sequences hold, 0 to 1; 0 where there are none."""
        return self.used_blocks / self.num_blocks if self.num_blocks else 0.0


def kv_utilisation(replicas: Iterable[ReplicaNumbers]) -> float:
    """Share of the KV blocks of all replicas that sequences hold, 0 to 1; 0 where there are none."""
    counted = [(each.used_blocks, each.num_blocks) for each in replicas]
    num_blocks = sum(total for _, total in counted)
    return sum(used for used, _ in counted) / num_blocks if num_blocks else 0.0


class ReplicaMetrics(Collector):
    """The replicas of one model. Event loop only."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.load_seconds: float | None = None  # of the model, once it was loaded
        self._replicas: list[ReplicaNumbers] = []
        registry.register(self)

    def add(self, replica_id: int) -> ReplicaNumbers:
        """Expose a replica from now on."""
        numbers = ReplicaNumbers(replica_id)
        self._replicas.append(numbers)
        self._replicas.sort(key=lambda each: each.replica_id)
        return numbers

    def remove(self, numbers: ReplicaNumbers) -> None:
        """Expose a replica no longer."""
        self._replicas.remove(numbers)

    def numbers(self) -> tuple[ReplicaNumbers, ...]:
        """Those of each replica, as they are now."""
        return tuple(replace(each) for each in self._replicas)

    def collect(self) -> Iterable[Metric]:
        """Yield the samples."""
        yield self._gauge("up", "Whether a replica serves or drains: 1, or 0 while it is lost.", "is_up")
        yield self._gauge("weight", "Weight of a replica: its share of new sequences.", "weight")
        sequences = GaugeMetricFamily(
            "funitel_replica_sequences", "Sequences of a replica.", labels=["replica", "state"]
        )
        for each in self._replicas:
            sequences.add_metric([str(each.replica_id), "waiting"], each.num_waiting)
            sequences.add_metric([str(each.replica_id), "running"], each.num_running)
        yield sequences
        yield self._gauge(
            "kv_cache_utilisation", "Share of a replica's KV blocks that sequences hold, 0 to 1.", "kv_utilisation"
        )
        yield self._counter("requests", "Sequences that a replica was given; texts of an encoder.", "num_requests")
        yield self._counter("prompt_tokens", "Prompt tokens of the sequences that began at a replica.", "prompt_tokens")
        yield self._counter("generated_tokens", "Tokens that a replica has generated.", "generated_tokens")
        yield self._counter("losses", "Losses of a replica: its shards died or hung.", "num_losses")
        utilisation = GaugeMetricFamily(
            "funitel_kv_cache_utilisation", "Share of all KV blocks that sequences hold, 0 to 1, for gateways."
        )
        utilisation.add_metric([], kv_utilisation(self._replicas))
        yield utilisation
        load = GaugeMetricFamily("funitel_model_load_seconds", "The last load of the model: launch until it served.")
        if self.load_seconds is not None:
            load.add_metric([], self.load_seconds)
        yield load

    def _gauge(self, name: str, help: str, field: str) -> Metric:
        return self._fill(GaugeMetricFamily(f"funitel_replica_{name}", help, labels=["replica"]), field)

    def _counter(self, name: str, help: str, field: str) -> Metric:
        return self._fill(CounterMetricFamily(f"funitel_replica_{name}", help, labels=["replica"]), field)

    def _fill(self, family: GaugeMetricFamily | CounterMetricFamily, field: str) -> Metric:
        for each in self._replicas:
            family.add_metric([str(each.replica_id)], float(getattr(each, field)))
        return family
