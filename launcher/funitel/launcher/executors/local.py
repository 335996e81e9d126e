"""Run the shards of a replica as processes of this machine, which may outlive the process that starts them."""

import asyncio
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from funitel.launcher.config.child_commands import shard_environ
from funitel.launcher.config.sockets import free_port, is_free, remove_sockets, socket_of
from funitel.launcher.executors.interface import ReplicaJob, RunningReplica
from funitel.launcher.processes.file_tail import FileTail
from funitel.launcher.processes.health import shard_answers
from funitel.launcher.processes.relay import relay
from funitel.launcher.processes.watched import WatchedProcess, how_it_ended
from funitel.proto.errors import FunitelError

logger = logging.getLogger(__name__)

LOCAL = "local"
BUSY_FACTOR = 10  # times the step timeout, which the router extends for first and long steps
SETTLE_SECONDS = 1.0  # for the other ranks to log the reason too, once one has ended


class LocalExecutor:
    """Replicas on this machine."""

    async def start(self, job: ReplicaJob) -> RunningReplica:
        """Start the ranks of a replica at the socket path of its settings; the earlier ones must have ended.

        Raises:
            FunitelError: one cannot be started; the others are ended.
        """
        port = job.settings.master_port
        # Another process may have taken the port since the last start.
        settings = dataclasses.replace(job.settings, master_port=port if is_free(port) else free_port())
        remove_sockets(settings.shard_uds_path, settings.num_shard, 1)
        place = _Place(
            title=f"{job.model} replica {job.replica}",
            uds_path=settings.shard_uds_path,
            num_shard=settings.num_shard,
            max_busy_seconds=BUSY_FACTOR * settings.step_timeout_s,
            log=str(job.log),
            json_output=settings.json_output,
        )
        ranks: list[_Rank] = []
        try:
            for rank in range(settings.num_shard):
                argv = job.commands.shard(settings, job.folder, rank, outlives=job.outlives)
                tail = place.tail(rank)
                environ = shard_environ(settings, job.environ, rank)
                process = WatchedProcess.started_as(f"shard rank {rank}", argv, environ, place.log_of(rank))
                ranks.append(_Rank(process, tail))
        except FunitelError:
            for each in ranks:
                each.process.kill()
            raise
        return LocalReplica(place, ranks)

    async def adopt(self, record: Mapping[str, Any]) -> RunningReplica | None:
        """Find the ranks of a replica; where one has ended, the others are ended and the replica is gone."""
        place = _Place(**{field.name: record[field.name] for field in dataclasses.fields(_Place)})
        found = [WatchedProcess.found(f"shard rank {i}", identity) for i, identity in enumerate(record["ranks"])]
        alive = [process for process in found if process is not None]
        if len(alive) < len(found):
            for process in alive:
                process.kill()
            if alive:
                await asyncio.wait([process.exited for process in alive])
            remove_sockets(place.uds_path, place.num_shard, 1)
            return None
        return LocalReplica(place, [_Rank(process, place.tail(i)) for i, process in enumerate(alive)])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where the ranks of a replica are reached and where they log; all of it is JSON."""

    title: str
    uds_path: str
    num_shard: int
    max_busy_seconds: float
    log: str
    json_output: bool

    def log_of(self, rank: int) -> Path:
        """The file of one rank: that of the job for rank 0."""
        path = Path(self.log)
        return path if rank == 0 else path.with_name(f"{path.stem}-{rank}{path.suffix}")

    def tail(self, rank: int) -> FileTail:
        """The output of a rank, forwarded to the log of this process."""
        return FileTail(self.log_of(rank), relay(f"{self.title} shard {rank}", json_output=self.json_output))


@dataclasses.dataclass(frozen=True, slots=True)
class _Rank:
    process: WatchedProcess
    tail: FileTail


class LocalReplica:
    """The ranks of a replica on this machine; see `RunningReplica`."""

    worker = LOCAL

    def __init__(self, place: _Place, ranks: Sequence[_Rank]) -> None:
        """Watch ranks that run; their output is forwarded until they end."""
        self.address = f"unix://{socket_of(place.uds_path, 0)}"
        self.pids: Sequence[int] = [rank.process.pid for rank in ranks]
        self.record: Mapping[str, Any] = dataclasses.asdict(place) | {
            "ranks": [dict(rank.process.identity) for rank in ranks]
        }
        self._place = place
        self._ranks = ranks
        self.exited: asyncio.Future[str] = asyncio.ensure_future(self._end())
        for rank in ranks:
            rank.tail.start()

    async def answers(self) -> bool:
        """Whether every rank answers, and its current call is younger than any timeout of the router."""
        paths = [socket_of(self._place.uds_path, rank) for rank in range(self._place.num_shard)]
        return all(await asyncio.gather(*(shard_answers(path, self._place.max_busy_seconds) for path in paths)))

    async def stop(self, grace_seconds: float) -> None:
        """Stop every rank that runs, and remove the sockets."""
        stopped = await asyncio.gather(*(rank.process.stop(grace_seconds) for rank in self._ranks))
        for rank, was_enough in zip(self._ranks, stopped, strict=True):
            if not was_enough:
                name = f"{self._place.title} {rank.process.name}"
                logger.warning("%s did not stop within %g s and was killed", name, grace_seconds)
            rank.tail.stop()
        await asyncio.wait({self.exited})
        remove_sockets(self._place.uds_path, self._place.num_shard, 1)

    def kill(self) -> None:
        """End every rank at once."""
        for rank in self._ranks:
            rank.process.kill()

    def forget(self) -> None:
        """Watch the replica no more, and let it run."""
        self.exited.cancel()
        for rank in self._ranks:
            rank.process.forget()
            rank.tail.stop()

    async def _end(self) -> str:
        """Wait for the end of a rank, and describe it: one killed by a signal, else the lowest with an error line."""
        exits = [rank.process.exited for rank in self._ranks]
        await asyncio.wait(exits, return_when=asyncio.FIRST_COMPLETED)
        first = next(rank for rank in self._ranks if rank.process.has_exited)
        await asyncio.wait(exits, timeout=SETTLE_SECONDS)
        dead = [rank for rank in self._ranks if rank.process.has_exited]
        for rank in dead:
            rank.tail.stop()
        code = first.process.exited.result()
        with_error = [rank for rank in dead if rank.tail.error]
        culprit = first if code is not None and code < 0 else (with_error or [first])[0]
        return _reason(culprit)


def _reason(rank: _Rank) -> str:
    """How a rank ended, in one line, with its last error or line."""
    how, tail = how_it_ended(rank.process.name, rank.process.exited.result()), rank.tail
    if tail.error:
        return f"{how}: last error: {tail.error}"
    return f"{how}: last line: {tail.last_line}" if tail.last_line else how
