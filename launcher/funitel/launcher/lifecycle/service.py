"""Start the models of a server, adopting what runs of them; keep their clocks; stop them."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from funitel.launcher.control_plane.records import LaunchRequest, ModelState
from funitel.launcher.control_plane.store import StateStore, StateThread, StoredModel
from funitel.launcher.lifecycle import launch
from funitel.launcher.lifecycle.fleet import ModelFleet, new_model, registered_model
from funitel.launcher.lifecycle.jobs import LOCAL
from funitel.launcher.lifecycle.model import ManagedModel
from funitel.launcher.lifecycle.orphans import end_orphans
from funitel.launcher.lifecycle.replica import IDLE_GRACE_SECONDS
from funitel.launcher.lifecycle.resources.machine_memory import memory_of
from funitel.proto.errors import FunitelError

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.5
MEASURE_SECONDS = 30.0
AUTOSTART_RETRIES = 3


class FleetService:
    """The life of a fleet in one process: `start`, then `stop`."""

    def __init__(self, fleet: ModelFleet, state: StateThread) -> None:
        self._fleet = fleet
        self._state = state
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, configured: Sequence[LaunchRequest] = (), *, has_router: bool = False) -> int:
        """Bring up what is stored and what is configured; loads go on after this has returned.

        Args:
            configured: models of a configuration file, which replace stored ones of the same name.
            has_router: whether a router runs that serves what was ready.

        Returns:
            The number of replicas that were adopted.

        Raises:
            StorageFailed: the state cannot be read.
        """
        num_adopted, waiting = await self.adopt(configured, has_router=has_router)
        self._tasks = [asyncio.create_task(self._autostart(waiting)), asyncio.create_task(self._tick())]
        return num_adopted

    async def adopt(
        self, configured: Sequence[LaunchRequest] = (), *, has_router: bool = False
    ) -> tuple[int, list[ManagedModel]]:
        """Take over what runs; returns the number of replicas, and the models that are to be loaded."""
        fleet = self._fleet
        await fleet.registry.open()
        stored = await self._state(StateStore.models)
        by_name = {each.entry.name: each for each in stored}
        waiting: list[ManagedModel] = []
        num_adopted = 0
        for each in [*stored, *_further(configured, by_name)]:
            wanted = _with(each, {request.served_name: request for request in configured})
            model = fleet.add(wanted)
            fleet.history.restore(model.name, await self._state(StateStore.events, model.name))
            if await self._adopt(model, wanted, has_router=has_router):
                num_adopted += sum(bool(replica.entry.pids) for replica in model.replicas.values())
            elif model.is_wanted:
                waiting.append(model)
            elif model.state not in (ModelState.FAILED, ModelState.REGISTERED):
                model.enter(ModelState.REGISTERED, "is not loaded", progress=0.0)
        for registration in fleet.registry.all():
            if registration.name not in fleet.managed:
                fleet.add(registered_model(registration))
        pids = [pid for model in fleet.managed.values() for each in model.replicas.values() for pid in each.entry.pids]
        for pid in end_orphans(fleet.server.run_folder, pids):
            logger.warning("killed process %d, a shard of an earlier control plane that its state did not know", pid)
        waiting.sort(key=lambda model: -launch.request_of(model).priority)
        for model in waiting:
            model.enter(ModelState.QUEUED, "is to be loaded", progress=0.0, error=None)
        return num_adopted, waiting

    async def _adopt(self, model: ManagedModel, stored: StoredModel, *, has_router: bool) -> bool:
        """Take over the replicas of a model; return whether any of them runs."""
        was = stored.entry.state
        try:
            is_running = await launch.adopt(model, stored.entry.replicas, has_router=has_router)
        except FunitelError as error:
            await model.stop_replicas(IDLE_GRACE_SECONDS)
            model.note(f"cannot be adopted: {error.message}")
            return False
        if not is_running:
            return False
        if was is ModelState.SLEEPING or (was is ModelState.READY and has_router):
            return True
        model.begin(launch.resume(model))
        return True

    async def _autostart(self, models: Sequence[ManagedModel]) -> None:
        """Load models one after another; one that fails for good does not hold up the next."""
        for model in models:
            if model.is_working or model.state is not ModelState.QUEUED or model.name not in self._fleet.managed:
                continue  # launched, cancelled or terminated meanwhile
            try:
                await self._fleet.begin_load(model, AUTOSTART_RETRIES)
                await model.until_ready()
            except FunitelError as error:
                logger.error("%s is not loaded: %s", model.name, error.message)
            except Exception:  # the next ones are loaded whatever is wrong with this one
                logger.exception("%s is not loaded", model.name)

    async def _tick(self) -> None:
        """Unload each model at the end of its ttl, and measure memory."""
        measured = time.monotonic()
        unloading: dict[str, asyncio.Task[None]] = {}
        while True:
            await asyncio.sleep(TICK_SECONDS)
            for model in tuple(self._fleet.managed.values()):
                if model.has_expired and (model.name not in unloading or unloading[model.name].done()):
                    reason = f"no request for {model.entry.ttl:g} s"
                    unloading[model.name] = asyncio.create_task(model.unload(reason))
            if time.monotonic() - measured >= MEASURE_SECONDS:
                measured = time.monotonic()
                for model in self._fleet.managed.values():
                    _measure(model)

    async def stop(self) -> None:
        """Stop every model; those that are wanted are loaded by the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._stop(model) for model in self._fleet.managed.values()))
        await self._fleet.writer.close()

    async def _stop(self, model: ManagedModel) -> None:
        await model.cancel_work()
        async with model.turn:
            was = model.state
            if model.replicas or was.is_launching:
                await model.stop_replicas(self._fleet.server.grace_seconds)
                model.enter(ModelState.REGISTERED, "the server stops", progress=0.0)


def _further(configured: Sequence[LaunchRequest], known: dict[str, StoredModel]) -> list[StoredModel]:
    """The models of a configuration file that are not stored."""
    now = time.time()
    return [
        new_model(request.served_name, request, request.model, created=now)
        for request in configured
        if request.served_name not in known
    ]


def _with(stored: StoredModel, configured: dict[str, LaunchRequest]) -> StoredModel:
    """A stored model, as a configuration file wants it."""
    request = configured.get(stored.entry.name)
    if request is None:
        return stored
    entry = replace(
        stored.entry,
        model_id=request.model,
        ttl=request.ttl,
        pinned=request.pinned,
        request_limit=request.request_limit,
        engine=request.engine or "native",
    )
    return StoredModel(entry=entry, request=request, is_wanted=True)


def _measure(model: ManagedModel) -> None:
    """Have the budget count what a model has grown to."""
    if model.state is ModelState.READY and not model.turn.locked():
        replicas = [each.entry for each in model.replicas.values() if each.entry.worker == LOCAL]
        measured = memory_of(pid for replica in replicas for pid in replica.pids)
        if measured > (model.entry.bytes or 0):
            model.change(bytes=measured)
            model.memory.put(model.name, measured)
