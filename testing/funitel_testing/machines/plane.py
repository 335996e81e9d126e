"""A control plane's end in this process, and agents as processes over imitated shards."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from funitel.launcher.config.child_commands import Commands
from funitel.launcher.config.resolve import resolve
from funitel.launcher.control_plane.workers import Workers
from funitel.launcher.executors.interface import ReplicaJob
from funitel.launcher.executors.remote_worker import WorkerExecutor
from funitel.launcher.settings import LauncherSettings
from funitel.launcher.settings.worker_port import WorkerPortSettings

FAKE_AGENT = Path(__file__).with_name("fake_agent.py")
FAKE_SHARD = Path(__file__).with_name("fake_shard.py")
SECONDS = 30.0


async def eventually(claim: Callable[[], object], what: str, seconds: float = SECONDS) -> None:
    """Wait until `claim` holds."""
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline, f"in vain waited for: {what}"
        await asyncio.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class AgentProcess:
    """One agent; its log and what its shards noted."""

    def __init__(self, folder: Path, *flags: str, fake: dict[str, Any], environ: dict[str, str]) -> None:
        self.folder = folder
        self.log = folder / "log"
        path = os.pathsep.join(filter(None, sys.path))
        clean = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        given = {"PYTHONPATH": path, "FAKE": json.dumps(fake), "DIARY": str(folder), **environ}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(FAKE_AGENT), *flags],
                env=clean | given,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        """Its log."""
        return self.log.read_text()

    @property
    def last_line(self) -> str:
        """The last line of its log."""
        return self.said.splitlines()[-1]

    @property
    def diary(self) -> list[dict[str, Any]]:
        """What its shards noted."""
        diary = self.folder / "diary"
        return [json.loads(line) for line in diary.read_text().splitlines()] if diary.exists() else []

    def events(self, name: str) -> list[dict[str, Any]]:
        """What its shards noted under a name."""
        return [entry for entry in self.diary if entry["event"] == name]

    def let_die(self, rank: int) -> None:
        """Have a shard end with an error."""
        (self.folder / f"die-{rank}").touch()

    async def ended(self) -> int:
        """Wait for its end; the exit code."""
        await eventually(lambda: self.process.poll() is not None, "the end of the agent")
        return self.process.returncode

    def end(self) -> None:
        """Kill it and its shards."""
        self.process.kill()
        self.process.wait()
        for entry in self.diary:
            with suppress(ProcessLookupError):
                os.kill(entry["pid"], signal.SIGKILL)


class Plane:
    """What plays the control plane, and its agents."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.model = folder / "model"
        self.model.mkdir()
        self.changes = 0
        self._settings = settings
        self._agents: list[AgentProcess] = []
        self._port = 0
        self.workers: Workers
        self.executor: WorkerExecutor

    async def start(self) -> None:
        """Listen for workers, on the same port as before."""
        settings = WorkerPortSettings(**{"worker_port": self._port, "worker_timeout": 2.0, **self._settings})
        self.workers = Workers(settings, self._count)
        await self.workers.start()
        assert self.workers.port
        self._port = self.workers.port
        self.executor = WorkerExecutor(self.workers, settings.worker_tls)

    def _count(self) -> None:
        self.changes += 1

    @property
    def url(self) -> str:
        """Where workers join."""
        return f"http://127.0.0.1:{self._port}"

    def agent(
        self, *flags: str, name: str = "w1", url: str = "", fake: dict[str, Any] | None = None, **environ: str
    ) -> AgentProcess:
        """Start an agent; `fake` is the behaviour of its shards."""
        folder = self.folder / f"agent-{len(self._agents)}"
        folder.mkdir()
        given = ("--join", url or self.url, "--name", name, *flags)
        self._agents.append(AgentProcess(folder, *given, fake=fake or {}, environ=environ))
        return self._agents[-1]

    async def joined(self, *names: str) -> None:
        """Wait until workers are connected."""

        def are_there() -> bool:
            return {w["name"] for w in self.workers.list() if w["state"] == "connected"} >= set(names)

        await eventually(are_there, f"{names} to join")

    def state(self, name: str) -> str:
        """The state of a worker."""
        return next((str(worker["state"]) for worker in self.workers.list() if worker["name"] == name), "unknown")

    def job(self, num_shard: int = 1, workers: tuple[str, ...] = (), **more: Any) -> ReplicaJob:
        """A replica to start."""
        settings = {"model_id": str(self.model), "device": "cpu", **more.pop("settings", {})}
        resolved = resolve(LauncherSettings(**settings), num_shard, "/tmp/unused")
        given: dict[str, Any] = {"model": "tiny", "replica": 0, "folder": self.model, "settings": resolved}
        given |= {"environ": {}, "commands": Commands(), "log": self.folder / "log", "outlives": True}
        return ReplicaJob(**given, workers=workers, **more)

    async def close(self) -> None:
        """End it and its agents."""
        await self.workers.stop()
        for agent in self._agents:
            agent.end()
