"""What the models of a server share: folders, programs, bounds, and the places where replicas run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from funitel.launcher.config.child_commands import Commands
from funitel.launcher.control_plane.records import LaunchRequest, WorkerEntry
from funitel.launcher.executors.interface import Executor
from funitel.launcher.lifecycle.resources.gpu_shares import GpuShares
from funitel.launcher.settings import LauncherSettings
from funitel.proto.security.tls import MutualTls


class Placement(Protocol):
    """Decides where replicas run."""

    def choose(
        self, request: LaunchRequest, *, num_shard: int, rank_bytes: int, needs_gpu: bool
    ) -> tuple[str, tuple[str, ...]]:
        """The name of the executor for a replica of a model, and the worker of each rank.

        Args:
            request: of the launch.
            num_shard: ranks.
            rank_bytes: memory of each; 0 where it is unknown.
            needs_gpu: whether each needs a GPU of its own.

        Raises:
            InvalidRequest: the request names an executor or a worker that is not there.
            DoesNotFit: there is no room.
        """

    def elsewhere(self, request: LaunchRequest, *, num_shard: int, rank_bytes: int) -> LaunchRequest | None:
        """The request for other machines, where they have room for a replica; None where they have not, or may not."""

    def executor(self, name: str) -> Executor:
        """An executor by its name, also for the adoption of a replica; raises KeyError for one that is not there."""

    def workers(self) -> Sequence[WorkerEntry]:
        """The machines that are known, this one first; the replicas of this one are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What is the same for all models of a server.

    Attributes:
        settings_of: the settings of a model by its launch; raises InvalidRequest or SettingsError.
        defaults: settings of a model for what its launch leaves open.
        environ: of child processes.
        commands: their command lines.
        placement: where replicas run.
        gpus: of this machine.
        run_folder: of their sockets.
        log_folder: of their output.
        max_restarts: of a replica in a row.
        grace_seconds: that a process has to stop, and requests to end.
        wait_seconds: that a load waits for memory.
        outlives: whether replicas outlive this process.
    """

    settings_of: Callable[[LaunchRequest], LauncherSettings]
    defaults: LauncherSettings
    environ: Mapping[str, str]
    commands: Commands
    placement: Placement
    gpus: GpuShares
    run_folder: Path
    log_folder: Path
    max_restarts: int
    grace_seconds: float
    wait_seconds: float
    outlives: bool

    @property
    def tls(self) -> MutualTls | None:
        """How shards on other machines are met; None for plain connections."""
        return self.defaults.workers_port.worker_tls
