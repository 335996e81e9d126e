"""The router of `funitel up`: it outlives the control plane, is adopted by the next one, and restarted when it ends."""

import asyncio
import json
import logging
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from socket import socket
from typing import Any, NoReturn

from funitel.launcher.config.child_commands import Commands, router_environ
from funitel.launcher.config.sockets import listen
from funitel.launcher.control_plane.folders import Folders
from funitel.launcher.lifecycle.orphans import routers_of
from funitel.launcher.processes.file_tail import FileTail
from funitel.launcher.processes.relay import relay
from funitel.launcher.processes.restart_policy import RestartPolicy
from funitel.launcher.processes.watched import WatchedProcess, how_it_ended
from funitel.launcher.settings import LauncherSettings
from funitel.proto.errors import FunitelError
from funitel.proto.process.start_times import start_of

logger = logging.getLogger(__name__)

RECORD, LOG = "router.json", "router.log"
STOP_AGAIN_SECONDS = 5.0  # for a router past its grace period, to send errors to its clients
REPEAT_SECONDS = 0.5  # signals that arrive before the first is handled are merged
_OF_THIS_START = ("--listen-fd",)  # flags that differ from start to start


class RouterProcess:
    """The one router of a server."""

    def __init__(
        self,
        settings: LauncherSettings,
        hostname: str,
        environ: Mapping[str, str],
        folders: Folders,
        commands: Commands,
    ) -> None:
        """Prepare the router; `adopt` or `start` gives it a process.

        Args:
            settings: of the server.
            hostname: to listen on.
            environ: of this process.
            folders: of files; there is a state folder.
            commands: of the router.
        """
        self._settings = settings
        self._hostname = hostname
        self._environ = environ
        self._folders = folders
        self._commands = commands
        self._record = folders.files / RECORD
        self._listeners: list[socket] = []
        self._process: WatchedProcess | None = None
        self._tail = FileTail(folders.logs / LOG, relay("router", json_output=settings.json_output))

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._running.pid

    @property
    def _running(self) -> WatchedProcess:
        assert self._process is not None, "the router was not started"
        return self._process

    def adopt(self) -> bool:
        """Find the router that an earlier control plane has started; return whether it runs."""
        record: dict[str, Any] = {}
        with suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(self._record.read_bytes())
            self._process = WatchedProcess.found("router", record)
        if self._process is None and (found := self._unrecorded()) is not None:
            self._process, record = found, {}
            self._write_record([])
        if self._process is None:
            return False
        if record.get("flags") != self._flags(()):
            logger.warning("the running router keeps its flags: run funitel down before funitel up to change them")
        self._tail.start()
        return True

    def _unrecorded(self) -> WatchedProcess | None:
        """The router of a control plane that was killed before it had noted it; it has the port."""
        for pid in routers_of(self._folders.control_socket):
            if (started := start_of(pid)) is not None:
                return WatchedProcess.found("router", {"pid": pid, "started": started})
        return None

    def open(self) -> None:
        """Listen on the ports; raises SettingsError where one is in use."""
        if not self._listeners:
            self._listeners = [listen(self._hostname, self._settings.port)]
            if self._settings.prometheus_port is not None:
                second = listen(self._hostname, self._settings.prometheus_port, "--prometheus-port")
                self._listeners.append(second)

    def _argv(self, descriptors: tuple[int, ...]) -> list[str]:
        return self._commands.route_models(self._settings, self._hostname, descriptors, self._folders.control_socket)

    def _flags(self, descriptors: tuple[int, ...]) -> list[str]:
        """The flags that change what it does."""
        argv = self._argv(descriptors)
        skipped = {i + step for i, word in enumerate(argv) if word in _OF_THIS_START for step in (0, 1)}
        return [word for i, word in enumerate(argv) if i not in skipped]

    def start(self) -> None:
        """Start it; the ports must be open.

        Raises:
            FunitelError: it cannot be started.
        """
        descriptors = tuple(listener.fileno() for listener in self._listeners)
        environ = router_environ(self._settings, self._environ)
        self._tail.stop()
        self._tail = FileTail(self._folders.logs / LOG, relay("router", json_output=self._settings.json_output))
        self._process = WatchedProcess.started_as(
            "router", self._argv(descriptors), environ, self._folders.logs / LOG, descriptors
        )
        self._tail.start()
        self._write_record(self._flags(descriptors))

    def _write_record(self, flags: list[str]) -> None:
        scratch = self._record.with_suffix(".new")
        try:
            scratch.write_text(json.dumps({**self._running.identity, "flags": flags}))
            scratch.replace(self._record)
        except OSError as error:  # such as a full disk: a later control plane finds the router by its command line
            logger.error("%s cannot be written: %s", self._record, error.strerror)

    async def keep(self) -> NoReturn:
        """Restart it whenever it ends, with pauses.

        Raises:
            FunitelError: it has ended too often in a row, or its port is in use meanwhile.
        """
        restarts = RestartPolicy(self._settings.max_restarts)
        while True:
            started = time.monotonic()
            await asyncio.wait({self._running.exited})
            reason = self._reason()
            delay = restarts.delay_after(time.monotonic() - started)
            if delay is None:
                raise FunitelError(f"{reason}; restarted {self._settings.max_restarts} times in a row")
            count = f"restart {restarts.num_in_a_row} of {self._settings.max_restarts}"
            logger.error("%s; %s in %g s", reason, count, delay)
            await asyncio.sleep(delay)
            self.open()
            self.start()

    def _reason(self) -> str:
        self._tail.stop()
        how = how_it_ended("router", self._running.exited.result())
        if self._tail.error:
            return f"{how}: last error: {self._tail.error}"
        return f"{how}: last line: {self._tail.last_line}" if self._tail.last_line else how

    async def stop(self, grace_seconds: float) -> None:
        """Have it finish its requests within the grace period, then end it, and close the ports."""
        for listener in self._listeners:
            listener.close()
        process = self._process
        if process is not None and not process.has_exited:
            process.send(signal.SIGTERM)
            await asyncio.wait({process.exited}, timeout=grace_seconds)
            end = time.monotonic() + STOP_AGAIN_SECONDS
            while not process.has_exited and time.monotonic() < end:
                process.send(signal.SIGTERM)
                await asyncio.wait({process.exited}, timeout=REPEAT_SECONDS)
            if not process.has_exited:
                logger.warning("router did not stop within %g s and was killed", grace_seconds)
                process.kill()
                await asyncio.wait({process.exited})
        self._tail.stop()
        self._forget()

    def _forget(self) -> None:
        with suppress(OSError):
            self._record.unlink()

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
