"""The executor of Ray over an imitated cluster, whose actors run here: what is asked, and what each loss becomes."""

import asyncio
import logging
import sys
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from funitel.launcher.executors import ray_actor
from funitel.launcher.executors.ray import RayExecutor
from funitel.launcher.executors.ray_actor import RankActor
from funitel.launcher.executors.ray_cluster import RayCluster
from funitel.launcher.machine.ranks import RankSite
from funitel.proto.errors import MissingPackage, StartupError
from funitel_testing.machines.plane import FAKE_SHARD, Plane, eventually, is_alive

PROGRAM = (sys.executable, str(FAKE_SHARD))


class ActorDied(Exception):
    """As Ray tells it, on several lines."""


class FakeCluster:
    """A cluster of one node; `room` is whether a placement group gets any, `dead` are actors whose node is gone."""

    def __init__(self) -> None:
        self.room = True
        self.groups: dict[str, Any] = {}
        self.actors: dict[str, RankActor] = {}
        self.dead: dict[RankActor, list[Future[Any]]] = {}
        self.arguments: list[Any] = []
        self._pending: dict[RankActor, list[Future[Any]]] = {}

    async def run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return work(*arguments)

    def reserve(self, name: str, bundles: Any) -> str:
        assert name not in self.groups
        self.groups[name] = bundles
        return name

    def is_reserved(self, group: str, seconds: float) -> bool:
        return self.room

    def lack(self, bundles: Any) -> str:
        return "2 bundles of 1 CPU want 2 CPU (1 free) on 1 nodes"

    def release(self, name: str) -> None:
        self.groups.pop(name, None)

    def place(self, name: str, group: str, index: int, bundle: Any, arguments: Any) -> RankActor:
        assert name not in self.actors
        self.arguments.append(arguments)
        self.actors[name] = RankActor("127.0.0.1", *arguments[1:])
        return self.actors[name]

    def actor(self, name: str) -> RankActor | None:
        return self.actors.get(name)

    def ask(self, actor: RankActor, method: str, *arguments: Any) -> "Future[Any]":
        if actor in self.dead:
            future: Future[Any] = Future()
            future.set_exception(ActorDied("The actor died because its node has died.\nNode Id: 1"))
            return future
        future = asyncio.run_coroutine_threadsafe(getattr(actor, method)(*arguments), asyncio.get_running_loop())
        self._pending.setdefault(actor, []).append(future)
        return future

    def kill(self, actor: RankActor) -> None:
        for name in [name for name, each in self.actors.items() if each is actor]:
            del self.actors[name]
        if actor._job is not None:
            actor._job.kill()

    def lose(self, actor: RankActor) -> None:
        """Its node is gone."""
        lost = self._pending.pop(actor, [])
        self.dead[actor] = lost
        self.kill(actor)
        for future in lost:
            if not future.done():
                future.set_exception(ActorDied("The actor died because its node has died.\nNode Id: 1"))


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def executor(cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RayExecutor:
    monkeypatch.setenv("DIARY", str(tmp_path))
    monkeypatch.setattr(ray_actor, "RankSite", partial(RankSite, program=PROGRAM))
    monkeypatch.setattr("funitel.launcher.executors.ray.POLL_SECONDS", 0.05)
    executor = RayExecutor("10.0.0.1:6379")
    executor._cluster = cluster  # type: ignore[assignment]
    return executor


@pytest.fixture
def plane(tmp_path: Path) -> Plane:
    """For its jobs."""
    return Plane(tmp_path)


async def test_each_rank_has_a_bundle_and_a_named_actor(
    executor: RayExecutor, cluster: FakeCluster, plane: Plane
) -> None:
    replica = await executor.start(plane.job(2, settings={"num_threads": 3}))
    assert cluster.groups == {"funitel-tiny-0": [{"CPU": 3}] * 2}
    assert list(cluster.actors) == ["funitel-tiny-0-0", "funitel-tiny-0-1"]
    assert cluster.arguments == [("", 3, None, None)] * 2
    assert replica.worker == "127.0.0.1"
    assert len(set(replica.pids)) == 2
    for _ in range(300):
        if await replica.answers():
            break
        await asyncio.sleep(0.1)
    assert await replica.answers()
    await replica.stop(5.0)
    assert (cluster.groups, cluster.actors) == ({}, {})
    assert not any(map(is_alive, replica.pids))
    again = await executor.start(plane.job(2, settings={"num_threads": 3}))
    assert again.address == replica.address
    await again.stop(0.0)


async def test_a_bundle_has_a_gpu_and_memory_where_they_are_needed(
    executor: RayExecutor, cluster: FakeCluster, plane: Plane
) -> None:
    replica = await executor.start(plane.job(rank_bytes=5, settings={"device": "cuda"}))
    assert cluster.groups == {"funitel-tiny-0": [{"CPU": 1, "GPU": 1, "memory": 5}]}
    await replica.stop(0.0)


async def test_the_end_of_a_shard_is_told_with_its_last_error(
    executor: RayExecutor, plane: Plane, tmp_path: Path
) -> None:
    replica = await executor.start(plane.job(2))
    (tmp_path / "die-1").touch()
    reason = await asyncio.wait_for(replica.exited, 30)
    assert reason == "tiny replica 0 shard rank 1 exited with code 7: last error: told to"
    await replica.stop(1.0)


async def test_a_node_that_dies_is_told_in_one_line_and_the_next_start_leaves_nothing_of_the_last(
    executor: RayExecutor, cluster: FakeCluster, plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    replica = await executor.start(plane.job(2))
    cluster.lose(cluster.actors["funitel-tiny-0-1"])
    reason = await asyncio.wait_for(replica.exited, 10)
    assert reason == ("rank 1 is lost with its actor on Ray node 127.0.0.1: The actor died because its node has died.")
    await replica.stop(0.0)
    cluster.room = False
    starting = asyncio.create_task(executor.start(plane.job(2)))
    with caplog.at_level(logging.WARNING):
        await eventually(lambda: "waits for room" in caplog.text, "the line of what lacks")
    assert "tiny replica 0 waits for room on Ray since 0 s: 2 bundles of 1 CPU want 2 CPU (1 free)" in caplog.text
    await asyncio.sleep(0.3)
    assert caplog.text.count("waits for room") == 1
    cluster.room = True
    again = await starting
    assert len(cluster.actors) == 2
    await again.stop(0.0)


async def test_a_start_that_is_cancelled_gives_its_room_back(
    executor: RayExecutor, cluster: FakeCluster, plane: Plane
) -> None:
    cluster.room = False
    starting = asyncio.create_task(executor.start(plane.job()))
    await eventually(lambda: cluster.groups, "the placement group")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert cluster.groups == {}


async def test_what_runs_is_adopted_and_what_does_not_is_ended(
    executor: RayExecutor, cluster: FakeCluster, plane: Plane, tmp_path: Path
) -> None:
    replica = await executor.start(plane.job(2))
    found = await executor.adopt(replica.record)
    assert found is not None
    assert (found.address, found.pids) == (replica.address, replica.pids)
    other = {**replica.record, "ranks": [{**rank, "pid": 1} for rank in replica.record["ranks"]]}
    assert await executor.adopt(other) is None
    assert cluster.actors == {}
    await eventually(lambda: not any(map(is_alive, replica.pids)), "the end of the shards")
    assert await executor.adopt(replica.record) is None


async def test_a_model_that_is_not_on_a_node_is_one_line(
    executor: RayExecutor, cluster: FakeCluster, plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, here = plane.job(), Path.exists
    plane.model.rmdir()
    is_asked = iter((True, True))
    monkeypatch.setattr(Path, "exists", lambda path: next(is_asked, False) if path == plane.model else here(path))
    with pytest.raises(StartupError, match=r"^rank 0 on Ray: the model folder .* is missing here"):
        await executor.start(job)
    assert (cluster.groups, cluster.actors) == ({}, {})


async def test_a_node_with_another_release_is_one_line(
    executor: RayExecutor, plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("funitel.launcher.machine.ranks.version", lambda: "9.9.9")
    with pytest.raises(StartupError, match=r"^Ray node 127.0.0.1 has funitel 9.9.9, the control plane "):
        await executor.start(plane.job())


async def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("funitel.proto.extras.find_spec", lambda name: None)
    cluster = RayCluster("auto")
    with pytest.raises(
        MissingPackage, match=r"executor ray needs packages .* such as ray: pip install 'funitel\[ray\]'"
    ):
        await cluster.run(lambda: None)
    await cluster.close()
