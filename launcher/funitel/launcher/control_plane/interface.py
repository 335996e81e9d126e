"""The interface of the fleet: what the API calls, and what runs models, their replicas and their workers."""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from funitel.launcher.control_plane.records import (
    Activity,
    CachedModel,
    LaunchProgress,
    LaunchRequest,
    ModelChange,
    ModelEntry,
    ModelEvent,
    Registration,
    ReplicaEntry,
    Snapshot,
    WorkerEntry,
)


class Fleet(Protocol):
    """The models of a server. The methods are called from one event loop.

    A method that names a model raises `ModelNotFound` for a name that is unknown. One that is refused raises
    `Conflict` for what the state of the model forbids, `InvalidRequest` for a wrong value (its `param` is the field),
    and `DoesNotFit` for what the memory cannot hold.

    A method with `wait_ready` returns at once, or else once the model is ready; it then raises `LaunchFailed` or
    `LaunchCancelled` for a launch that ends otherwise. Cancelling the call does not cancel the launch.
    """

    # Models

    async def launch(self, request: LaunchRequest, *, wait_ready: bool) -> ModelEntry:
        """Launch a model; raises Conflict for a name that is taken."""

    def models(self) -> Sequence[ModelEntry]:
        """All models, in the order of their launch."""

    def model(self, name: str) -> ModelEntry:
        """One model."""

    async def terminate(self, name: str) -> None:
        """Drain and stop a model, and forget it; its registration stays. Raises Conflict for a static one."""

    async def cancel(self, name: str) -> None:
        """Cancel a launch: returns once its processes are gone. Raises Conflict for a model that does not launch."""

    def progress(self, name: str) -> LaunchProgress:
        """How far its launch is."""

    def events(self, name: str) -> Sequence[ModelEvent]:
        """Its history, oldest first; also of a model that was forgotten a short time ago."""

    async def load(self, name: str, *, wait_ready: bool) -> ModelEntry:
        """Load a known model; nothing where it is loaded already."""

    async def unload(self, name: str) -> ModelEntry:
        """Drain a model and free its memory; it stays known. Raises Conflict for a static one."""

    async def sleep(self, name: str) -> ModelEntry:
        """Free the KV memory of a model, and keep its weights in the host's memory."""

    async def wake(self, name: str, *, wait_ready: bool) -> ModelEntry:
        """Wake a model that sleeps."""

    async def change(self, name: str, change: ModelChange) -> ModelEntry:
        """Change weights, ttl, pinned, priority or the default; all of it or nothing."""

    # Replicas

    def replicas(self, name: str) -> Sequence[ReplicaEntry]:
        """The replicas of a model."""

    async def add_replica(self, name: str, *, count: int, weight: float | None) -> Sequence[ReplicaEntry]:
        """Start further replicas, and return them as they start."""

    async def remove_replica(self, name: str, replica: int) -> None:
        """Drain and stop a replica. Raises NotFound for an unknown one, Conflict for the last one."""

    def instances(self) -> Sequence[Mapping[str, Any]]:
        """The replicas of all models: each the JSON of a replica with `model_name` beside."""

    # Registrations

    async def register(self, registration: Registration) -> None:
        """Add a registration, which becomes a model that is `registered`; raises Conflict for a name that is taken."""

    async def unregister(self, type: str, name: str) -> None:
        """Remove a registration; raises NotFound for an unknown one, Conflict while its model is loaded."""

    def registrations(self, type: str) -> Sequence[Registration]:
        """The registrations of a type, by name."""

    # What can be served, and where

    async def engines(self, model: str) -> Mapping[str, Any]:
        """Options of a model with reasons, as `funitel models MODEL --explain --json` prints them."""

    async def cached(self) -> Sequence[CachedModel]:
        """The models on the disk of this machine."""

    async def remove_cached(self, model_name: str, *, check: bool) -> Sequence[CachedModel]:
        """Delete a model from the disk, or with `check` only say what would go. Raises Conflict for one in use."""

    def workers(self) -> Sequence[WorkerEntry]:
        """The machines on which replicas run, this one first."""

    def metrics(self) -> bytes:
        """What the control plane counts, in Prometheus's text format; the router adds it to its own."""

    # The router

    def watch(self) -> AsyncIterator[Snapshot]:
        """Snapshots: one at once, then one after each change; those that a slow reader misses are left out."""

    def activity(self, models: Mapping[str, Activity]) -> None:
        """Note what the router says of models; names that are unknown are left out."""

    def released(self, name: str, replica: int) -> None:
        """Note that the router no longer uses a replica; nothing for one that is unknown."""

    def attached(self, name: str, replica: int, *, seconds: float | None, error: str | None) -> None:
        """Note that the router uses a replica, or with `error` that it cannot; nothing for one that is unknown."""

    async def load_on_demand(self, name: str) -> None:
        """Load or wake a model that a request names; returns once that has begun. Calls for one model are one load."""
