"""Executor `ray`: Ray places the ranks of a replica on the nodes of its cluster, and tells when one is gone.

A placement group has a bundle for each rank, and a named detached actor in each bundle starts the shard as a child
process (`ray_actor`). The router and the ranks reach each other as on any machines; Ray carries no work.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from funitel.launcher.executors.choose import RAY, Place
from funitel.launcher.executors.interface import ReplicaJob
from funitel.launcher.executors.ray_cluster import RayCluster
from funitel.launcher.executors.remote_job import (
    BUSY_FACTOR,
    address_of,
    check_release,
    num_ranks,
    order_to_prepare,
    order_to_start,
)
from funitel.launcher.executors.shard_health import ranks_answer
from funitel.launcher.worker_wire.messages import JobState, Prepared, WireMessage
from funitel.proto.errors import StartupError, translating
from funitel.proto.security.tls import MutualTls

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
WAITING_SECONDS = 10.0  # between two log lines about room that is not there
STOP_SECONDS = 10.0  # beyond the grace period, for the answer of an actor
ADOPT_SECONDS = 10.0
NAME_TRIES = 50
T = TypeVar("T", bound=WireMessage)


class RayReplica:
    """The ranks of a replica in their actors."""

    def __init__(
        self, cluster: RayCluster, record: Mapping[str, Any], actors: Sequence[Any], tls: MutualTls | None
    ) -> None:
        """Watch what was started, or found again; `record` describes it."""
        self.record = record
        self.address: str = record["ranks"][0]["address"]
        self.pids: Sequence[int] = [rank["pid"] for rank in record["ranks"]]
        self.worker = ",".join(dict.fromkeys(rank["worker"] for rank in record["ranks"]))
        self.exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._cluster = cluster
        self._actors = actors
        self._tls = tls
        self._watching = [asyncio.ensure_future(self._watch(rank)) for rank in range(len(actors))]

    async def _watch(self, rank: int) -> None:
        try:
            reason = str(await _asked(self._cluster, self._actors[rank], "ended"))
        except StartupError as error:
            node = self.record["ranks"][rank]["worker"]
            reason = f"rank {rank} is lost with its actor on Ray node {node}: {error.message}"
        if not self.exited.done():
            self.exited.set_result(reason)

    async def answers(self) -> bool:
        """Whether every rank answers its health check."""
        return await ranks_answer(self.record, self._tls)

    async def stop(self, grace_seconds: float) -> None:
        """Stop every rank, and give its room back."""
        for task in self._watching:
            task.cancel()
        await _end(self._cluster, self.record["group"], self._actors, grace_seconds)
        if not self.exited.done():
            self.exited.set_result("it was stopped")

    def kill(self) -> None:
        """End every rank at once."""
        self._killing = asyncio.ensure_future(self.stop(0.0))  # kept: a task without a reference may vanish


class RayExecutor:
    """Starts replicas on a Ray cluster.

    Args:
        address: of the cluster: HOST:PORT of its head, or `auto`.
        tls: files by which this end meets shards, which are files of the same names on every node; None for plain
            connections.
        cache_dir: for models, on every node.
    """

    name = RAY

    def __init__(self, address: str = "auto", tls: MutualTls | None = None, cache_dir: str | None = None) -> None:
        self._cluster = RayCluster(address)
        self._tls = tls
        self._cache_dir = cache_dir
        self._last_ports: dict[tuple[str, int, int], int] = {}

    async def place(self) -> Place:
        """The cluster, for `choose`; raises as `start` where it is not there."""
        return await self._cluster.run(self._cluster.place_of_cluster)

    async def close(self) -> None:
        """Leave the cluster; replicas run on."""
        await self._cluster.close()

    async def start(self, job: ReplicaJob) -> RayReplica:
        """Start the ranks of a replica, once the cluster has room for all of them; until then the log says what lacks.

        Raises:
            MissingPackage: Ray is not installed.
            StartupError: there is no cluster, or a node cannot start a rank.
        """
        group, actors = f"funitel-{job.model}-{job.replica}", []
        found: RayReplica | None = None
        try:
            await self._cluster.run(self._cluster.release, group)  # what an earlier start has left
            bundles = [_bundle(job)] * num_ranks(job)
            reserved = await self._reserved(group, bundles, job)
            for rank in range(num_ranks(job)):
                name = f"{group}-{rank}"
                if (left := await self._cluster.run(self._cluster.actor, name)) is not None:
                    await self._cluster.run(self._cluster.kill, left)
                    await self._until_free(name)
                arguments = ("", int(bundles[rank]["CPU"]), _files(self._tls), self._cache_dir)
                actor = await self._cluster.run(self._cluster.place, name, reserved, rank, bundles[rank], arguments)
                actors.append(actor)
            found = await self._started(job, group, actors)
            return found
        finally:
            if found is None:
                await asyncio.shield(_end(self._cluster, group, actors, 0.0))

    async def _reserved(self, group: str, bundles: Sequence[Mapping[str, float]], job: ReplicaJob) -> Any:
        """The placement group, once it has its room."""
        found = await self._cluster.run(self._cluster.reserve, group, bundles)
        began, logged = time.monotonic(), 0.0
        while not await self._cluster.run(self._cluster.is_reserved, found, POLL_SECONDS):
            now = time.monotonic()
            if now - logged >= WAITING_SECONDS:
                logged = now
                lack = await self._cluster.run(self._cluster.lack, bundles)
                what = f"{job.model} replica {job.replica}"
                logger.warning("%s waits for room on Ray since %.0f s: %s", what, now - began, lack)
            await asyncio.sleep(POLL_SECONDS)
        return found

    async def _until_free(self, name: str) -> None:
        """Wait until the name of an actor that was killed can be had again."""
        for _ in range(NAME_TRIES):
            if await self._cluster.run(self._cluster.actor, name) is None:
                return
            await asyncio.sleep(STOP_SECONDS / NAME_TRIES)
        raise StartupError(f"the Ray actor {name} of an earlier start does not end")

    async def _started(self, job: ReplicaJob, group: str, actors: Sequence[Any]) -> RayReplica:
        ranks = range(len(actors))
        ports = [self._last_ports.get((job.model, job.replica, rank), 0) for rank in ranks]
        orders = [order_to_prepare(job, group, [rank], [ports[rank]]) for rank in ranks]
        prepared = await self._on_all(actors, "prepare", orders, Prepared)
        for found in prepared:
            check_release(f"Ray node {found.address}", found)
        starts = [order_to_start(job, group, [rank], prepared[0]) for rank in ranks]
        states = await self._on_all(actors, "start", starts, JobState)
        told = []
        for rank, (found, state) in enumerate(zip(prepared, states, strict=True)):
            shard = state.ranks[0]
            self._last_ports[job.model, job.replica, rank] = shard.port
            address = address_of(found.address, shard.port)
            told.append({"worker": found.address, "rank": rank, "pid": shard.pid, "address": address})
        record = {
            "executor": RAY,
            "group": group,
            "model": job.model,
            "replica": job.replica,
            "max_busy_seconds": BUSY_FACTOR * job.settings.step_timeout_s,
            "ranks": told,
        }
        return RayReplica(self._cluster, record, actors, self._tls)

    async def _on_all(
        self, actors: Sequence[Any], method: str, orders: Sequence[WireMessage], kind: type[T]
    ) -> list[T]:
        """Ask every actor at once; raises the first error."""
        asked = [
            _asked(self._cluster, actor, method, order.model_dump(mode="json"))
            for actor, order in zip(actors, orders, strict=True)
        ]
        found = []
        for rank, answer in enumerate(await asyncio.gather(*asked)):
            if "error" in answer:
                raise StartupError(f"rank {rank} on Ray: {answer['error']}")
            found.append(kind.model_validate(answer["body"]))
        return found

    async def adopt(self, record: Mapping[str, Any]) -> RayReplica | None:
        """Find what an earlier control plane has started; None, and the rest is ended, where a rank is gone."""
        ranks, actors = record["ranks"], []
        for rank in ranks:
            actor = await self._cluster.run(self._cluster.actor, f"{record['group']}-{rank['rank']}")
            if actor is not None:
                actors.append(actor)
        if len(actors) < len(ranks) or not await self._all_run(ranks, actors):
            await _end(self._cluster, record["group"], actors, 0.0)
            return None
        for rank in ranks:
            port = int(rank["address"].rpartition(":")[2])
            self._last_ports[record["model"], record["replica"], rank["rank"]] = port
        return RayReplica(self._cluster, record, actors, self._tls)

    async def _all_run(self, ranks: Sequence[Mapping[str, Any]], actors: Sequence[Any]) -> bool:
        """Whether every actor still has the process of its rank."""
        try:
            async with asyncio.timeout(ADOPT_SECONDS):
                answers = await asyncio.gather(*(_asked(self._cluster, actor, "state") for actor in actors))
        except (StartupError, TimeoutError):
            return False
        states = [JobState.model_validate(answer["body"]) for answer in answers if answer["body"] is not None]
        pids = [rank.pid for state in states for rank in state.ranks if rank.ended is None]
        return pids == [rank["pid"] for rank in ranks]


def _bundle(job: ReplicaJob) -> dict[str, float]:
    """What a rank takes of a node: --num-threads cores or one, and a GPU where it needs one."""
    bundle: dict[str, float] = {"CPU": job.settings.num_threads or 1}
    if job.settings.device == "cuda":
        bundle["GPU"] = 1
    if job.rank_bytes:
        bundle["memory"] = job.rank_bytes
    return bundle


def _files(tls: MutualTls | None) -> tuple[str, str, str] | None:
    return None if tls is None else (tls.pair.cert, tls.pair.key, tls.ca)


async def _asked(cluster: RayCluster, actor: Any, method: str, *arguments: Any) -> Any:
    """The answer of an actor; raises StartupError where it, or its node, is gone."""
    future = await cluster.run(cluster.ask, actor, method, *arguments)
    with translating(lambda error: StartupError(_reason(error))):
        return await asyncio.wrap_future(future)


def _reason(error: Exception) -> str:
    """The line of Ray's error that tells most: the last one of what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


async def _end(cluster: RayCluster, group: str, actors: Sequence[Any], grace_seconds: float) -> None:
    """Stop shards, end their actors and give the room of a replica back, as far as they are in reach."""

    async def end_one(actor: Any) -> None:
        try:
            async with asyncio.timeout(grace_seconds + STOP_SECONDS):
                await _asked(cluster, actor, "stop", grace_seconds)
        except (StartupError, TimeoutError):
            pass
        await cluster.run(cluster.kill, actor)

    try:
        await asyncio.gather(*(end_one(actor) for actor in actors))
        await cluster.run(cluster.release, group)
    except StartupError as error:
        logger.warning("%s is not removed from Ray: %s", group, error.message)
