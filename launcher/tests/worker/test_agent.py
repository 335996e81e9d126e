"""Agents and a control plane over loopback: what is started where, and what is left when one of them goes."""

import asyncio
import logging
import os
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from funitel.proto.errors import StartupError
from funitel_testing.machines.plane import Plane, eventually, is_alive


async def test_a_worker_tells_what_it_offers(plane: Plane) -> None:
    plane.agent("--memory", "0.25", CUDA_VISIBLE_DEVICES="4,5")
    await plane.joined("w1")
    (worker,) = plane.workers.list()
    assert (worker["state"], worker["address"], worker["replicas"]) == ("connected", "127.0.0.1", [])
    assert worker["memory_bytes"] == 2**28
    assert 0 < worker["free_bytes"] <= 2**28
    assert (worker["gpus"], worker["free_gpus"]) == (["4", "5"], 2)
    assert worker["cores"] >= 1
    assert plane.changes == 1


async def test_a_replica_runs_on_a_worker_until_it_is_stopped(plane: Plane) -> None:
    agent = plane.agent()
    await plane.joined("w1")
    replica = await plane.executor.start(plane.job(num_shard=2, settings={"dtype": "float32"}))
    assert replica.worker == "w1"
    assert replica.address.startswith("tcp://127.0.0.1:")
    await eventually(lambda: len(agent.events("ready")) == 2, "both ranks")
    assert await replica.answers()
    starts = {start["rank"]: start for start in agent.events("start")}
    assert sorted(replica.pids) == sorted(start["pid"] for start in starts.values())
    first, second = starts["0"], starts["1"]
    line = " ".join(first["argv"])
    assert line.startswith(f"serve {plane.model} ")
    for words in (
        "--dtype float32",
        "--world-size 2",
        "--sharded",
        f"--listen {replica.address[6:]}",
        "--local-rank 0",
    ):
        assert words in line
    assert "--uds-path" not in line
    assert f"--exit-with-parent {agent.process.pid}" in line
    assert "--master-addr 127.0.0.1" in line
    ports = {start["environ"]["MASTER_PORT"] for start in (first, second)}
    assert len(ports) == 1
    assert "GLOO_SOCKET_IFNAME" not in first["environ"], "the ranks are on one machine"
    (shown,) = plane.workers.list()[0]["replicas"]
    assert [rank["pid"] for rank in shown["ranks"]] == list(replica.pids)
    await replica.stop(5.0)
    assert replica.exited.done()
    assert len(agent.events("sigterm")) == 2
    assert plane.workers.list()[0]["replicas"] == []
    assert not any(map(is_alive, replica.pids))


async def test_ranks_are_spread_where_none_holds_them_all(plane: Plane) -> None:
    agents = [plane.agent("--memory", "0.5", name=name) for name in ("w1", "w2")]
    await plane.joined("w1", "w2")
    replica = await plane.executor.start(plane.job(num_shard=2, rank_bytes=2**28 + 1))
    assert replica.worker == "w1,w2"
    await eventually(lambda: all(agent.events("ready") for agent in agents), "a rank on each")
    assert await replica.answers()
    starts = [agent.events("start")[0] for agent in agents]
    assert [start["rank"] for start in starts] == ["0", "1"]
    assert ["--local-rank 0" in " ".join(start["argv"]) for start in starts] == [True, True]
    assert [start["environ"]["GLOO_SOCKET_IFNAME"] for start in starts] == ["lo", "lo"]
    agents[1].let_die(1)
    reason = await asyncio.wait_for(replica.exited, 10)
    assert reason == "worker w2: tiny replica 0 shard rank 1 exited with code 7: last error: told to"
    await replica.stop(1.0)
    assert not any(map(is_alive, replica.pids))
    with pytest.raises(StartupError, match=r"tiny replica 0 fits on no worker: w1: 2 ranks need .*; w2: 2 ranks need"):
        await plane.executor.start(plane.job(num_shard=2, rank_bytes=2**29 + 1))


async def test_memory_and_gpus_that_were_promised_are_not_promised_again(plane: Plane) -> None:
    agent = plane.agent("--memory", "0.5", CUDA_VISIBLE_DEVICES="7,8")
    await plane.joined("w1")
    job = plane.job(rank_bytes=2**28, settings={"device": "cuda"})
    replica = await plane.executor.start(job)
    await eventually(lambda: agent.events("ready"), "the shard")
    assert agent.events("start")[0]["environ"]["CUDA_VISIBLE_DEVICES"] == "7"
    assert "--most-threads" not in agent.events("start")[0]["argv"]
    await eventually(lambda: plane.workers.list()[0]["free_gpus"] == 1, "the GPU to be taken")
    assert plane.workers.list()[0]["free_bytes"] <= 2**28
    with pytest.raises(StartupError, match=r"^worker w1: tiny needs 2 GPUs, 1 of 2 are free$"):
        await plane.executor.start(plane.job(num_shard=2, settings={"device": "cuda"}, workers=("w1", "w1")))
    with pytest.raises(StartupError, match=r"^worker w1: 2 ranks of tiny need 0.5 GiB, 0.2 GiB are free of the 0.5"):
        await plane.executor.start(plane.job(num_shard=2, rank_bytes=2**28, workers=("w1", "w1")))
    await replica.stop(1.0)
    await eventually(lambda: plane.workers.list()[0]["free_gpus"] == 2, "the GPU to be free")


async def test_the_address_stays_where_it_can(plane: Plane) -> None:
    agent = plane.agent()
    await plane.joined("w1")
    first = await plane.executor.start(plane.job())
    await eventually(lambda: agent.events("ready"), "the shard")
    agent.let_die(0)
    await first.exited
    await first.stop(1.0)
    again = await plane.executor.start(plane.job())
    assert again.address == first.address
    await again.stop(1.0)
    with socket.create_server(("127.0.0.1", int(first.address.rpartition(":")[2]))):
        elsewhere = await plane.executor.start(plane.job())
        assert elsewhere.address != first.address
        await elsewhere.stop(1.0)


async def test_a_catalogue_name_is_fetched_by_the_worker_itself(plane: Plane) -> None:
    cache = plane.folder / "cache"
    agent = plane.agent("--cache-dir", str(cache), fake={"folder": "/its/own/folder"})
    await plane.joined("w1")
    settings = {"model_id": "smollm2-135m-instruct", "revision": "v1"}
    replica = await plane.executor.start(plane.job(settings=settings))
    (download,) = agent.events("download")
    assert download["argv"][:6] == [
        "download-weights", "smollm2-135m-instruct", "--revision", "v1", "--cache-dir", str(cache),
    ]  # fmt: skip
    await eventually(lambda: agent.events("start"), "the shard")
    assert agent.events("start")[0]["argv"][1] == "/its/own/folder"
    await replica.stop(1.0)


async def test_a_model_that_cannot_be_fetched_is_one_line(plane: Plane) -> None:
    plane.agent(fake={"fails_download": "no such repository: a/b"})
    await plane.joined("w1")
    with pytest.raises(StartupError, match=r"^worker w1: a/b cannot be fetched: no such repository: a/b$"):
        await plane.executor.start(plane.job(settings={"model_id": "a/b"}))
    assert plane.workers.list()[0]["replicas"] == []


async def test_a_model_folder_that_is_not_there_is_named(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = plane.agent()
    await plane.joined("w1")
    job = plane.job()
    here = Path.exists
    plane.model.rmdir()
    monkeypatch.setattr(Path, "exists", lambda path: path == plane.model or here(path))
    with pytest.raises(StartupError, match=rf"^worker w1: the model folder {plane.model} is missing here: share it"):
        await plane.executor.start(job)
    assert agent.process.poll() is None


async def test_a_start_that_is_cancelled_leaves_nothing(plane: Plane) -> None:
    agent = plane.agent(fake={"delay": 60})
    await plane.joined("w1")
    starting = asyncio.create_task(plane.executor.start(plane.job(settings={"model_id": "a/b"})))
    await eventually(lambda: agent.events("download"), "the download")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await eventually(lambda: not is_alive(agent.events("download")[0]["pid"]), "the end of the download")
    await plane.joined("w1")
    assert plane.workers.list()[0]["replicas"] == []


async def test_a_flag_that_the_worker_decides_is_refused_by_it(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    plane.agent()
    await plane.joined("w1")
    monkeypatch.setattr("funitel.launcher.executors.remote_job.flags_to_send", lambda line: ("--listen", "0.0.0.0:1"))
    with pytest.raises(StartupError, match=r"^worker w1: --listen is decided by the machine of the shard$"):
        await plane.executor.start(plane.job())


# What goes ----------------------------------------------------------------------------------------------------------


async def test_an_agent_that_is_stopped_stops_its_shards_and_says_so_first(plane: Plane) -> None:
    agent = plane.agent()
    await plane.joined("w1")
    replica = await plane.executor.start(plane.job())
    await eventually(lambda: agent.events("ready"), "the shard")
    agent.process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(replica.exited, 10) == "worker w1 stops"
    assert await agent.ended() == 0
    assert len(agent.events("sigterm")) == 1
    assert not any(map(is_alive, replica.pids))
    await eventually(lambda: plane.state("w1") == "unknown", "it to be forgotten")


async def test_a_second_signal_kills_shards_that_are_stubborn(plane: Plane) -> None:
    agent = plane.agent(fake={"stubborn": True})
    await plane.joined("w1")
    replica = await plane.executor.start(plane.job())
    await eventually(lambda: agent.events("ready"), "the shard")
    agent.process.send_signal(signal.SIGTERM)
    await eventually(lambda: agent.events("sigterm"), "the signal to arrive")
    agent.process.send_signal(signal.SIGTERM)
    assert await agent.ended() == 0
    assert not any(map(is_alive, replica.pids))


async def test_a_killed_agent_takes_its_shards_along_and_its_replica_waits_for_a_worker(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    agent = plane.agent()
    await plane.joined("w1")
    job = plane.job()
    replica = await plane.executor.start(job)
    await eventually(lambda: agent.events("ready"), "the shard")
    agent.process.kill()
    await eventually(lambda: plane.state("w1") == "away", "the connection to be gone")
    assert not replica.exited.done()
    reason = await asyncio.wait_for(replica.exited, 10)
    assert reason == "worker w1 is lost: nothing was heard of it for 2 s"
    assert plane.state("w1") == "lost"
    await eventually(lambda: not any(map(is_alive, replica.pids)), "the end of the shard")
    with pytest.raises(StartupError, match=r"^tiny replica 0 fits on no worker: w1: it is lost$"):
        await plane.executor.start(plane.job())
    with pytest.raises(
        StartupError, match=r"^tiny replica 0 fits on no worker: w1: it is lost; w2: it has not joined$"
    ):
        await plane.executor.start(plane.job(2, workers=("w1", "w2")))
    await replica.stop(1.0)
    with caplog.at_level(logging.WARNING):
        restart = asyncio.create_task(plane.executor.start(job))
        await eventually(lambda: "waits for a worker" in caplog.text, "the line of what lacks")
    assert "tiny replica 0 waits for a worker since 0 s: w1: it is lost" in caplog.text
    plane.agent()
    again = await restart
    assert (again.worker, again.address) == ("w1", replica.address)


async def test_an_agent_that_starts_again_within_the_time_has_lost_its_replicas(plane: Plane) -> None:
    agent = plane.agent()
    await plane.joined("w1")
    replica = await plane.executor.start(plane.job())
    plane.workers.settings = replace(plane.workers.settings, worker_timeout=30.0)
    agent.process.kill()
    await eventually(lambda: plane.state("w1") == "away", "the connection to be gone")
    plane.agent()
    assert await asyncio.wait_for(replica.exited, 10) == "worker w1 has started again without it"


async def test_a_suspended_agent_is_lost_and_stops_what_was_given_up_when_it_is_back(plane: Plane) -> None:
    agent = plane.agent()
    await plane.joined("w1")
    replica = await plane.executor.start(plane.job())
    await eventually(lambda: agent.events("ready"), "the shard")
    agent.process.send_signal(signal.SIGSTOP)
    assert "is lost" in await asyncio.wait_for(replica.exited, 10)
    assert plane.state("w1") == "lost"
    await asyncio.wait_for(replica.stop(0.0), 5)
    assert all(map(is_alive, replica.pids)), "it is out of reach"
    agent.process.send_signal(signal.SIGCONT)
    await eventually(lambda: not any(map(is_alive, replica.pids)), "what was given up to be stopped")
    await plane.joined("w1")


async def test_a_restarted_control_plane_adopts_what_runs(plane: Plane) -> None:
    agent = plane.agent()
    await plane.joined("w1")
    replica = await plane.executor.start(plane.job(num_shard=2))
    await eventually(lambda: len(agent.events("ready")) == 2, "both ranks")
    await plane.workers.stop()
    assert all(map(is_alive, replica.pids))
    await plane.start()
    found = await plane.executor.adopt(replica.record)
    assert found is not None
    assert (found.address, list(found.pids), found.record) == (replica.address, list(replica.pids), replica.record)
    assert await found.answers()
    agent.let_die(1)
    assert "shard rank 1 exited with code 7" in await asyncio.wait_for(found.exited, 10)
    await found.stop(1.0)
    again = await plane.executor.start(plane.job(num_shard=2))
    assert again.address == replica.address, "the ports are remembered"


async def test_what_is_gone_meanwhile_is_not_adopted(plane: Plane) -> None:
    agent = plane.agent()
    await plane.joined("w1")
    replica = await plane.executor.start(plane.job(num_shard=2))
    await eventually(lambda: len(agent.events("ready")) == 2, "both ranks")
    await plane.workers.stop()
    agent.let_die(0)
    await eventually(lambda: not is_alive(replica.pids[0]), "the end of rank 0")
    await plane.start()
    assert await plane.executor.adopt(replica.record) is None
    await eventually(lambda: not is_alive(replica.pids[1]), "the rest to be stopped")


async def test_a_worker_that_does_not_come_back_is_not_waited_for_for_ever(plane: Plane) -> None:
    record = {"job": "x", "ranks": [{"worker": "w9", "rank": 0, "pid": 1, "address": "tcp://127.0.0.1:1"}]}
    assert await asyncio.wait_for(plane.executor.adopt(record), 10) is None


async def test_what_no_control_plane_wants_is_stopped(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = plane.agent()
    await plane.joined("w1")
    replica = await plane.executor.start(plane.job())
    await eventually(lambda: agent.events("ready"), "the shard")
    await plane.workers.stop()
    monkeypatch.setattr("funitel.launcher.control_plane.workers.UNCLAIMED_SECONDS", 0.5)
    await plane.start()
    await plane.joined("w1")
    await eventually(lambda: not any(map(is_alive, replica.pids)), "the end of what is not wanted")


async def test_a_rank_that_ends_while_the_connection_is_gone_is_told_later(plane: Plane) -> None:
    agent = plane.agent()
    await plane.joined("w1")
    replica = await plane.executor.start(plane.job())
    await eventually(lambda: agent.events("ready"), "the shard")
    pid = replica.pids[0]
    os.kill(agent.process.pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    os.kill(agent.process.pid, signal.SIGCONT)
    assert "killed by SIGKILL" in await asyncio.wait_for(replica.exited, 10)
