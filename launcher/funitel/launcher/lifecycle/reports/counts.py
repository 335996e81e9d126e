"""What the control plane counts, in Prometheus's text format."""

from collections import Counter
from collections.abc import Iterable

from funitel.launcher.control_plane.records import ModelEntry

LOAD_BUCKETS = (1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0)  # seconds


class LoadDurations:
    """A histogram of the seconds that loads took, by model."""

    def __init__(self) -> None:
        self._buckets: dict[str, Counter[float]] = {}
        self._sums: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def add(self, model: str, seconds: float) -> None:
        """Count a load."""
        buckets = self._buckets.setdefault(model, Counter())
        buckets.update(bound for bound in LOAD_BUCKETS if seconds <= bound)
        self._sums[model] += seconds  # type: ignore[assignment]
        self._counts[model] += 1

    def lines(self) -> Iterable[str]:
        """The lines of the histogram."""
        name = "funitel_load_duration_seconds"
        yield f"# HELP {name} Seconds from the begin of a load to the first request that it could take."
        yield f"# TYPE {name} histogram"
        for model, buckets in self._buckets.items():
            label = f'model="{quoted(model)}"'
            for bound in LOAD_BUCKETS:
                yield f'{name}_bucket{{{label},le="{bound}"}} {buckets[bound]}'
            yield f'{name}_bucket{{{label},le="+Inf"}} {self._counts[model]}'
            yield f"{name}_sum{{{label}}} {self._sums[model]}"
            yield f"{name}_count{{{label}}} {self._counts[model]}"


class ModelCounts:
    """Counters and gauges of the models of a server."""

    def __init__(self) -> None:
        self.loads = LoadDurations()
        self.failures: Counter[str] = Counter()
        self.evictions: Counter[str] = Counter()
        self.restarts: Counter[str] = Counter()

    def text(self, models: Iterable[ModelEntry], budget: int, free: int) -> bytes:
        """Everything, and the memory of each model."""
        models = tuple(models)
        lines = [*self.loads.lines()]
        lines += _counter("funitel_load_failures_total", "Loads that failed.", self.failures)
        lines += _counter("funitel_model_evictions_total", "Models unloaded for another one.", self.evictions)
        lines += _counter("funitel_replica_restarts_total", "Restarts of lost replicas.", self.restarts)
        lines += ["# HELP funitel_model_memory_bytes Memory of each model, estimated or measured."]
        lines += ["# TYPE funitel_model_memory_bytes gauge"]
        lines += [f'funitel_model_memory_bytes{{model="{quoted(each.name)}"}} {each.bytes or 0}' for each in models]
        for name, help, value in (
            ("funitel_memory_budget_bytes", "Memory that models may take together.", budget),
            ("funitel_memory_free_bytes", "Of the budget, what no model takes.", free),
        ):
            lines += [f"# HELP {name} {help}", f"# TYPE {name} gauge", f"{name} {value}"]
        return ("\n".join(lines) + "\n").encode()


def _counter(name: str, help: str, values: Counter[str]) -> list[str]:
    lines = [f"# HELP {name} {help}", f"# TYPE {name} counter"]
    return lines + [f'{name}{{model="{quoted(model)}"}} {value}' for model, value in values.items()]


def quoted(text: str) -> str:
    """A value of a label."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
