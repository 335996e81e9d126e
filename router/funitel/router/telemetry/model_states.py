"""The states of all models that a router knows, those that are not loaded too."""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

STATES = (
    "registered",
    "queued",
    "downloading",
    "converting",
    "loading",
    "warming_up",
    "ready",
    "draining",
    "sleeping",
    "failed",
    "cancelled",
)


class ModelStates(Collector):
    """The state of each model by its name; none where the router was started for one model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._states: Mapping[str, str] = {}
        registry.register(self)

    def set(self, states: Mapping[str, str]) -> None:
        """Set the states of all models; those that are not named vanish."""
        self._states = dict(states)

    def collect(self) -> Iterable[Metric]:
        """Yield a sample for each model and state: 1 for the one that it is in."""
        family = GaugeMetricFamily(
            "funitel_model_state", "Whether a model is in a state: 1 or 0.", labels=["model", "state"]
        )
        for name, state in self._states.items():
            for each in STATES if state in STATES else (*STATES, state):
                family.add_metric([name, each], float(each == state))
        yield family
