"""Run the shards of one replica: start all ranks together, and restart all when one ends."""

import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from funitel.launcher.config.child_commands import Commands, shard_environ
from funitel.launcher.config.replica_settings import environ_of_replica, settings_of_replica
from funitel.launcher.config.resolve import ResolvedSettings
from funitel.launcher.config.sockets import free_port, is_free, socket_of
from funitel.launcher.processes.health import shard_answers
from funitel.launcher.processes.restart_policy import RestartPolicy
from funitel.launcher.supervisor.lasting_child import ChildMaker, record_of
from funitel.launcher.supervisor.process import Child, stop_child
from funitel.launcher.supervisor.watchdog import kill_when_unresponsive

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
SETTLE_SECONDS = 1.0  # for the other ranks to log the reason too, once one has ended
BUSY_FACTOR = 10  # times the step timeout, which the router extends for first and long steps
RESTART_GRACE_SECONDS = 2.0  # for shards that have lost a peer: they may hang, and streams wait for the restart


class ReplicaProcesses:
    """The shards of one copy of the model."""

    def __init__(
        self,
        index: int,
        settings: ResolvedSettings,
        environ: Mapping[str, str],
        commands: Commands,
        children: ChildMaker,
    ) -> None:
        """Prepare the replica; `start` starts its processes, which load nothing before `load`.

        Args:
            index: of the replica in the deployment.
            settings: the deployment's.
            environ: the launcher's.
            commands: of the shards.
            children: makes the processes.
        """
        self.name = f"replica {index}" if settings.num_replicas > 1 else "the replica"
        self.shards: list[Child] = []  # in rank order
        self._prefix = f"{self.name} " if settings.num_replicas > 1 else ""
        self._settings = settings_of_replica(settings, index)
        self._environ = environ_of_replica(settings, environ, index)
        self._commands = commands
        self._children = children
        self._folder: Path | None = None
        self._folder_pipes: list[int] = []  # of ranks that were started before the folder was known

    async def start(self) -> None:
        """Start every rank; the processes of an earlier start must have ended.

        Until `load` has told the folder, ranks import what they need and wait for it.
        """
        port = self._settings.master_port
        # Another process may have taken the port since the last start.
        settings = dataclasses.replace(self._settings, master_port=port if is_free(port) else free_port())
        self.shards = []
        with ExitStack() as closing:
            for rank in range(settings.num_shard):
                passed = () if self._folder is not None else (self._open_pipe(closing),)
                argv = self._commands.shard(
                    settings, self._folder, rank, *passed, deployment_file=self._children.deployment_file
                )
                environ = shard_environ(settings, self._environ, rank)
                name = f"{self._prefix}shard rank {rank}"
                self.shards.append(self._children.make(name, self._title(rank), argv, environ, passed))
            await asyncio.gather(*(shard.start() for shard in self.shards))
        self._children.on_change()

    def _title(self, rank: int) -> str:
        return f"{self._prefix}shard {rank}"

    @property
    def records(self) -> list[Mapping[str, Any] | None]:
        """What `adopt` needs."""
        return [record_of(shard) for shard in self.shards]

    def adopt(self, folder: Path, records: Sequence[Mapping[str, Any]]) -> None:
        """Go on with the ranks of an earlier launcher, which serve the model in a folder."""
        self._folder = folder
        self.shards = [self._children.adopt(self._title(rank), record) for rank, record in enumerate(records)]

    def _open_pipe(self, closing: ExitStack) -> int:
        """Make the pipe through which a rank is told the folder; its read end is closed by `closing`."""
        read_end, write_end = os.pipe()
        closing.callback(os.close, read_end)
        self._folder_pipes.append(write_end)
        return read_end

    @property
    def address(self) -> str:
        """Of rank 0, as the router connects."""
        return f"unix://{socket_of(self._settings.shard_uds_path, 0)}"

    @property
    def pids(self) -> tuple[int, ...]:
        """Of its ranks that run."""
        return tuple(shard.pid for shard in self.shards if shard.pid is not None and not shard.has_exited)

    def load(self, folder: Path) -> None:
        """Have every rank load the model in a folder, and those of later starts too."""
        self._folder = folder
        for pipe in self._folder_pipes:
            with suppress(BrokenPipeError):  # the rank has ended, which is noticed elsewhere
                os.write(pipe, os.fsencode(folder) + b"\n")
        self.forget_pipes()

    def forget_pipes(self) -> None:
        """Close the pipes of ranks that wait for the folder."""
        while self._folder_pipes:
            os.close(self._folder_pipes.pop())

    async def answers(self, rank: int) -> bool:
        """Whether a rank answers, and its current call is younger than any timeout of the router."""
        max_busy_seconds = BUSY_FACTOR * self._settings.step_timeout_s
        return await shard_answers(socket_of(self._settings.shard_uds_path, rank), max_busy_seconds)

    async def until_ready(self) -> bool:
        """Return True once every rank answers, False once one has ended."""
        waiting = list(range(len(self.shards)))
        while waiting and not self.has_ended:
            waiting = [rank for rank in waiting if not await self.answers(rank)]
            await asyncio.sleep(POLL_SECONDS if waiting else 0)
        return not self.has_ended

    @property
    def has_ended(self) -> bool:
        """Whether one of its ranks has, and so all of it."""
        return any(shard.has_exited for shard in self.shards)

    async def end(self) -> str:
        """Wait until a rank has ended, on its own or because it hung, and say why; others may still run."""
        timeout = self._settings.step_timeout_s
        watches = [
            asyncio.create_task(kill_when_unresponsive(shard, partial(self.answers, rank), timeout))
            for rank, shard in enumerate(self.shards)
        ]
        try:
            await asyncio.wait([shard.exited for shard in self.shards], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in watches:
                task.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
        return (await find_culprit(self.shards)).exit_reason()

    async def serve(self, max_restarts: int) -> str:
        """Restart the replica whenever it ends, until the maximum in a row; return the reason of the last end.

        The replica must be ready when this is called.
        """
        restarts = RestartPolicy(max_restarts)
        answered: float | None = time.monotonic()  # None: it did not become ready
        while True:
            reason = await self.end()
            ended = time.monotonic()
            delay = restarts.delay_after(0.0 if answered is None else ended - answered)
            if delay is None:
                return reason + (f"; restarted {max_restarts} times in a row" if max_restarts else "")
            count = f"restart {restarts.num_in_a_row} of {max_restarts}"
            logger.error("a replica is lost: %s; %s in %g s", reason, count, delay)
            await self.stop(RESTART_GRACE_SECONDS)
            await asyncio.sleep(delay)
            await self.start()
            answered = time.monotonic() if await self.until_ready() else None
            if answered is not None:
                logger.warning("%s answers again after %.1f s (%s)", self.name, answered - ended, count)

    async def stop(self, grace_seconds: float) -> None:
        """Stop every running rank."""
        await stop_all(self.shards, grace_seconds)

    def kill(self) -> None:
        """Kill every rank."""
        for shard in self.shards:
            shard.kill()


async def find_culprit(shards: Iterable[Child], router: Child | None = None) -> Child:
    """Find the child that failed first: one killed by a signal, else the lowest rank with an error line."""
    shards = list(shards)
    children = [*shards, *([router] if router else [])]
    first = next(child for child in children if child.has_exited)
    await asyncio.wait([child.exited for child in children], timeout=SETTLE_SECONDS)
    dead = [shard for shard in shards if shard.has_exited]
    with_error = [shard for shard in dead if shard.error]
    return first if first.exited.result() < 0 else (with_error or dead or [first])[0]


async def stop_all(children: Iterable[Child], grace_seconds: float) -> None:
    """Stop children, all at once."""
    await asyncio.gather(*(stop_child(child, grace_seconds) for child in children))
