"""A fleet without processes: launches go through their stages when the test lets them."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

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
from funitel.proto.errors import Conflict, DoesNotFit, LaunchCancelled, LaunchFailed, ModelNotFound, NotFound

STAGES = (
    (ModelState.QUEUED, 0.0),
    (ModelState.DOWNLOADING, 0.25),
    (ModelState.CONVERTING, 0.5),
    (ModelState.LOADING, 0.75),
    (ModelState.WARMING_UP, 0.9),
)


class FakeFleet:
    """`gate` holds launches in `downloading` while not set; a model called `broken` fails, `huge` does not fit."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.entries: dict[str, ModelEntry] = {}
        self.requests: dict[str, LaunchRequest] = {}
        self.said: list[tuple[Any, ...]] = []
        self.changed: list[tuple[str, ModelChange]] = []
        self.registered: dict[tuple[str, str], Registration] = {}
        self.disk = [
            CachedModel(model_name="smollm2-135m-instruct", path="/cache/smol", bytes=101_900_000, in_use=True),
            CachedModel(model_name="owner/tiny", path="/hub/models--owner--tiny", bytes=5_000),
        ]
        self._launches: dict[str, asyncio.Task[None]] = {}
        self._events: dict[str, list[ModelEvent]] = {}
        self._changes = asyncio.Condition()

    # Models

    async def launch(self, request: LaunchRequest, *, wait_ready: bool) -> ModelEntry:
        name = request.served_name
        if name in self.entries:
            raise Conflict(f"{name} exists already")
        if request.model == "huge":
            raise DoesNotFit("huge needs 80.0 GiB, 60.0 GiB are free: int8 would fit")
        self.requests[name] = request
        self.entries[name] = ModelEntry(
            name=name,
            model_id=request.model,
            state=ModelState.QUEUED,
            created=1_700_000_000.0,
            pinned=request.pinned,
            ttl=request.ttl,
            is_default=not self.entries,
            bytes=640_000_000,
        )
        self._launches[name] = asyncio.create_task(self._run(name, request))
        return await self._ready(name) if wait_ready else self.entries[name]

    async def _run(self, name: str, request: LaunchRequest) -> None:
        for state, progress in STAGES:
            await self._enter(name, state, progress=progress)
            if state is ModelState.DOWNLOADING:
                await self.gate.wait()
            await asyncio.sleep(0.01)
        if request.model == "broken":
            await self._enter(name, ModelState.FAILED, error="the checkpoint is damaged")
            return
        replicas = tuple(
            ReplicaEntry(id=number, address=f"unix:///run/{number}", state=ReplicaStage.READY, pids=(100 + number,))
            for number in range(request.replicas)
        )
        await self._enter(name, ModelState.READY, progress=1.0, replicas=replicas, load_seconds=1.5, task="generate")

    async def _enter(self, name: str, state: ModelState, **changes: Any) -> None:
        self._events.setdefault(name, []).append(ModelEvent(at=1.0, stage=state, message=str(state)))
        async with self._changes:
            self.entries[name] = replace(self.entries[name], state=state, **changes)
            self._changes.notify_all()

    async def _ready(self, name: str) -> ModelEntry:
        try:
            await asyncio.shield(self._launches[name])
        except asyncio.CancelledError:
            if self._launches[name].cancelled():
                raise LaunchCancelled(f"the launch of {name} was cancelled") from None
            raise
        entry = self.entries[name]
        if entry.state is ModelState.FAILED:
            raise LaunchFailed(f"{name} cannot be loaded: {entry.error}")
        return entry

    def models(self) -> Sequence[ModelEntry]:
        return [*self.entries.values()]

    def model(self, name: str) -> ModelEntry:
        if name not in self.entries:
            raise ModelNotFound(f"there is no model {name}")
        return self.entries[name]

    async def terminate(self, name: str) -> None:
        if self.model(name).is_static:
            raise Conflict(f"{name} is the model of the command line")
        async with self._changes:
            del self.entries[name]
            self._changes.notify_all()

    async def cancel(self, name: str) -> None:
        if not self.model(name).state.is_launching:
            raise Conflict(f"{name} is {self.model(name).state}, it does not launch")
        self._launches[name].cancel()
        await asyncio.gather(self._launches[name], return_exceptions=True)
        await self.terminate(name)

    def progress(self, name: str) -> LaunchProgress:
        entry = self.model(name)
        is_download = entry.state is ModelState.DOWNLOADING
        return LaunchProgress(
            progress=entry.progress,
            stage=entry.state,
            bytes=50_000_000 if is_download else None,
            total_bytes=200_000_000 if is_download else None,
            error=entry.error,
        )

    def events(self, name: str) -> Sequence[ModelEvent]:
        if name not in self._events:
            raise ModelNotFound(f"there is no model {name}")
        return self._events[name]

    async def load(self, name: str, *, wait_ready: bool) -> ModelEntry:
        return await self._changed(name, "load", wait_ready, state=ModelState.READY)

    async def unload(self, name: str) -> ModelEntry:
        return await self._changed(name, "unload", state=ModelState.REGISTERED)

    async def sleep(self, name: str) -> ModelEntry:
        return await self._changed(name, "sleep", state=ModelState.SLEEPING)

    async def wake(self, name: str, *, wait_ready: bool) -> ModelEntry:
        return await self._changed(name, "wake", wait_ready, state=ModelState.READY)

    async def _changed(self, name: str, *said: Any, **changes: Any) -> ModelEntry:
        self.model(name)
        self.said.append((said[0], name, *said[1:]))
        await self._enter(name, **changes)
        return self.entries[name]

    async def change(self, name: str, change: ModelChange) -> ModelEntry:
        entry = self.model(name)
        self.changed.append((name, change))
        if change.pinned is not None:
            entry = self.entries[name] = replace(entry, pinned=change.pinned)
        return entry

    # Replicas

    def replicas(self, name: str) -> Sequence[ReplicaEntry]:
        return self.model(name).replicas

    async def add_replica(self, name: str, *, count: int, weight: float | None) -> Sequence[ReplicaEntry]:
        entry = self.model(name)
        first = 1 + max((each.id for each in entry.replicas), default=-1)
        added = tuple(ReplicaEntry(id=first + each, weight=weight or 1.0) for each in range(count))
        self.entries[name] = replace(entry, replicas=(*entry.replicas, *added))
        return added

    async def remove_replica(self, name: str, replica: int) -> None:
        entry = self.model(name)
        left = tuple(each for each in entry.replicas if each.id != replica)
        if left == entry.replicas:
            raise NotFound(f"{name} has no replica {replica}")
        if not left:
            raise Conflict(f"replica {replica} is the last one of {name}")
        self.entries[name] = replace(entry, replicas=left)

    def instances(self) -> Sequence[Mapping[str, Any]]:
        return [
            {"model_name": entry.name, **each.to_json()} for entry in self.entries.values() for each in entry.replicas
        ]

    # Registrations

    async def register(self, registration: Registration) -> None:
        if (registration.type, registration.name) in self.registered:
            raise Conflict(f"{registration.name} is registered already")
        self.registered[registration.type, registration.name] = registration

    async def unregister(self, type: str, name: str) -> None:
        if self.registered.pop((type, name), None) is None:
            raise NotFound(f"no model {name} of type {type} is registered")

    def registrations(self, type: str) -> Sequence[Registration]:
        return [each for each in self.registered.values() if each.type == type]

    # What can be served, and where

    async def engines(self, model: str) -> Mapping[str, Any]:
        return {"model": model, "suggested": {"engine": "native"}, "options": []}

    async def cached(self) -> Sequence[CachedModel]:
        return self.disk

    async def remove_cached(self, model_name: str, *, check: bool) -> Sequence[CachedModel]:
        found = [each for each in self.disk if each.model_name == model_name]
        if not found:
            raise NotFound(f"no model {model_name} is cached")
        if found[0].in_use and not check:
            raise Conflict(f"{model_name} is in use: it is not deleted")
        if not check:
            self.disk = [each for each in self.disk if each.model_name != model_name]
        return found

    def workers(self) -> Sequence[WorkerEntry]:
        gpu = {"name": "H100", "memory_bytes": 80_000_000_000}
        return [
            WorkerEntry(name="local", cores=2, memory_bytes=8_000_000_000, free_memory_bytes=3_000_000_000),
            WorkerEntry(
                name="gpu-1",
                address="10.0.0.2:7000",
                cores=64,
                gpus=(gpu,),
                replicas=({"model": "smol", "replica": 0},),
                last_seen=5.0,
                is_alive=False,
            ),
        ]

    def metrics(self) -> bytes:
        return b"funitel_model_loads_total 3.0\n"

    # The router

    async def watch(self) -> AsyncIterator[Snapshot]:
        while True:
            models = tuple(self.entries.values())
            default = next((entry.name for entry in models if entry.is_default), None)
            yield Snapshot(default=default, wait=True, models=models)
            async with self._changes:
                while models == tuple(self.entries.values()):
                    await self._changes.wait()

    def activity(self, models: Mapping[str, Activity]) -> None:
        self.said.append(("activity", dict(models)))

    def released(self, name: str, replica: int) -> None:
        self.said.append(("released", name, replica))

    def attached(self, name: str, replica: int, *, seconds: float | None, error: str | None) -> None:
        self.said.append(("attached", name, replica, seconds, error))

    async def load_on_demand(self, name: str) -> None:
        self.model(name)
        self.said.append(("load_on_demand", name))
