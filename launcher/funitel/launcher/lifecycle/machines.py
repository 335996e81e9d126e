"""Place replicas on this machine, on workers and on Ray: what is asked for, and where it is known to be."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from funitel.launcher.control_plane.records import LaunchRequest, WorkerEntry
from funitel.launcher.control_plane.workers import Workers
from funitel.launcher.executors.choose import WORKER, Wanted, choose
from funitel.launcher.executors.interface import Executor
from funitel.launcher.executors.ray import RayExecutor
from funitel.launcher.executors.remote_worker import WorkerExecutor
from funitel.launcher.lifecycle.jobs import LOCAL
from funitel.launcher.lifecycle.placement import LocalPlacement
from funitel.launcher.settings import LauncherSettings
from funitel.proto.errors import DoesNotFit, InvalidRequest

WORKER_FIELD = "worker"


class MachinePlacement:
    """This machine, the workers that join where `--worker-port` is given, and Ray where `--ray-address` is."""

    def __init__(self, settings: LauncherSettings, gpus: Sequence[str] = ()) -> None:
        """Take the settings of the server, and the GPUs of this machine as CUDA names them."""
        port = settings.workers_port
        self.machines = Workers(port)
        others: dict[str, Executor] = {}
        self._ray: RayExecutor | None = None
        if port.worker_port is not None:
            others[WORKER] = WorkerExecutor(self.machines, port.worker_tls)
        if settings.ray_address is not None:
            self._ray = RayExecutor(settings.ray_address, port.worker_tls, settings.cache_dir)
            others[self._ray.name] = self._ray
        self._local = LocalPlacement(gpus, others)

    async def start(self) -> None:
        """Let workers join; raises SettingsError."""
        await self.machines.start()

    async def stop(self) -> None:
        """Leave workers and Ray; what runs there runs on."""
        await self.machines.stop()
        if self._ray is not None:
            await self._ray.close()

    def choose(
        self, request: LaunchRequest, *, num_shard: int, rank_bytes: int, needs_gpu: bool
    ) -> tuple[str, tuple[str, ...]]:
        """The executor of a replica, and the places of its ranks where the request names a worker.

        Else the places are chosen at each start, among the workers that are connected then.

        Raises:
            InvalidRequest: the request names an executor or a worker that is not there.
            DoesNotFit: no worker has room; with the reason of each.
        """
        name, _ = self._local.choose(request, num_shard=num_shard, rank_bytes=rank_bytes, needs_gpu=needs_gpu)
        if name != WORKER:
            return name, ()
        known = [place.name for place in self.machines.places()]
        if request.worker is not None and request.worker not in known:
            given = f"`worker` must be one of {', '.join([LOCAL, *known])}. Given: {request.worker!r}"
            raise InvalidRequest(given, WORKER_FIELD)
        wanted = Wanted(
            num_ranks=num_shard,
            rank_bytes=rank_bytes,
            device="cuda" if needs_gpu else "auto",
            executor=WORKER,
            worker=request.worker,
        )
        choice = choose(wanted, self.machines.places())
        if choice.executor is None:
            raise DoesNotFit(f"{request.served_name} fits on no worker: {choice.reasons}")
        return name, choice.workers if request.worker is not None else ()

    def elsewhere(self, request: LaunchRequest, *, num_shard: int, rank_bytes: int) -> LaunchRequest | None:
        """The request for workers, where it names no place and they have room for a replica; else None."""
        if request.executor is not None or request.worker is not None:
            return None
        there = replace(request, executor=WORKER)
        try:
            self.choose(there, num_shard=num_shard, rank_bytes=rank_bytes, needs_gpu=False)
        except (DoesNotFit, InvalidRequest):
            return None
        return there

    def executor(self, name: str) -> Executor:
        """An executor by its name."""
        return self._local.executor(name)

    def workers(self) -> Sequence[WorkerEntry]:
        """This machine, and every worker."""
        return [*self._local.workers(), *map(_entry, self.machines.list())]


def _entry(worker: dict[str, Any]) -> WorkerEntry:
    return WorkerEntry(
        name=worker["name"],
        address=worker["address"],
        cores=worker["cores"],
        memory_bytes=worker["memory_bytes"],
        free_memory_bytes=worker["free_bytes"],
        gpus=tuple({"name": gpu} for gpu in worker["gpus"]),
        last_seen=worker["last_seen"],
        is_alive=worker["state"] == "connected",
    )
