"""The last hour of every model: a sample of its numbers every few seconds. Event loop only."""

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from funitel.router.serving.service import Service
from funitel.router.telemetry.live import LiveNumbers

SECONDS = 5.0  # between two samples
HOUR = 3600.0
MAX_SAMPLES = int(HOUR / SECONDS)


class LoadableModel(Protocol):
    """A model that may be loaded."""

    @property
    def name(self) -> str:
        """What clients call it."""

    @property
    def service(self) -> Service | None:
        """What serves it; None while it is not loaded."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The numbers of a model at a Unix time."""

    time: float
    numbers: LiveNumbers


class ModelHistory:
    """Samples of the models that are loaded; those of a model that is gone are forgotten."""

    def __init__(self, models: Iterable[LoadableModel]) -> None:
        self._models = models
        self._samples: dict[str, deque[Sample]] = {}

    async def run(self) -> None:
        """Take samples until it is cancelled."""
        while True:
            self.sample(time.time())
            await asyncio.sleep(SECONDS)

    def sample(self, now: float) -> None:
        """Take one of every model."""
        names = {model.name for model in self._models}
        for name in self._samples.keys() - names:
            del self._samples[name]
        for model in self._models:
            if model.service is not None:
                kept = self._samples.setdefault(model.name, deque(maxlen=MAX_SAMPLES))
                kept.append(Sample(now, model.service.metrics.live()))

    def since(self, name: str, begin: float) -> list[Sample]:
        """The samples of a model after an instant, oldest first."""
        return [sample for sample in self._samples.get(name, ()) if sample.time > begin]
