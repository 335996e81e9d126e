"""The link of a router to its control plane: it follows the models, attaches them, and tells what they do."""

import asyncio

from funitel.router.fleet.activity import ActivityReports
from funitel.router.fleet.attach import Attachments
from funitel.router.fleet.control import ControlSocket
from funitel.router.fleet.loading import Loads
from funitel.router.fleet.models import ConnectReplicas, ServedModels
from funitel.router.fleet.snapshot import FleetSnapshot
from funitel.router.fleet.watch import watch


class FleetLink:
    """What a router with a control plane runs beside its requests.

    Args:
        models: the table, which it keeps as the control plane says.
        path: of the control socket.
        connect: makes the engine of a model.
    """

    def __init__(self, models: ServedModels, path: str, connect: ConnectReplicas) -> None:
        self.control = ControlSocket(path)
        self.loads = Loads(models, self.control, models.own.settings.wait_for_load)
        self._models = models
        self._attachments = Attachments(models, self.control, connect)
        self._activity = ActivityReports(models, self.control)

    async def run(self) -> None:
        """Follow the control plane until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch(self.control, self._take, self._begin_anew))
            tasks.create_task(self._activity.run())

    def _take(self, snapshot: FleetSnapshot) -> None:
        self._models.apply(snapshot)
        self._attachments.look()
        self.loads.look_all()

    def _begin_anew(self) -> None:
        self._attachments.say_again()
        self._activity.report_all()

    async def close(self) -> None:
        """Close all services but the router's own; their requests may finish."""
        await self.loads.close()
        await self._attachments.close()
