"""A router over replicas that an executor runs on nodes, and what restarts them, as a control plane would."""

import asyncio
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from funitel.launcher.config.child_commands import Commands
from funitel.launcher.config.resolve import fit_to_model, resolve
from funitel.launcher.executors.interface import Executor, ReplicaJob, RunningReplica
from funitel.launcher.settings import LauncherSettings
from funitel.proto.errors import StartupError
from funitel_testing.certificates import Authority, Files
from funitel_testing.faults.scenes import LIMITS, serves_wholly
from funitel_testing.servers import free_port

logger = logging.getLogger(__name__)

START_SECONDS = 180.0
RETRY_SECONDS = 0.5
STEP_TIMEOUT = ("--step-timeout-s", "8")


def replica_job(model: Path, replica: int, log: Path, num_shard: int, **more: Any) -> ReplicaJob:
    """A replica of a model, computed with one thread for each rank."""
    settings = LauncherSettings(model_id=str(model), device="cpu", num_threads=1, step_timeout_s=8.0)
    resolved = fit_to_model(resolve(settings, num_shard, "/tmp/unused"), model)
    return ReplicaJob(
        model="tiny", replica=replica, folder=model, settings=resolved, environ={}, commands=Commands(), log=log,
        outlives=True, **more,
    )  # fmt: skip


class Supervised:
    """A replica that is started again whenever it is lost, as a control plane does; at the same place.

    `running` is one that was adopted.
    """

    def __init__(self, executor: Executor, job: ReplicaJob, running: RunningReplica | None = None) -> None:
        self.executor = executor
        self.reasons: list[str] = []  # of its losses
        self.failures: list[str] = []  # of starts
        self.running = running
        self._job = job
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while True:
            if self.running is None:
                try:
                    self.running = await self.executor.start(self._job)
                except StartupError as error:
                    self.failures.append(error.message)
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
            self.reasons.append(await asyncio.shield(self.running.exited))
            await self.running.stop(0.0)
            self.running = None

    async def serves(self) -> RunningReplica:
        """Wait until every rank answers."""
        deadline = time.monotonic() + START_SECONDS
        while self.running is None or not await self.running.answers():
            assert time.monotonic() < deadline, (self.reasons, self.failures)
            assert not self._task.done(), self._task
            await asyncio.sleep(0.1)
        return self.running

    async def leave(self) -> Mapping[str, Any]:
        """Watch it no longer, as a control plane that ends; the record by which the next one finds it."""
        assert self.running is not None
        await self._cancelled()
        return self.running.record

    async def close(self) -> None:
        """Stop it."""
        await self._cancelled()
        if self.running is not None:
            await self.running.stop(5.0)

    async def _cancelled(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class Router:
    """A real router over addresses of replicas."""

    def __init__(self, folder: Path, model: Path, addresses: Sequence[str], *flags: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "router.log"
        self._num_replicas = len(addresses)
        first, *others = addresses
        further = [word for address in others for word in ("--replica-address", address)]
        argv = [sys.executable, "-m", "funitel.router", "--tokenizer-name", str(model), "--port", str(self.port)]
        argv += ["--master-shard-address", first.removeprefix("tcp://"), *further, *LIMITS, *STEP_TIMEOUT, *flags]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log)

    async def until_whole(self) -> None:
        """Wait until every replica serves."""
        deadline = time.monotonic() + START_SECONDS
        while not await asyncio.to_thread(serves_wholly, self.url, self._num_replicas):
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            await asyncio.sleep(0.2)

    def count(self, state: str) -> float:
        """Replicas of a state, by the metrics."""
        page = httpx.get(f"{self.url}/metrics", timeout=10).text
        lines = (line.split() for line in page.splitlines())
        return next(float(words[1]) for words in lines if words[:1] == [f'funitel_replicas{{state="{state}"}}'])

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def tls_flags(prefix: str, files: Files, authority: Authority) -> list[str]:
    """The three flags of mutual TLS."""
    return [f"{prefix}-cert", files.cert, f"{prefix}-key", files.key, f"{prefix}-ca", authority.ca]


async def until(claim: Callable[[], object], what: str, seconds: float = START_SECONDS) -> float:
    """Wait until `claim` holds; how long that took."""
    began = time.monotonic()
    while not claim():
        assert time.monotonic() - began < seconds, f"in vain waited for: {what}"
        await asyncio.sleep(0.1)
    return time.monotonic() - began
