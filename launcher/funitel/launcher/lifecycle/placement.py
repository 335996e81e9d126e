"""Place replicas on this machine, which is where they run without workers."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from funitel.launcher.control_plane.records import LaunchRequest, WorkerEntry
from funitel.launcher.executors.interface import Executor
from funitel.launcher.executors.local import LocalExecutor
from funitel.launcher.lifecycle.jobs import LOCAL
from funitel.launcher.lifecycle.resources.machine_memory import machine_memory
from funitel.proto.errors import InvalidRequest
from funitel.proto.process.usable_cores import count_usable_cores


class LocalPlacement:
    """Executors by name; a request that names none gets `local`."""

    def __init__(self, gpus: Sequence[str] = (), executors: Mapping[str, Executor] = MappingProxyType({})) -> None:
        """Take the GPUs of this machine, as CUDA names them, and executors beside `local`."""
        self._executors: Mapping[str, Executor] = {LOCAL: LocalExecutor(), **executors}
        self._gpus = tuple(gpus)

    def choose(
        self, request: LaunchRequest, *, num_shard: int, rank_bytes: int, needs_gpu: bool
    ) -> tuple[str, tuple[str, ...]]:
        """The executor that the request names, else this machine; the executor chooses workers."""
        name = request.executor or (LOCAL if request.worker in (None, LOCAL) else "worker")
        if name not in self._executors:
            field = "executor" if request.executor is not None else "worker"
            given = request.executor or request.worker
            raise InvalidRequest(f"`{field}` must be one of {', '.join(self._executors)}. Given: {given!r}", field)
        return name, ()

    def elsewhere(self, request: LaunchRequest, *, num_shard: int, rank_bytes: int) -> LaunchRequest | None:
        """None: there is no other machine."""
        return None

    def executor(self, name: str) -> Executor:
        """An executor by its name."""
        return self._executors[name]

    def workers(self) -> Sequence[WorkerEntry]:
        """This machine."""
        gpus = tuple({"name": gpu} for gpu in self._gpus)
        return [WorkerEntry(name=LOCAL, cores=count_usable_cores(), memory_bytes=machine_memory(), gpus=gpus)]
