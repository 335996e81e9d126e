"""The router of `funitel up`, and its keeper: they outlive the control plane, and are adopted by the next one.

One that ends is restarted; a router that ends beside a keeper is replaced without a loss.
"""

import asyncio
import json
import logging
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from socket import socket
from typing import Any

from funitel.launcher.config.child_commands import Commands, router_environ
from funitel.launcher.config.sockets import listen
from funitel.launcher.control_plane.folders import Folders
from funitel.launcher.lifecycle.orphans import command_of, routers_of
from funitel.launcher.processes.file_tail import FileTail
from funitel.launcher.processes.relay import relay
from funitel.launcher.processes.restart_policy import STEADY_ROUTER_SECONDS, RestartPolicy
from funitel.launcher.processes.watched import WatchedProcess, how_it_ended
from funitel.launcher.settings import LauncherSettings
from funitel.launcher.supervisor.keeper_process import KeeperProcess
from funitel.launcher.supervisor.lasting_child import ChildMaker, LastingFiles
from funitel.proto.errors import FunitelError, OtherKeeper
from funitel.proto.keeper.messages import FINISHED_CODE
from funitel.proto.process.start_times import start_of

logger = logging.getLogger(__name__)

RECORD, LOG, KEEPER_RECORD, KEEPER_SOCKET = "router.json", "router.log", "keeper.json", "keeper.sock"
START_SECONDS = 5.0  # that a router may take to serve
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
        self._finishing: WatchedProcess | None = None  # without a keeper, before another one can be started
        self._tail = FileTail(folders.logs / LOG, relay("router", json_output=settings.json_output))
        self._replace_requested = asyncio.Event()
        self._keeper: KeeperProcess | None = None
        if settings.keeper:
            files = LastingFiles(folders.logs)
            children = ChildMaker.lasting_in(files, self._note_keeper, json_output=settings.json_output)
            path = str(folders.run / KEEPER_SOCKET)
            self._keeper = KeeperProcess(path, settings, environ, commands, children, self._listen)

    @property
    def num_processes(self) -> int:
        """Of it and its keeper."""
        has_keeper = self._keeper is not None and self._keeper.pid is not None
        return int(has_keeper) + int(self._process is not None and not self._process.has_exited)

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
        self._adopt_keeper()
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

    def _adopt_keeper(self) -> None:
        """Find the keeper that an earlier control plane has started."""
        if self._keeper is not None:
            with suppress(OSError, ValueError, KeyError, TypeError):
                self._keeper.adopt(json.loads((self._folders.files / KEEPER_RECORD).read_bytes()))

    def open(self) -> None:
        """Listen on the ports, unless a keeper does; raises SettingsError where one is in use."""
        if self._keeper is None:
            self._listen()
        elif not self._keeper.has_process:
            self._keeper.open()

    def _listen(self) -> Sequence[socket]:
        if not self._listeners:
            listeners = [listen(self._hostname, self._settings.port)]
            if self._settings.prometheus_port is not None:
                listeners.append(listen(self._hostname, self._settings.prometheus_port, "--prometheus-port"))
            self._listeners = listeners
        return self._listeners

    def _argv(self, descriptors: tuple[int, ...]) -> list[str]:
        keeper = None if self._keeper is None else self._keeper.path
        control = self._folders.control_socket
        return self._commands.route_models(self._settings, self._hostname, descriptors, control, keeper=keeper)

    def _flags(self, descriptors: tuple[int, ...]) -> list[str]:
        """The flags that change what it does."""
        argv = self._argv(descriptors)
        skipped = {i + step for i, word in enumerate(argv) if word in _OF_THIS_START for step in (0, 1)}
        return [word for i, word in enumerate(argv) if i not in skipped]

    async def start(self) -> None:
        """Start it, and its keeper first; the ports must be open.

        Raises:
            FunitelError: one of them cannot be started.
        """
        if self._keeper is not None:
            if not self._keeper.has_process:
                await self._keeper.start()
            await self._keeper.until_listening()
        self._tail.stop()
        self._tail = FileTail(self._folders.logs / LOG, relay("router", json_output=self._settings.json_output))
        self._process = self._started()
        self._tail.start()
        self._write_record(self._flags(()))

    def _started(self) -> WatchedProcess:
        listeners = () if self._keeper is not None else self._listeners
        descriptors = tuple(listener.fileno() for listener in listeners)
        environ, log = router_environ(self._settings, self._environ), self._folders.logs / LOG
        return WatchedProcess.started_as("router", self._argv(descriptors), environ, log, descriptors)

    def _write_record(self, flags: list[str]) -> None:
        self._write(self._record, {**self._running.identity, "flags": flags})

    def _note_keeper(self) -> None:
        if self._keeper is not None and self._keeper.record is not None:
            self._write(self._folders.files / KEEPER_RECORD, self._keeper.record)

    @staticmethod
    def _write(path: Path, record: Mapping[str, Any]) -> None:
        scratch = path.with_suffix(".new")
        try:
            scratch.write_text(json.dumps(record))
            scratch.replace(path)
        except OSError as error:  # such as a full disk: a later control plane finds the router by its command line
            logger.error("%s cannot be written: %s", path, error.strerror)

    def request_replacement(self) -> None:
        """Have another process take over, if there is a keeper; the current one serves until then."""
        if self._keeper is None:
            logger.error("without --keeper true the router cannot be replaced")
        else:
            self._replace_requested.set()

    async def keep(self) -> None:
        """Restart it and its keeper whenever one ends; never return.

        Raises:
            FunitelError: one has ended too often in a row, or its port is in use meanwhile.
        """
        keeping: list[asyncio.Task[None]] = [asyncio.create_task(self._keep_router())]
        if self._keeper is not None:
            keeping.append(asyncio.create_task(self._keep_keeper(self._keeper)))
        try:
            done, _ = await asyncio.wait(keeping, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)

    async def _keep_keeper(self, keeper: KeeperProcess) -> None:
        if not keeper.has_process and b"--keeper" in command_of(self.pid):  # it has ended beside an adopted router
            keeper.open()
            await keeper.start()
        await keeper.until_listening()  # a router that was started without one has it from its next start on
        await keeper.keep()

    async def _replace(self) -> None:
        """Start another process, which has the current one end; where it fails, that serves on."""
        logger.info("another router is started, which takes over from the current one")
        old, fresh = self._running, self._started()
        await asyncio.wait({fresh.exited, old.exited}, return_when=asyncio.FIRST_COMPLETED)
        if fresh.has_exited and not old.has_exited:
            if fresh.exited.result() == OtherKeeper.exit_code:
                self._finishing = old
                await self._replace_keeper()
                return
            self._tail.read()
            reason = how_it_ended("router", fresh.exited.result())
            logger.error("the router was not replaced, it serves on: %s: %s", reason, self._tail.error)
            return
        self._process = fresh
        self._write_record(self._flags(()))
        logger.info("the router was replaced by process %d", fresh.pid)

    async def _replace_keeper(self) -> None:
        assert self._keeper is not None, "it has refused a router"
        await self._keeper.replace()

    async def _keep_router(self) -> None:
        restarts = RestartPolicy(self._settings.max_restarts, START_SECONDS + STEADY_ROUTER_SECONDS)
        was_refused = False
        while True:
            started = time.monotonic()
            requested = asyncio.create_task(self._replace_requested.wait())
            either: list[asyncio.Future[Any]] = [self._running.exited, requested]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            requested.cancel()
            if not self._running.has_exited:
                self._replace_requested.clear()
                await self._replace()
                continue
            reason, code = self._reason(), self._running.exited.result()
            is_refused = code == OtherKeeper.exit_code and not was_refused
            if is_refused:
                await self._replace_keeper()
            elif code == FINISHED_CODE or (self._running is self._finishing and code is None):
                logger.info("the router has finished its connections")
            else:
                delay = restarts.delay_after(time.monotonic() - started)
                if delay is None:
                    raise FunitelError(f"{reason}; restarted {self._settings.max_restarts} times in a row")
                count = f"restart {restarts.num_in_a_row} of {self._settings.max_restarts}"
                logger.error("%s; %s in %g s", reason, count, delay)
                await asyncio.sleep(delay)
            was_refused = is_refused
            self.open()
            await self.start()

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
        if self._keeper is not None:
            await self._keeper.stop()
        self._forget()

    def _forget(self) -> None:
        for path in (self._record, self._folders.files / KEEPER_RECORD):
            with suppress(OSError):
                path.unlink()

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
        if self._keeper is not None:
            self._keeper.kill()
