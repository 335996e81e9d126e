"""What a launcher that has died has left running: adopted by one of the same settings, ended by another one."""

import asyncio
import dataclasses
import hashlib
import logging
import os
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Self

from funitel.launcher.config.resolve import ResolvedSettings
from funitel.launcher.supervisor.lasting_child import ChildMaker
from funitel.launcher.supervisor.process import stop_child
from funitel.proto.process.deployment_file import file_of, processes_in, read, runs
from funitel.proto.process.start_times import start_of

logger = logging.getLogger(__name__)

GRACE_SECONDS = 10.0  # for the router to end its streams, and for shards to finish a step
# Decided at each start, or by the model; or where settings come from.
_NOT_COMPARED = frozenset(
    "master_port master_ports shard_uds_path port max_batch_prefill_tokens task config env address_file".split()
)


def fingerprint(settings: ResolvedSettings) -> str:
    """A digest of all settings that decide how children serve; those of another launcher can be compared with it."""
    names = sorted(each.name for each in dataclasses.fields(settings) if each.name not in _NOT_COMPARED)
    text = "\n".join(f"{name}={getattr(settings, name)!r}" for name in names)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Leftovers:
    """The processes that a deployment file names, some of which may have ended.

    Attributes:
        port: of the server.
        keeper: its record.
        current: record of the deployment that takes new requests; None where none was ready.
        retiring: records of deployments that finish their requests.
    """

    port: int
    keeper: Mapping[str, Any] | None
    current: Mapping[str, Any] | None
    retiring: tuple[Mapping[str, Any], ...]
    _processes: tuple[Mapping[str, Any], ...]

    @classmethod
    def at(cls, uds_path: str) -> Self | None:
        """Those at a socket path, of which the caller has the lock; None where none runs."""
        content = read(file_of(uds_path))
        if content is None:
            return None
        launcher = content["launcher"]
        running = [each for each in processes_in(content) if each is not launcher and runs(each)]
        if not running:
            return None
        try:
            ready = [each for each in content["deployments"] if each["is_ready"]]
            current = max(ready, key=lambda each: int(each["number"]), default=None)
            retiring = tuple(each for each in ready if each is not current)
            return cls(int(content["port"]), content["keeper"], current, retiring, tuple(running))
        except (KeyError, TypeError, ValueError):
            return cls(0, None, None, (), tuple(running))

    @property
    def number(self) -> int:
        """Of the current deployment."""
        return 0 if self.current is None else int(self.current["number"])

    @property
    def pids(self) -> list[int]:
        """Of what runs."""
        return [each["pid"] for each in self._processes]

    def reason_against(self, settings: ResolvedSettings, given_port: int) -> str:
        """Why a launcher cannot adopt them; empty where it can.

        Args:
            settings: as it would start the current deployment.
            given_port: as the user gave it; 0 for any.
        """
        if self.current is None or self.keeper is None or self.current["router"] is None:
            return "it was not ready"
        if given_port not in (0, self.port):
            return f"it has port {self.port}"
        if self.current["fingerprint"] != fingerprint(settings):
            return "it has other settings"
        replicas = self.current["replicas"]
        if not any(all(map(runs, shards)) for shards in replicas):
            return "no replica of it is whole"
        if not any(map(runs, (self.keeper, self.current["router"], *self.current["replacement"]))):
            return "its keeper and its router have ended"
        return ""

    def end(self) -> None:
        """End what runs: by SIGTERM, and by SIGKILL what has not ended after the grace period."""
        for process in self._processes:
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self._processes:
            if not _wait(process, deadline - time.monotonic()):
                logger.warning("process %d did not stop within %g s and was killed", process["pid"], GRACE_SECONDS)
                _signal(process, signal.SIGKILL)
                _wait(process, GRACE_SECONDS)


class RetiringProcesses:
    """A deployment that was replaced before its launcher died: its router finishes its requests, and all of it ends."""

    def __init__(self, record: Mapping[str, Any], children: ChildMaker) -> None:
        """Watch the processes of a deployment's record."""
        self.record = record
        self._router = children.adopt("router", record["router"])
        self._shards = [children.adopt("shard", each) for shards in record["replicas"] for each in shards if each]

    async def retire(self, grace_seconds: float) -> None:
        """Return once all have ended."""
        await self._router.wait()
        await self._stop_shards(grace_seconds)

    async def stop(self, grace_seconds: float) -> None:
        """Have the router finish within the grace period, and end all."""
        await stop_child(self._router, grace_seconds)
        await self._stop_shards(grace_seconds)

    async def _stop_shards(self, grace_seconds: float) -> None:
        await asyncio.gather(*(stop_child(shard, grace_seconds) for shard in self._shards))

    def kill(self) -> None:
        """End all at once."""
        for child in (self._router, *self._shards):
            child.kill()


def _signal(process: Mapping[str, Any], number: signal.Signals) -> None:
    try:
        pidfd = os.pidfd_open(process["pid"])
    except OSError:
        return
    try:
        if start_of(process["pid"]) == process["started"]:
            with suppress(OSError):
                signal.pidfd_send_signal(pidfd, number)
    finally:
        os.close(pidfd)


def _wait(process: Mapping[str, Any], seconds: float) -> bool:
    """Wait for the end of a process; return whether it has ended."""
    try:
        pidfd = os.pidfd_open(process["pid"])
    except OSError:
        return True
    try:
        if start_of(process["pid"]) != process["started"]:
            return True
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        return bool(poller.poll(max(0.0, 1000 * seconds)))
    finally:
        os.close(pidfd)
