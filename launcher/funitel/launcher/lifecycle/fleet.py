"""The models of a server: `Fleet` over `ManagedModel`, with what has to do with several of them."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from funitel.launcher.control_plane.model_tools import ModelTools
from funitel.launcher.control_plane.records import (
    Activity,
    CachedModel,
    LaunchProgress,
    LaunchRequest,
    ModelChange,
    ModelEntry,
    ModelEvent,
    ModelState,
    Registration,
    ReplicaEntry,
    ReplicaStage,
    Snapshot,
    WorkerEntry,
)
from funitel.launcher.control_plane.registry import Registry
from funitel.launcher.control_plane.store import StateStore, StateThread, StoredModel
from funitel.launcher.lifecycle import launch, sleeping
from funitel.launcher.lifecycle.model import ManagedModel, ModelHooks
from funitel.launcher.lifecycle.reports.counts import ModelCounts
from funitel.launcher.lifecycle.reports.history import History
from funitel.launcher.lifecycle.reports.snapshots import Snapshots
from funitel.launcher.lifecycle.reports.state_writer import StateWriter
from funitel.launcher.lifecycle.resources.budget import ModelMemory
from funitel.launcher.lifecycle.server import ServerFacts
from funitel.proto.errors import Conflict, FunitelError, InvalidRequest, LaunchCancelled, LaunchFailed, ModelNotFound

logger = logging.getLogger(__name__)

LOADED = (ModelState.READY, ModelState.WARMING_UP, ModelState.LOADING, ModelState.SLEEPING, ModelState.DRAINING)


class ModelFleet:
    """All models of a server; see `Fleet`."""

    def __init__(
        self, server: ServerFacts, state: StateThread, registry: Registry, tools: ModelTools, *, memory_bytes: int
    ) -> None:
        """Prepare the fleet; `autostart.start` brings up what is stored.

        Args:
            server: what its models share.
            state: where they are stored.
            registry: the custom models.
            tools: of the model server.
            memory_bytes: that models may take together.
        """
        self.server = server
        self.registry = registry
        self.static: ModelEntry | None = None
        self.router_came = asyncio.Event()
        self.counts = ModelCounts()
        self.managed: dict[str, ManagedModel] = {}
        self.memory = ModelMemory(memory_bytes, lambda: tuple(self.managed.values()))
        self.writer = StateWriter(state)
        self.history = History(self.writer.add_event)
        self._state = state
        self._tools = tools
        self._snapshots = Snapshots(self._snapshot_for)
        self._ending: set[asyncio.Task[Any]] = set()
        self._hooks = ModelHooks(
            changed=self._on_change,
            note=self.history.add,
            has_router=lambda: self.has_router,
            loaded=self._on_loaded,
            failed=lambda model: self.counts.failures.update([model.name]),
            evicted=lambda model: self.counts.evictions.update([model.name]),
            restarted=lambda model: self.counts.restarts.update([model.name]),
        )

    # Models --------------------------------------------------------------------------------------------------

    async def launch(self, request: LaunchRequest, *, wait_ready: bool) -> ModelEntry:
        """Launch a model; one of the same name that has failed is replaced."""
        name = request.served_name
        found = self.managed.get(name)
        replaceable = (ModelState.REGISTERED, ModelState.FAILED, ModelState.CANCELLED)
        if self._is_static(name) or (found is not None and (found.is_working or found.state not in replaceable)):
            state = "ready" if found is None else found.state
            raise Conflict(f"a model {name} is there already, {state}: terminate it, or give another name")
        settings = self.server.settings_of(request)
        model = self.add(new_model(name, request, settings.model_id, created=time.time()))
        try:
            self.server.placement.choose(request, num_shard=1, rank_bytes=0, needs_gpu=False)
            launch.check_at_once(model, settings)
        except FunitelError:
            self._forget(model) if found is None else self.put_back(found)
            raise
        await self.begin_load(model)
        if wait_ready:
            await model.until_ready()
        return self._shown(model)

    def add(self, stored: StoredModel) -> ManagedModel:
        """Add a model, in the place of one of the same name; nothing is started."""
        model = ManagedModel(stored, self.server, self.memory, self._hooks)
        self.managed[model.name] = model
        self._on_change(model, True)
        return model

    def put_back(self, model: ManagedModel) -> None:
        """Have a model again that `add` has replaced."""
        self.managed[model.name] = model
        self._on_change(model, True)

    async def begin_load(self, model: ManagedModel, least_retries: int = 0) -> None:
        """Begin the load of a model, unless one is under way or it is loaded.

        Raises:
            LaunchCancelled: it was terminated meanwhile.
        """
        await self.expect(model)
        if self.managed.get(model.name) is not model:
            raise LaunchCancelled(f"the launch of {model.name} was cancelled")
        if not model.is_working and model.state not in LOADED:
            model.begin(launch.load(model, least_retries))
            await asyncio.sleep(0)  # the first stage has begun

    def _shown(self, model: ManagedModel) -> ModelEntry:
        """The entry of a model, also of one that is forgotten by now."""
        return replace(model.snapshot(), is_default=model.name == self._default())

    async def expect(self, model: ManagedModel) -> None:
        """Say how long its load may take, by earlier ones, if the state can be read."""
        try:
            await self.writer.flushed()
            seconds = await self._state(StateStore.expected_load_seconds, _load_key(model))
        except FunitelError as error:
            logger.warning("it is not known how long a load of %s may take: %s", model.name, error.message)
        else:
            model.change(expected_load_seconds=seconds)

    def models(self) -> Sequence[ModelEntry]:
        """All models, in the order of their launch."""
        own = [] if self.static is None else [self.static]
        default = self._default()
        entries = [*own, *(model.snapshot() for model in self.managed.values())]
        return [replace(entry, is_default=entry.name == default) for entry in entries]

    def model(self, name: str) -> ModelEntry:
        """One model."""
        for entry in self.models():
            if entry.name == name:
                return entry
        raise self._unknown(name)

    def _unknown(self, name: str) -> ModelNotFound:
        names = ", ".join(entry.name for entry in self.models()) or "none"
        return ModelNotFound(f"there is no model {name!r}; the models are: {names}")

    def _get(self, name: str) -> ManagedModel:
        """A model that can be changed."""
        if self._is_static(name):
            raise Conflict(f"{name} is the model of the command line: it lives as long as the server")
        model = self.managed.get(name)
        if model is None:
            raise self._unknown(name)
        return model

    def _is_static(self, name: str) -> bool:
        return self.static is not None and self.static.name == name

    async def terminate(self, name: str) -> None:
        """Drain and stop a model, and forget it; its registration stays."""
        await self._finish(self._terminate(self._get(name)))

    async def _terminate(self, model: ManagedModel) -> None:
        await model.unload("is terminated")
        self._forget(model)

    async def _finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Carry out something to its end, also when the caller is cancelled."""
        task = asyncio.ensure_future(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        await asyncio.shield(task)

    def _forget(self, model: ManagedModel) -> None:
        """Forget a model; one of a registration is `registered` again."""
        registration = self.registry.find(model.name)
        if self.managed.get(model.name) is model:
            if registration is not None:
                self.add(registered_model(registration))
                return
            del self.managed[model.name]
            self.writer.forget(model.name)
            self._snapshots.changed()

    async def cancel(self, name: str) -> None:
        """Cancel a launch: returns once its processes are gone."""
        model = self._get(name)
        await self._finish(self._cancel(model))

    async def _cancel(self, model: ManagedModel) -> None:
        await model.cancel()
        self._forget(model)

    def progress(self, name: str) -> LaunchProgress:
        """How far its launch is."""
        if self._is_static(name):
            entry = self.model(name)
            return LaunchProgress(progress=entry.progress, stage=str(entry.state), error=entry.error)
        return self._get(name).progress()

    def events(self, name: str) -> Sequence[ModelEvent]:
        """Its history, oldest first."""
        events = self.history.of(name)
        if events is None:
            self.model(name)  # raises where there is none
        return events or ()

    async def load(self, name: str, *, wait_ready: bool) -> ModelEntry:
        """Load or wake a known model; nothing where it is loaded already."""
        if self._is_static(name):
            return self.model(name)
        model = self._get(name)
        if not model.is_working and model.state is not ModelState.READY:
            await self._start_load(model)
        if wait_ready:
            await model.until_ready()
        return self._shown(model)

    async def _start_load(self, model: ManagedModel) -> None:
        """Begin a load, or wake one that sleeps."""
        if model.state is ModelState.SLEEPING:
            model.begin(sleeping.wake(model))
            return
        if model.state is ModelState.DRAINING:
            async with model.turn:
                pass  # until it has ended
        await self.begin_load(model)

    async def unload(self, name: str) -> ModelEntry:
        """Drain a model and free its memory; it stays known."""
        model = self._get(name)
        await self._finish(model.unload("is unloaded"))
        return self._shown(model)

    async def sleep(self, name: str) -> ModelEntry:
        """Free the KV memory of a model, and keep its weights in the host's memory."""
        model = self._get(name)
        await self._finish(sleeping.put_to_sleep(model))
        return self._shown(model)

    async def wake(self, name: str, *, wait_ready: bool) -> ModelEntry:
        """Wake a model that sleeps."""
        model = self._get(name)
        if model.state not in (ModelState.SLEEPING, ModelState.READY) and not model.is_working:
            raise Conflict(f"{name} is {model.state}: it does not sleep")
        return await self.load(name, wait_ready=wait_ready)

    async def change(self, name: str, change: ModelChange) -> ModelEntry:
        """Change weights, ttl, pinned, priority or the default; all of it or nothing."""
        if change.is_default is not None and self._is_static(name) and change == ModelChange(is_default=True):
            self._choose_default(None)
            return self.model(name)
        model = self._get(name)
        for number in change.weights:
            if number not in model.replicas:
                raise InvalidRequest(f"{name} has no replica {number}", f"weights.{number}")
        for number, weight in change.weights.items():
            model.replicas[number].change(weight=weight)
        changes: dict[str, Any] = {"ttl": None} if change.removes_ttl else {}
        changes |= {} if change.ttl is None else {"ttl": change.ttl}
        changes |= {} if change.pinned is None else {"pinned": change.pinned}
        if change.priority is not None:
            model.request = replace(launch.request_of(model), priority=change.priority)
        if change.is_default is not None:
            self._choose_default(name if change.is_default else None)
        model.change(**changes)
        self.memory.changed()
        return self.model(name)

    def _choose_default(self, name: str | None) -> None:
        for model in self.managed.values():
            if model.entry.is_default != (model.name == name):
                model.change(is_default=model.name == name)

    def _default(self) -> str | None:
        chosen = [model.name for model in self.managed.values() if model.entry.is_default]
        if chosen or self.static is not None:
            return chosen[0] if chosen else self.static.name if self.static else None
        launched = [model.name for model in self.managed.values() if model.request is not None]
        return next(iter(launched), None)

    # Replicas ------------------------------------------------------------------------------------------------

    def replicas(self, name: str) -> Sequence[ReplicaEntry]:
        """The replicas of a model."""
        return self.model(name).replicas

    async def add_replica(self, name: str, *, count: int, weight: float | None) -> Sequence[ReplicaEntry]:
        """Start further replicas, and return them as they start."""
        model = self._get(name)
        if model.state is not ModelState.READY:
            raise Conflict(f"{name} is {model.state}: replicas are added to a model that is ready")
        return await launch.add_replicas(model, count, weight)

    async def remove_replica(self, name: str, replica: int) -> None:
        """Drain and stop a replica."""
        await self._finish(self._get(name).remove_replica(replica))

    def instances(self) -> Sequence[Mapping[str, Any]]:
        """The replicas of all models."""
        return [
            {"model_name": model.name, **replica.to_json()} for model in self.models() for replica in model.replicas
        ]

    # Registrations -------------------------------------------------------------------------------------------

    async def register(self, registration: Registration) -> None:
        """Add a registration, which becomes a model that is `registered`."""
        if self._is_static(registration.name) or registration.name in self.managed:
            raise Conflict(f"a model {registration.name} is there already: give another name")
        await self.registry.add(registration)
        if registration.name not in self.managed:  # a launch may have taken the name meanwhile
            self.add(registered_model(registration))

    async def unregister(self, type: str, name: str) -> None:
        """Remove a registration."""
        users = [
            model
            for model in self.managed.values()
            if launch.request_of(model).model == name and (model.is_working or model.state in LOADED)
        ]
        if users:
            raise Conflict(f"{name} is in use by {', '.join(model.name for model in users)}: unload it first")
        await self.registry.remove(type, name)
        model = self.managed.get(name)
        if model is not None and not model.is_working and model.state not in LOADED:  # it may be loaded meanwhile
            self._forget(model)

    def registrations(self, type: str) -> Sequence[Registration]:
        """The registrations of a type, by name."""
        return self.registry.of_type(type)

    # What can be served, and where ---------------------------------------------------------------------------

    async def engines(self, model: str) -> Mapping[str, Any]:
        """Options of a model with reasons."""
        registration = self.registry.find(model)
        return await self._tools.engines(model if registration is None else registration.model)

    async def cached(self) -> Sequence[CachedModel]:
        """The models on the disk of this machine."""
        return await self._tools.cached()

    async def remove_cached(self, model_name: str, *, check: bool) -> Sequence[CachedModel]:
        """Delete a model from the disk, or with `check` only say what would go."""
        return await self._tools.remove_cached(model_name, check=check)

    def workers(self) -> Sequence[WorkerEntry]:
        """The machines on which replicas run, this one first."""
        running: dict[str, list[Mapping[str, Any]]] = {}
        for model in self.models():
            for replica in model.replicas:
                running.setdefault(replica.worker, []).append({"model": model.name, "replica": replica.id})
        workers = self.server.placement.workers()
        return [replace(worker, replicas=tuple(running.get(worker.name, ()))) for worker in workers]

    def metrics(self) -> bytes:
        """What the control plane counts, in Prometheus's text format."""
        return self.counts.text(self.models(), self.memory.total, self.memory.free)

    # The router ----------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """All models at this instant."""
        return Snapshot(default=self._default(), wait=self.server.wait_seconds > 0, models=tuple(self.models()))

    def _snapshot_for(self, *, is_first: bool) -> Snapshot:
        """The snapshot for a watcher: only the first of several may use replicas, since a shard has one router."""
        snapshot = self.snapshot()
        if is_first:
            return snapshot
        return replace(snapshot, models=tuple(_without_replicas(model) for model in snapshot.models))

    def watch(self) -> AsyncIterator[Snapshot]:
        """Snapshots: one at once, then one after each change."""
        self.router_came.set()
        return self._snapshots.watch()

    def activity(self, models: Mapping[str, Activity]) -> None:
        """Note what the router says of models."""
        for name, activity in models.items():
            if name in self.managed:
                self.managed[name].take_activity(activity)

    def released(self, name: str, replica: int) -> None:
        """Note that the router no longer uses a replica."""
        if name in self.managed:
            self.managed[name].released(replica)

    def attached(self, name: str, replica: int, *, seconds: float | None, error: str | None) -> None:
        """Note that the router uses a replica, or that it cannot."""
        if name in self.managed:
            self.managed[name].attached(replica, error)

    async def load_on_demand(self, name: str) -> None:
        """Load or wake a model that a request names; returns once that has begun."""
        if self._is_static(name):
            return
        model = self.managed.get(name)
        if model is None:
            raise self._unknown(name)
        if model.is_working or model.state is ModelState.READY:
            return
        if (error := model.recent_failure) is not None:
            raise LaunchFailed(f"{name}: {error}")
        if model.has_need and model.entry.bytes is not None:
            self.memory.check(name, model.entry.bytes)
        model.note("is wanted by a request")
        await self._start_load(model)

    @property
    def has_router(self) -> bool:
        """Whether a router watches."""
        return self._snapshots.num_watchers > 0

    # What models tell ----------------------------------------------------------------------------------------

    def _on_change(self, model: ManagedModel, is_stored: bool) -> None:
        if self.managed.get(model.name) is model:
            if is_stored:
                self.writer.save(model.name, model.stored)
            self._snapshots.changed()

    def _on_loaded(self, model: ManagedModel, seconds: float) -> None:
        self.counts.loads.add(model.name, seconds)
        self.writer.add_load(_load_key(model), seconds)
        model.change(expected_load_seconds=seconds)

    def kill(self) -> None:
        """End the shards of every model at once."""
        for model in self.managed.values():
            for replica in model.replicas.values():
                replica.kill()

    def set_static(self, entry: ModelEntry) -> None:
        """Show the model of the command line as it is now, and count its memory."""
        if entry != self.static:
            self.static = entry
            self.memory.held = entry.bytes or 0
            self._snapshots.changed()


def _without_replicas(entry: ModelEntry) -> ModelEntry:
    """A model as if its replicas were not ready yet; that of the command line as it is."""
    if entry.is_static:
        return entry
    return replace(entry, replicas=tuple(replace(each, state=ReplicaStage.STARTING) for each in entry.replicas))


def new_model(name: str, request: LaunchRequest, model_id: str, *, created: float) -> StoredModel:
    entry = ModelEntry(
        name=name,
        model_id=model_id,
        state=ModelState.QUEUED,
        created=created,
        ttl=request.ttl,
        pinned=request.pinned,
        engine=request.engine or "native",
        request_limit=request.request_limit,
    )
    return StoredModel(entry=entry, request=request, is_wanted=True)


def registered_model(registration: Registration) -> StoredModel:
    entry = ModelEntry(
        name=registration.name,
        model_id=registration.model,
        state=ModelState.REGISTERED,
        created=registration.created or time.time(),
    )
    return StoredModel(entry=entry, request=None, is_wanted=False)


def _load_key(model: ManagedModel) -> str:
    """What changes how long a load takes."""
    request = launch.request_of(model)
    facts = [model.entry.model_id, request.quantize, request.dtype, request.num_shard, request.replicas, request.engine]
    return json.dumps(facts)
