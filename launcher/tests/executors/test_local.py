"""The executor of this machine, over imitated shards."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from funitel.launcher.config.child_commands import Commands
from funitel.launcher.config.resolve import fit_to_model, resolve
from funitel.launcher.executors.interface import ReplicaJob, RunningReplica
from funitel.launcher.executors.local import LocalExecutor, LocalReplica
from funitel.launcher.settings import LauncherSettings
from funitel.proto.errors import FunitelError
from funitel_testing import fake_model_server
from funitel_testing.lifecycles import eventually, is_alive


@pytest.fixture
def job(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaJob]:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    settings = LauncherSettings(device="cpu", model_id=str(folder), num_shard=2)
    resolved = resolve(settings, 2, str(tmp_path_factory.mktemp("r") / "s"))
    yield ReplicaJob(
        model="tiny",
        replica=0,
        folder=folder,
        settings=fit_to_model(resolved, folder),
        environ={**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))},
        commands=Commands(model_server=(sys.executable, str(fake_model_server.__file__))),
        log=tmp_path / "logs" / "tiny.log",
        outlives=True,
    )
    starts = folder / "starts"
    for pid in map(int, starts.read_text().split() if starts.exists() else ()):  # of a test that failed
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


def words_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


async def answering(replica: RunningReplica) -> None:
    for _ in range(600):
        if await replica.answers():
            return
        await asyncio.sleep(0.05)
    pytest.fail("it never answered")


async def test_ranks_outlive_their_parent_and_are_adopted(job: ReplicaJob) -> None:
    executor = LocalExecutor()
    replica = await executor.start(job)
    assert replica.address == f"unix://{job.settings.shard_uds_path}-0"
    await answering(replica)
    assert "--exit-with-parent" not in words_of(replica.pids[0])
    assert isinstance(replica, LocalReplica)
    replica.forget()
    adopted = await executor.adopt(replica.record)
    assert adopted is not None
    assert adopted.pids == replica.pids
    assert await adopted.answers()
    assert not adopted.exited.done()
    await adopted.stop(10)
    assert not any(map(is_alive, replica.pids))
    assert not list(Path(job.settings.shard_uds_path).parent.iterdir()), "a socket is left"
    assert await executor.adopt(replica.record) is None


async def test_the_end_of_one_rank_is_that_of_the_replica(job: ReplicaJob) -> None:
    replica = await LocalExecutor().start(job)
    await answering(replica)
    os.kill(replica.pids[1], signal.SIGKILL)
    assert "shard rank 1 exited with code -9 (killed by SIGKILL)" in await replica.exited
    await replica.stop(10)
    assert not any(map(is_alive, replica.pids))


async def test_a_replica_of_which_a_rank_has_died_is_not_adopted(job: ReplicaJob) -> None:
    executor = LocalExecutor()
    replica = await executor.start(job)
    await answering(replica)
    assert isinstance(replica, LocalReplica)
    replica.forget()
    os.kill(replica.pids[0], signal.SIGKILL)
    await eventually(lambda: not is_alive(replica.pids[0]), "its end")
    assert await executor.adopt(replica.record) is None
    assert not is_alive(replica.pids[1]), "half a replica is of no use"


async def test_the_last_error_line_is_the_reason(job: ReplicaJob) -> None:
    (job.folder / "behaviour.json").write_text('{"load_error": "weights are short"}')
    replica = await LocalExecutor().start(job)
    assert (await replica.exited).endswith("exited with code 1: last error: weights are short")
    await replica.stop(1)


async def test_a_program_that_is_missing_leaves_no_rank(job: ReplicaJob) -> None:
    with pytest.raises(FunitelError, match="cannot be started"):
        await LocalExecutor().start(replace(job, commands=Commands(model_server=("/nowhere/program",))))
