"""Metrics of adapters, read when they are asked for; one of them is the gauge that Kubernetes gateways route by.

Source of `vllm:lora_requests_info`: the model server protocol of the Gateway API Inference Extension. Its value is the
time in seconds, its labels are the maximum of adapters in memory, and the names of those that run and wait.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterUse:
    """The adapters of one replica: bytes of the loaded ones by name, and the names of those that run and wait."""

    max_loaded: int
    loaded: Mapping[str, int]
    running: tuple[str, ...]
    waiting: tuple[str, ...]


class AdapterMetrics(Collector):
    """The adapters of all replicas that serve a model which takes some."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._replicas: list[Callable[[], AdapterUse]] = []
        self._loads = {"loaded": 0, "failed": 0}
        self._num_evictions = 0
        registry.register(self)

    def watch(self, use: Callable[[], AdapterUse]) -> None:
        """Report a replica from now on."""
        self._replicas.append(use)

    def unwatch(self, use: Callable[[], AdapterUse]) -> None:
        """Report a replica no longer."""
        if use in self._replicas:
            self._replicas.remove(use)

    def count_load(self, outcome: str) -> None:
        """Count an adapter that was `loaded`, or `failed` to be."""
        self._loads[outcome] += 1

    def count_eviction(self) -> None:
        """Count an adapter that was evicted for another one."""
        self._num_evictions += 1

    def collect(self) -> Iterable[Metric]:
        """Yield the samples; the gauge of gateways has none where a model takes no adapters."""
        uses = [use() for use in self._replicas]
        yield self._requests_info(uses)
        loaded = GaugeMetricFamily("funitel_adapters", "Adapters in memory, of all replicas.")
        loaded.add_metric([], sum(len(use.loaded) for use in uses))
        yield loaded
        size = GaugeMetricFamily("funitel_adapter_bytes", "Memory that adapters take, of all ranks.")
        size.add_metric([], sum(sum(use.loaded.values()) for use in uses))
        yield size
        loads = CounterMetricFamily("funitel_adapter_loads", "Adapters loaded, or not.", labels=["outcome"])
        for outcome, count in self._loads.items():
            loads.add_metric([outcome], count)
        yield loads
        evictions = CounterMetricFamily("funitel_adapter_evictions", "Adapters evicted for others.")
        evictions.add_metric([], self._num_evictions)
        yield evictions

    def _requests_info(self, uses: list[AdapterUse]) -> Metric:
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters that run and wait, for gateways; the value is the time.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        running = dict.fromkeys(name for use in uses for name in use.running)
        waiting = dict.fromkeys(name for use in uses for name in use.waiting)
        if uses:
            info.add_metric([str(uses[0].max_loaded), ",".join(running), ",".join(waiting)], time.time())
        return info
