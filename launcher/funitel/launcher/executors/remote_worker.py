"""Executor `worker`: the ranks of a replica run on workers that have joined, whole on one or spread over several."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from funitel.launcher.executors.choose import WORKER, Place, Wanted, choose
from funitel.launcher.executors.interface import ReplicaJob
from funitel.launcher.executors.remote_job import (
    BUSY_FACTOR,
    address_of,
    num_ranks,
    order_to_prepare,
    order_to_start,
)
from funitel.launcher.executors.shard_health import ranks_answer
from funitel.launcher.worker_wire.messages import JobState, Prepared, Stop, Stopped, WireMessage
from funitel.proto.errors import FunitelError, StartupError
from funitel.proto.security.tls import MutualTls

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=WireMessage)
POLL_SECONDS = 0.2
WAITING_SECONDS = 10.0  # between two log lines about workers that are not there
STOP_SECONDS = 10.0  # beyond the grace period, for the answer of the worker


class WorkerPool(Protocol):
    """The workers that have joined."""

    def places(self) -> Sequence[Place]:
        """Every known worker."""

    async def call(self, worker: str, method: str, order: WireMessage, kind: type[T]) -> T:
        """Ask a worker; raises StartupError with its reason, or `WorkerLost`."""

    def follow(self, worker: str, job: str, on_end: Callable[[str], None]) -> None:
        """Have `on_end` called with the reason when a rank of a job has ended, or its worker is lost."""

    def give_up(self, worker: str, job: str) -> None:
        """No longer follow a job: a worker that still has it when it connects again is told to stop it."""

    async def find(self, worker: str, job: str) -> JobState | None:
        """A job that an earlier control plane has started, once its worker has joined; None where it does not."""


class WorkerReplica:
    """The ranks of a replica on one or more workers."""

    def __init__(self, pool: WorkerPool, record: Mapping[str, Any], tls: MutualTls | None) -> None:
        """Follow what was started, or found again; `record` describes it."""
        self.record = record
        self.address: str = record["ranks"][0]["address"]
        self.pids: Sequence[int] = [rank["pid"] for rank in record["ranks"]]
        self._workers: tuple[str, ...] = tuple(dict.fromkeys(rank["worker"] for rank in record["ranks"]))
        self.worker = ",".join(self._workers)
        self.exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._pool = pool
        self._tls = tls
        for worker in self._workers:
            pool.follow(worker, record["job"], self._on_end)

    def _on_end(self, reason: str) -> None:
        if not self.exited.done():
            self.exited.set_result(reason)

    async def answers(self) -> bool:
        """Whether every rank answers its health check."""
        return await ranks_answer(self.record, self._tls)

    async def stop(self, grace_seconds: float) -> None:
        """Stop every rank; a worker out of reach stops them when it connects again."""
        await _stop(self._pool, self._workers, self.record["job"], grace_seconds)
        self._on_end("it was stopped")

    def kill(self) -> None:
        """End every rank at once."""
        self._killing = asyncio.ensure_future(self.stop(0.0))  # kept: a task without a reference may vanish


class WorkerExecutor:
    """Starts replicas on workers.

    Args:
        pool: the workers.
        tls: files by which this end meets shards; None for plain connections.
    """

    name = WORKER

    def __init__(self, pool: WorkerPool, tls: MutualTls | None = None) -> None:
        self._pool = pool
        self._tls = tls
        self._last_ports: dict[tuple[str, int, int, str], int] = {}  # by model, replica, rank and worker
        self._last_jobs: dict[tuple[str, int], ReplicaJob] = {}  # that were started, by model and replica

    async def start(self, job: ReplicaJob) -> WorkerReplica:
        """Start the ranks of a replica; ports stay those of its last start on the same workers, where they are free.

        Another start of the same job waits until a worker has room.

        Raises:
            StartupError: no worker has room at the first start, the model is missing there, or a worker is lost.
        """
        names = await self._placed(job)
        by_worker = {name: [rank for rank, each in enumerate(names) if each == name] for name in dict.fromkeys(names)}
        start_id = f"{job.model}/{job.replica}/{uuid.uuid4().hex[:12]}"
        is_started = False
        try:
            prepared = await self._on_all(by_worker, lambda name: self._prepare(job, start_id, name, by_worker[name]))
            first = prepared[names[0]]
            started = await self._on_all(
                by_worker,
                lambda name: self._pool.call(
                    name, "start", order_to_start(job, start_id, by_worker[name], first), JobState
                ),
            )
            is_started = True
        finally:
            if not is_started:
                await asyncio.shield(_stop(self._pool, by_worker, start_id, 0.0))
        ranks = []
        for name, state in started.items():
            for rank in state.ranks:
                self._last_ports[job.model, job.replica, rank.rank, name] = rank.port
                address = address_of(prepared[name].address, rank.port)
                ranks.append({"worker": name, "rank": rank.rank, "pid": rank.pid, "address": address})
        record = {
            "executor": WORKER,
            "job": start_id,
            "model": job.model,
            "replica": job.replica,
            "max_busy_seconds": BUSY_FACTOR * job.settings.step_timeout_s,
            "ranks": sorted(ranks, key=lambda rank: rank["rank"]),
        }
        self._last_jobs[job.model, job.replica] = job
        return WorkerReplica(self._pool, record, self._tls)

    async def _placed(self, job: ReplicaJob) -> tuple[str, ...]:
        """The worker of each rank; a restart waits for room, and the log says what lacks."""
        began, logged = time.monotonic(), 0.0
        while True:
            device = job.settings.device
            wanted = Wanted(num_ranks=num_ranks(job), rank_bytes=job.rank_bytes, device=device, executor=WORKER)
            places = self._pool.places()
            choice = choose(wanted, places)
            obstacle = _obstacle(job.workers, places) if job.workers else "" if choice.executor else choice.reasons
            if not obstacle:
                return job.workers or choice.workers
            what = f"{job.model} replica {job.replica}"
            if self._last_jobs.get((job.model, job.replica)) is not job:  # it is no restart
                raise StartupError(f"{what} fits on no worker: {obstacle}")
            now = time.monotonic()
            if not logged or now - logged >= WAITING_SECONDS:
                logged = now
                logger.warning("%s waits for a worker since %.0f s: %s", what, now - began, obstacle)
            await asyncio.sleep(POLL_SECONDS)

    async def _prepare(self, job: ReplicaJob, start_id: str, name: str, ranks: Sequence[int]) -> Prepared:
        ports = [self._last_ports.get((job.model, job.replica, rank, name), 0) for rank in ranks]
        return await self._pool.call(name, "prepare", order_to_prepare(job, start_id, ranks, ports), Prepared)

    async def _on_all(self, workers: Iterable[str], ask: Callable[[str], Any]) -> dict[str, Any]:
        """Ask every worker at once; the first error, once all have answered."""
        names = list(workers)
        answers = await asyncio.gather(*(ask(name) for name in names), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return dict(zip(names, answers, strict=True))

    async def adopt(self, record: Mapping[str, Any]) -> WorkerReplica | None:
        """Find what an earlier control plane has started; None, and the rest is stopped, where a rank is gone."""
        ranks = record["ranks"]
        workers = tuple(dict.fromkeys(rank["worker"] for rank in ranks))
        found = await asyncio.gather(*(self._pool.find(worker, record["job"]) for worker in workers))
        states = dict(zip(workers, found, strict=True))
        if not all(_runs(states[rank["worker"]], rank) for rank in ranks):
            await _stop(self._pool, workers, record["job"], 0.0)
            return None
        for rank in ranks:
            port = int(rank["address"].rpartition(":")[2])
            self._last_ports[record["model"], record["replica"], rank["rank"], rank["worker"]] = port
        return WorkerReplica(self._pool, record, self._tls)


def _obstacle(workers: Iterable[str], places: Sequence[Place]) -> str:
    """Why workers that were asked for can start nothing; empty where they can."""
    known = {place.name: place.obstacle for place in places}
    found = {name: known.get(name, "it has not joined") for name in workers}
    return "; ".join(f"{name}: {reason}" for name, reason in found.items() if reason)


def _runs(state: JobState | None, rank: Mapping[str, Any]) -> bool:
    """Whether a worker still has the process of a rank."""
    pids = {} if state is None else {each.rank: each.pid for each in state.ranks if each.ended is None}
    return bool(pids.get(rank["rank"]) == rank["pid"])


async def _stop(pool: WorkerPool, workers: Iterable[str], job: str, grace_seconds: float) -> None:
    """Stop a job on every worker that has it; those out of reach stop it later."""

    async def stop_on(worker: str) -> None:
        pool.give_up(worker, job)
        try:
            async with asyncio.timeout(grace_seconds + STOP_SECONDS):
                await pool.call(worker, "stop", Stop(job=job, grace_seconds=grace_seconds), Stopped)
        except (FunitelError, TimeoutError):
            return

    await asyncio.gather(*map(partial(stop_on), workers))
