"""The interface of an executor: start the shards of one replica somewhere, watch them, stop them, find them again."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from funitel.launcher.config.child_commands import Commands
from funitel.launcher.config.resolve import ResolvedSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaJob:
    """What an executor starts.

    Attributes:
        model: name of the model.
        replica: id of the replica among those of the model.
        folder: of the model, on this machine.
        settings: of this replica alone (`num_replicas` is 1), fitted to the model.
        environ: of the processes.
        commands: their command lines.
        log: file that gets their output.
        outlives: whether they outlive the process that starts them.
        workers: place of each rank, as `choose` names them; empty where the executor is to choose.
        rank_bytes: memory of each rank; 0 where it is unknown.
    """

    model: str
    replica: int
    folder: Path
    settings: ResolvedSettings
    environ: Mapping[str, str]
    commands: Commands
    log: Path
    outlives: bool
    workers: tuple[str, ...] = ()
    rank_bytes: int = 0


class RunningReplica(Protocol):
    """The shards of one replica, wherever they run.

    Attributes:
        address: of rank 0, as the router connects: `unix:///path` or `tcp://host:port`.
        record: JSON object by which `Executor.adopt` finds the replica again.
        pids: of its processes on their machine.
        worker: name of the machine; `local` for this one.
        exited: the reason, once a rank has ended; the whole replica is lost then.
    """

    address: str
    record: Mapping[str, Any]
    pids: Sequence[int]
    worker: str
    exited: "asyncio.Future[str]"

    async def answers(self) -> bool:
        """Whether every rank answers its health check."""

    async def stop(self, grace_seconds: float) -> None:
        """Stop every rank, by force after `grace_seconds`."""

    def kill(self) -> None:
        """End every rank at once."""


class Executor(Protocol):
    """A place where replicas run."""

    async def start(self, job: ReplicaJob) -> RunningReplica:
        """Start the shards of a replica; they load the model after this has returned.

        A restart is another call with the same job; the address stays where it can.

        Raises:
            FunitelError: they cannot be started there.
        """

    async def adopt(self, record: Mapping[str, Any]) -> RunningReplica | None:
        """Find the replica that an earlier control plane has started; None where it is gone."""
