"""`funitel up` over a worker on another machine: a launch, a machine that dies and returns, a control plane killed."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from funitel_testing.certificates import Authority
from funitel_testing.machines.deployment import tls_flags, until
from funitel_testing.machines.nodes import Hub, hub
from funitel_testing.servers import free_port

NAME = "far"
ASK = {"model": NAME, "prompt": "one two three", "max_tokens": 20, "temperature": 0}


class Up:
    """A control plane as a process, and an agent on a node."""

    def __init__(self, found: Hub, folder: Path) -> None:
        self.node, self.address, self.folder = found.nodes[0], found.address, folder
        self.authority = Authority(folder)
        self.port, self.worker_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "up.log"
        self._files = self.authority.sign("control", found.address)
        self.process = self.start()
        self.agent: subprocess.Popen[bytes]

    def start(self) -> "subprocess.Popen[bytes]":
        """Start `funitel up`."""
        given = ["--port", str(self.port), "--state-dir", str(self.folder / "state"), "--device", "cpu"]
        given += ["--worker-port", str(self.worker_port), "--worker-hostname", self.address, "--worker-timeout", "3"]
        given += tls_flags("--worker-tls", self._files, self.authority)
        with self.log.open("ab") as log:
            argv = [sys.executable, "-m", "funitel.launcher", "up", *given]
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
        return self.process

    def offer(self) -> None:
        """Start the agent."""
        files = self.authority.sign("w1", self.node.address)
        given = ["--join", f"https://{self.address}:{self.worker_port}", "--name", "w1"]
        words = ["funitel.launcher", "worker", *given, *tls_flags("--tls", files, self.authority)]
        self.agent = self.node.start(self.folder / "agent.log", *words)

    def get(self, path: str) -> Any:
        """What a route answers; None where it does not, or with an error."""
        try:
            answer = httpx.get(f"{self.url}{path}", timeout=10)
        except httpx.TransportError:
            return None
        return answer.json() if answer.status_code == 200 else None

    async def until(self, claim: Any, what: str) -> None:
        """Wait for something; the log where it does not come."""
        try:
            await until(claim, what, 240.0)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log.read_text()[-4000:]}") from None

    def replica(self) -> dict[str, Any]:
        """The one replica."""
        found: dict[str, Any] = (self.get(f"/v1/models/{NAME}/replicas") or {"replicas": [{}]})["replicas"][0]
        return found

    def text(self) -> str:
        """The text of an answer."""
        answer = httpx.post(f"{self.url}/v1/completions", json=ASK, timeout=240)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])


@pytest.fixture
async def up(tmp_path: Path) -> AsyncIterator[Up]:
    with hub(1) as found:
        served = Up(found, tmp_path)
        served.offer()
        yield served
        served.process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(served.process.wait, 60)
        except subprocess.TimeoutExpired:
            os.killpg(served.process.pid, signal.SIGKILL)
            served.process.wait()
        served.agent.kill()
        served.agent.wait()


async def test_a_model_on_a_worker_outlives_the_control_plane_and_returns_with_its_machine(
    up: Up, endless: Path
) -> None:
    def workers() -> list[dict[str, Any]]:
        found = up.get("/v1/workers") or {}
        listed: list[dict[str, Any]] = found.get("data") or found.get("workers") or []
        return listed

    await up.until(lambda: any(w["name"] == "w1" and w["is_alive"] for w in workers()), "the worker to join")
    launch = {"model": str(endless), "name": NAME}
    wrong = await asyncio.to_thread(httpx.post, f"{up.url}/v1/models", json=launch | {"worker": "w9"}, timeout=60)
    assert wrong.status_code == 400, wrong.text
    assert "`worker` must be one of local, w1. Given: 'w9'" in wrong.text
    asked = launch | {"executor": "worker"}
    answer = await asyncio.to_thread(httpx.post, f"{up.url}/v1/models", json=asked, timeout=240)
    assert answer.status_code == 200, answer.text + up.log.read_text()[-3000:]
    replica = up.replica()
    assert (replica["worker"], replica["state"]) == ("w1", "ready")
    assert replica["address"].startswith(f"tcp://{up.node.address}:")
    text = up.text()
    assert text

    up.process.kill()
    up.process.wait()
    assert up.text() == text, "router and shards go on"
    up.start()
    await up.until(lambda: (up.replica() or {}).get("pids") == replica["pids"], "the shards to be adopted")
    assert up.text() == text

    up.node.kill()
    up.agent.wait()
    await up.until(lambda: up.replica().get("state") == "lost", "the loss to be noticed")
    up.node.boot()
    up.offer()
    await up.until(lambda: up.replica().get("state") == "ready", "the replica to return")
    assert up.text() == text
