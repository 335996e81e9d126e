"""Tell the control plane each second what the models do: it unloads those that are idle, for others."""

import asyncio
import time
from typing import Any

from funitel.proto.errors import NotReady
from funitel.router.fleet.control import ControlSocket
from funitel.router.fleet.models import ServedModel, ServedModels

ACTIVITY = "/v1/fleet/activity"
REPORT_SECONDS = 1.0

Counts = tuple[int, int, int]  # requests that run, that wait for the model, that have come


class ActivityReports:
    """Reports the models of which something has changed since the last report."""

    def __init__(self, models: ServedModels, control: ControlSocket) -> None:
        self._models = models
        self._control = control
        self._reported: dict[str, Counts] = {}

    def report_all(self) -> None:
        """Report all models next time: the control plane has begun anew."""
        self._reported = {}

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            await self._report()
            await asyncio.sleep(REPORT_SECONDS)

    async def _report(self) -> None:
        counts = {model.name: self._counts(model) for model in self._models}
        changed = {
            model.name: _activity(model, counts[model.name])
            for model in self._models
            if counts[model.name] != self._reported.get(model.name)
        }
        if not changed:
            return
        try:
            await self._control.tell(ACTIVITY, {"models": changed})
        except NotReady:
            return  # all of it is said again
        self._reported = counts

    def _counts(self, model: ServedModel) -> Counts:
        running = model.num_running(self._models.own)
        counts = running, len(model.waiting), model.num_requests
        if running or model.waiting or counts != self._reported.get(model.name, counts):
            model.last_active = time.monotonic()
        return counts


def _activity(model: ServedModel, counts: Counts) -> dict[str, Any]:
    running, waiting, num_requests = counts
    idle = 0.0 if running or waiting else time.monotonic() - model.last_active
    return {"running": running, "waiting": waiting, "idle_s": round(idle, 3), "requests": num_requests}
