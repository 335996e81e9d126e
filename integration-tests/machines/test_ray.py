"""Ray as a placer: ranks on two nodes of its cluster, a node that dies and returns, a control plane killed."""

import asyncio
import errno
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from funitel_testing.faults.load import STREAMS, Load, asks_of, undisturbed
from funitel_testing.machines.deployment import Router, until
from funitel_testing.machines.nodes import Node, hub

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")

OBJECT_STORE_BYTES = "100000000"
HEAD_PORT = "6379"
TRIES = 5
# Ports of a node that nothing else runs on, so that its raylet need not wait to be told each of them.
AGENT_PORTS = (
    *("--dashboard-agent-grpc-port", "52366", "--dashboard-agent-listen-port", "52365"),
    *("--metrics-export-port", "52367", "--runtime-env-agent-port", "52368"),
)
NUM_STREAMS = 20
NUM_TOKENS = 150
START_SECONDS = 400.0


class Cluster:
    """A head with three CPUs on one node, one CPU on another, and what plays the control plane on the head's node."""

    def __init__(self, nodes: list[Node], folder: Path, model: Path) -> None:
        self.head, self.other = nodes
        self.folder, self.model = folder, model
        self.state_file = folder / "state.json"
        self.log = folder / "plane.log"
        self.plane: subprocess.Popen[bytes]
        self._ray(self.head, "--head", "--port", HEAD_PORT, "--num-cpus", "3", "--include-dashboard", "false")

    def _ray(self, node: Node, *words: str) -> None:
        common = ("--node-ip-address", node.address, "--object-store-memory", OBJECT_STORE_BYTES, *AGENT_PORTS)
        script = [str(Path(sys.executable).with_name("ray")), "start", *words, *common, "--disable-usage-stats"]
        for _ in range(TRIES):  # on a busy machine a raylet ends, since its agent has not started within 30 s
            done = subprocess.run(node.entered(script), env=self._environ(), capture_output=True, text=True)
            if done.returncode == 0:
                return
            node.kill()
            node.boot()
        raise AssertionError(done.stdout + done.stderr)

    def _environ(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, sys.path))
        patient = {"RAY_raylet_start_wait_time_s": "60", "RAY_agent_register_timeout_ms": "300000"}
        return {**os.environ, **patient, "PYTHONPATH": path, "RAY_TMPDIR": str(self.folder)}

    def join(self) -> None:
        """Let the other node be one of the cluster."""
        self._ray(self.other, "--address", f"{self.head.address}:{HEAD_PORT}", "--num-cpus", "1")

    def start_plane(self) -> None:
        """Start what plays the control plane."""
        words = (str(self.state_file), f"{self.head.address}:{HEAD_PORT}", str(self.model))
        self.plane = self.head.start(self.log, "funitel_testing.machines.ray_plane", *words, **self._environ())

    @property
    def state(self) -> list[dict[str, Any]]:
        """What it knows of each replica."""
        found: list[dict[str, Any]] = json.loads(self.state_file.read_text()) if self.state_file.exists() else []
        return found

    async def until_served(self) -> list[dict[str, Any]]:
        """Wait until every replica answers."""

        def serve() -> bool:
            assert self.plane.poll() is None, self.log.read_text()[-3000:]
            return bool(self.state) and all(each["answers"] for each in self.state)

        try:
            await until(serve, "the replicas", START_SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log.read_text()[-3000:]}") from None
        return self.state

    def kill_plane(self) -> None:
        """SIGKILL to what plays the control plane."""
        self.head.send(self.plane, signal.SIGKILL)
        self.plane.wait(20)


@pytest.fixture
def cluster(endless: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = Path("/tmp") / f"fr{os.getpid()}"  # paths of Ray's sockets are long already
    folder.mkdir()
    with hub(2) as found:
        cluster = Cluster(found.nodes, folder, endless)
        yield cluster
        plane = getattr(cluster, "plane", None)
        if plane is not None and plane.poll() is None:
            plane.kill()
            plane.wait()
    subprocess.run(("rm", "-r", str(folder)), check=True)


def addresses(state: list[dict[str, Any]]) -> list[str]:
    return [each["record"]["ranks"][0]["address"] for each in state]


def nodes_of(replica: dict[str, Any]) -> list[str]:
    return [rank["worker"] for rank in replica["record"]["ranks"]]


async def test_streams_survive_a_node_that_dies_and_ranks_return_with_it(
    cluster: Cluster, tmp_path: Path, figures: dict[str, object]
) -> None:
    cluster.join()
    cluster.start_plane()
    whole, spread = await cluster.until_served()
    assert set(nodes_of(whole)) == {cluster.head.address}, "it fits on one node"
    assert set(nodes_of(spread)) == {cluster.head.address, cluster.other.address}
    router = Router(tmp_path, cluster.model, addresses([whole, spread]))
    try:
        await router.until_whole()
        asks = asks_of(STREAMS, NUM_STREAMS, NUM_TOKENS)
        answers = await undisturbed(router.url, asks, NUM_STREAMS)
        load = Load(router.url, asks, NUM_STREAMS, until_struck=True)
        task = asyncio.create_task(load.run())
        await load.until_in_flight(share=1.0)
        in_flight = sum(outcome.ended is None for outcome in load.outcomes)
        load.struck = time.monotonic()
        cluster.other.kill()
        outcomes = await task
    finally:
        router.close()
    assert in_flight == NUM_STREAMS
    assert [outcome.loss for outcome in outcomes if outcome.loss] == []
    assert all(outcome.heard == answers[outcome.ask] for outcome in outcomes)

    def waits() -> bool:
        return "tiny replica 1 waits for room on Ray" in cluster.log.read_text()

    await until(waits, "the line of what lacks", START_SECONDS)
    (line, *_) = [line for line in cluster.log.read_text().splitlines() if "waits for room" in line]
    assert "2 bundles of 1 CPU want 2 CPU (" in line
    cluster.other.boot()
    cluster.join()
    figures["seconds until a replica on Ray serves again once its node is back"] = round(
        await until(lambda: cluster.state[1]["answers"], "the replica to return", START_SECONDS), 1
    )
    returned = cluster.state
    assert len(returned[1]["reasons"]) >= 1
    assert returned[0]["reasons"] == [], "the other was left alone"

    cluster.kill_plane()
    cluster.start_plane()
    await until(lambda: all(each["is_adopted"] for each in cluster.state), "both to be adopted", START_SECONDS)
    assert [each["record"] for each in cluster.state] == [each["record"] for each in returned]
    cluster.head.send(cluster.plane, signal.SIGTERM)
    assert await asyncio.to_thread(cluster.plane.wait, 120) == 0, cluster.log.read_text()[-2000:]
    for rank in [rank for each in returned for rank in each["record"]["ranks"]]:
        host, _, port = rank["address"].removeprefix("tcp://").rpartition(":")
        with socket.socket() as probe:
            probe.settimeout(5)
            assert probe.connect_ex((host, int(port))) == errno.ECONNREFUSED, "its shard is stopped"
