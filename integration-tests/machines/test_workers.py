"""Workers on machines of their own: ranks of one replica on two of them, a machine that dies, a cable that is cut."""

import asyncio
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from funitel.launcher.control_plane.workers import Workers
from funitel.launcher.executors.remote_worker import WorkerExecutor
from funitel.launcher.settings.worker_port import WorkerPortSettings
from funitel_testing.certificates import Authority
from funitel_testing.faults.load import STREAMS, Load, asks_of, undisturbed
from funitel_testing.machines.deployment import Router, Supervised, replica_job, tls_flags, until
from funitel_testing.machines.nodes import Hub, hub

NUM_STREAMS = 20
NUM_TOKENS = 150
WORKER_TIMEOUT = 3.0


class Machines:
    """Two nodes with an agent each, and what asks them, over mutual TLS."""

    def __init__(self, found: Hub, folder: Path, model: Path) -> None:
        self.hub, self.folder, self.model = found, folder, model
        self.authority = Authority(folder)
        self.files = self.authority.sign("control", found.address)
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.replicas: list[Supervised] = []
        self.router: Router | None = None
        self._port = 0
        self.workers: Workers
        self.executor: WorkerExecutor

    async def listen(self) -> None:
        """Begin as a control plane, on the same port as the last one."""
        files = self.files
        settings = WorkerPortSettings(
            worker_port=self._port, worker_hostname=self.hub.address, worker_tls_cert=files.cert,
            worker_tls_key=files.key, worker_tls_ca=self.authority.ca, worker_timeout=WORKER_TIMEOUT,
        )  # fmt: skip
        self.workers = Workers(settings)
        await self.workers.start()
        assert self.workers.port
        self._port = self.workers.port
        self.executor = WorkerExecutor(self.workers, settings.worker_tls)

    async def offer(self, number: int) -> None:
        """Start the agent of a node, and wait until it has joined."""
        node, name = self.hub.nodes[number], f"w{number}"
        files = self.authority.sign(name, node.address)
        if name in self.agents:  # it ended with its node
            self.agents[name].wait()
        given = ["--join", f"https://{self.hub.address}:{self._port}", "--name", name]
        self.agents[name] = node.start(
            self.log(name), "funitel.launcher", "worker", *given, *tls_flags("--tls", files, self.authority)
        )
        await until(lambda: self.state(name) == "connected", f"{name} to join")

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def state(self, name: str) -> str:
        return next((str(each["state"]) for each in self.workers.list() if each["name"] == name), "unknown")

    def run(self, *places: str) -> Supervised:
        """Keep a replica with its ranks on these workers."""
        number = len(self.replicas)
        job = replica_job(self.model, number, self.folder / "log", len(places), workers=places)
        self.replicas.append(Supervised(self.executor, job))
        return self.replicas[-1]

    async def route(self) -> Router:
        """A router over every replica, once all serve."""
        addresses = [(await replica.serves()).address for replica in self.replicas]
        flags = tls_flags("--shard-tls", self.files, self.authority)
        self.router = Router(self.folder, self.model, addresses, *flags)
        await self.router.until_whole()
        return self.router

    async def close(self) -> None:
        if self.router is not None:
            self.router.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.gather(*(replica.close() for replica in self.replicas))
        await self.workers.stop()


@pytest.fixture
async def machines(endless: Path, tmp_path: Path) -> AsyncIterator[Machines]:
    with hub(2) as found:
        machines = Machines(found, tmp_path, endless)
        try:
            await machines.listen()
            await asyncio.gather(machines.offer(0), machines.offer(1))
            yield machines
        finally:
            await machines.close()
            for agent in machines.agents.values():
                agent.kill()
                agent.wait()


async def streams_through(router: Router, strike: Any) -> list[Any]:
    """Many streams run while something strikes: all of them finish, with the text of an undisturbed run."""
    asks = asks_of(STREAMS, NUM_STREAMS, NUM_TOKENS)
    answers = await undisturbed(router.url, asks, NUM_STREAMS)
    load = Load(router.url, asks, NUM_STREAMS, until_struck=True)
    task = asyncio.create_task(load.run())
    await load.until_in_flight(share=1.0)
    in_flight = sum(outcome.ended is None for outcome in load.outcomes)
    load.struck = time.monotonic()
    await strike()
    outcomes = await task
    assert in_flight == NUM_STREAMS, "some were over before"
    assert [outcome.loss for outcome in outcomes if outcome.loss] == []
    assert all(outcome.heard == answers[outcome.ask] for outcome in outcomes)
    return outcomes


async def test_a_replica_over_two_machines_survives_that_one_of_them_dies(
    machines: Machines, figures: dict[str, object]
) -> None:
    spread = machines.run("w0", "w1")
    machines.run("w0", "w0")
    router = await machines.route()
    log = machines.log("w1").read_text()
    assert "ranks reduce through gloo, without shared memory" in log
    hosts = {rank["address"].rpartition(":")[0] for rank in (await spread.serves()).record["ranks"]}
    assert hosts == {f"tcp://{node.address}" for node in machines.hub.nodes}
    address = (await spread.serves()).address

    async def strike() -> None:
        machines.hub.nodes[1].kill()

    began = time.monotonic()
    await streams_through(router, strike)
    await until(lambda: spread.reasons, "the loss to be noticed", 30)
    assert "worker w" in spread.reasons[0]
    machines.hub.nodes[1].boot()
    await machines.offer(1)
    running = await spread.serves()
    assert running.address == address, "the router looks for it there"
    await router.until_whole()
    figures["seconds until a replica over two machines serves again after one was killed and came back"] = round(
        time.monotonic() - began, 1
    )
    await streams_through(router, lambda: asyncio.sleep(0))


async def test_a_machine_that_is_cut_off_is_lost_and_its_replica_starts_elsewhere(
    machines: Machines, figures: dict[str, object]
) -> None:
    machines.run("w0")
    far = machines.run("w1")
    router = await machines.route()
    pids = (await far.serves()).pids
    struck = 0.0

    async def strike() -> None:
        nonlocal struck
        struck = time.monotonic()
        machines.hub.nodes[1].cut()

    await streams_through(router, strike)
    await until(lambda: far.reasons, "the loss to be told", 30)
    assert far.reasons == [f"worker w1 is lost: nothing was heard of it for {WORKER_TIMEOUT:g} s"]
    figures["seconds until streams of a machine that was cut off had ended elsewhere"] = round(
        time.monotonic() - struck, 1
    )
    assert machines.state("w1") == "lost"
    elsewhere = Supervised(machines.executor, replica_job(machines.model, 7, machines.folder / "log", 1))
    assert (await elsewhere.serves()).worker == "w0", "it is placed where something answers"
    machines.hub.nodes[1].join()
    await until(lambda: machines.state("w1") == "connected", "it to come back")
    again = await far.serves()
    assert list(again.pids) != list(pids)

    def shown() -> list[int]:
        (worker,) = [each for each in machines.workers.list() if each["name"] == "w1"]
        return [rank["pid"] for job in worker["replicas"] for rank in job["ranks"]]

    await until(lambda: shown() == list(again.pids), "the old to be stopped", 30)
    await elsewhere.close()


async def test_streams_go_on_while_the_control_plane_is_away_and_the_next_one_adopts(machines: Machines) -> None:
    machines.run("w1")
    router = await machines.route()

    async def strike() -> None:
        records = [await replica.leave() for replica in machines.replicas]
        machines.replicas.clear()
        await machines.workers.stop()
        await asyncio.sleep(1.0)
        await machines.listen()
        for record in records:
            found = await machines.executor.adopt(record)
            assert found is not None
            assert found.record == record
            assert await found.answers()
            machines.adopted = found  # type: ignore[attr-defined]

    await streams_through(router, strike)
    await machines.adopted.stop(5.0)  # type: ignore[attr-defined]
    assert machines.state("w1") == "connected"


async def test_an_agent_that_is_stopped_hands_its_streams_over(machines: Machines) -> None:
    machines.run("w0")
    leaving = machines.run("w1")
    router = await machines.route()

    async def strike() -> None:
        agent = machines.agents["w1"]
        machines.hub.nodes[1].send(agent, signal.SIGTERM)
        await until(lambda: agent.poll() is not None, "the end of the agent", 60)
        assert agent.returncode == 0

    await streams_through(router, strike)
    assert leaving.reasons[0] == "worker w1 stops"
