"""The process of the keeper: started before the first router, and again whenever it ends.

It is replaced where it refuses a router for its version: code that was installed meanwhile may speak another one.
"""

import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from socket import socket
from typing import Any, NoReturn

from funitel.launcher.config.child_commands import Commands, download_environ
from funitel.launcher.processes.restart_policy import STEADY_ROUTER_SECONDS, RestartPolicy
from funitel.launcher.settings import LauncherSettings
from funitel.launcher.supervisor.lasting_child import ChildMaker, record_of
from funitel.launcher.supervisor.process import Child, stop_child
from funitel.proto.errors import FunitelError
from funitel.proto.keeper.channel import Channel, ChannelLost
from funitel.proto.keeper.kernel import counts_bytes
from funitel.proto.keeper.messages import Kind, Packet

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.01
GRACE_SECONDS = 5.0
ANSWER_SECONDS = 1.0  # of a keeper that is asked for its listening sockets
NAME = "keeper"

Listen = Callable[[], Sequence[socket]]
"""Opens the ports; raises SettingsError where one is in use."""


def usable_keeper(settings: LauncherSettings) -> LauncherSettings:
    """The settings, without a keeper where the kernel has not what it needs."""
    if not settings.keeper or counts_bytes():
        return settings
    logger.warning("this kernel does not count the bytes of connections: going on as with --keeper false")
    return dataclasses.replace(settings, keeper=False)


class KeeperProcess:
    """The one keeper of a launcher, on its listening sockets.

    Attributes:
        path: of the socket on which routers connect.
    """

    def __init__(
        self,
        path: str,
        settings: LauncherSettings,
        environ: Mapping[str, str],
        commands: Commands,
        children: ChildMaker,
        listen: Listen,
    ) -> None:
        """Prepare the keeper; `start` or `adopt` gives it a process.

        Args:
            path: of its socket.
            settings: of the launcher.
            environ: of the launcher.
            commands: of children.
            children: makes the process.
            listen: called for the first keeper that this launcher starts; later ones get the same sockets.
        """
        self.path = path
        self._settings = settings
        self._environ = download_environ(settings, environ)
        self._commands = commands
        self._children = children
        self._listen = listen
        self._listeners: Sequence[socket] = ()
        self._child: Child | None = None
        self._outdated: Child | None = None
        self._listens = asyncio.Event()

    @property
    def record(self) -> Mapping[str, Any] | None:
        """What `adopt` needs."""
        return record_of(self._child)

    @property
    def has_process(self) -> bool:
        """Whether it was started or adopted, and not stopped."""
        return self._child is not None

    @property
    def pid(self) -> int | None:
        """Of the process; None where it has ended."""
        return None if self._child is None or self._child.has_exited else self._child.pid

    def open(self) -> None:
        """Open the ports, unless they are; raises SettingsError where one is in use."""
        if not self._listeners:
            self._listeners = self._listen()

    async def start(self) -> None:
        """Start it, and return once routers can connect; the ports must be open.

        Raises:
            FunitelError: it has ended.
        """
        await self._start()
        await self._until_listening(self._running)
        if self._running.has_exited:
            raise FunitelError(self._running.exit_reason())

    def adopt(self, record: Mapping[str, Any]) -> None:
        """Watch the keeper of an earlier launcher, and take the ports from it; nothing if it has ended."""
        child = self._children.adopt(NAME, record)
        if child.pid is not None:
            self._child = child
            self._listens.set()
            self._inherit()

    def _inherit(self) -> None:
        """Get the listening sockets of the running keeper, so that they are open when it ends."""
        try:
            channel = Channel.to(self.path)
        except OSError as error:
            logger.warning("the port closes for a moment when the keeper ends: %s", error.strerror or error)
            return
        try:
            channel.send(Packet(Kind.LISTENERS), ANSWER_SECONDS)
            self._listeners = [socket(fileno=each) for each in channel.receive_within(ANSWER_SECONDS).fds]
        except ChannelLost as lost:
            logger.warning("the port closes for a moment when the keeper ends: %s", lost)
        finally:
            channel.close()

    @property
    def _running(self) -> Child:
        assert self._child is not None, "the keeper was not started"
        return self._child

    async def _start(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self.path)
        descriptors = [listener.fileno() for listener in self._listeners]
        argv = self._commands.keep(
            self._settings,
            self.path,
            descriptors,
            outlives=self._children.outlives,
            deployment_file=self._children.deployment_file,
        )
        self._child = self._children.make(NAME, NAME, argv, self._environ, descriptors)
        await self._child.start()
        self._children.on_change()

    async def _until_listening(self, child: Child) -> None:
        """Return once routers can connect, or the process has ended."""
        while not child.has_exited:
            try:
                Channel.to(self.path).close()
            except OSError:
                await asyncio.wait({child.exited}, timeout=POLL_SECONDS)
            else:
                self._listens.set()
                return

    async def until_listening(self) -> None:
        """Return while routers can connect."""
        await self._listens.wait()

    async def replace(self) -> None:
        """Start another one of the installed version in its place, on the same sockets; `keep` must run meanwhile.

        Routers that serve are refused by it: they serve their connections to their end.
        """
        if self._listens.is_set():
            logger.warning(
                "the keeper is replaced, since a router of another version was started: a router that serves finishes"
                " its connections and ends, connections of a router that has ended are reset, new connections wait"
            )
            self._listens.clear()
            self._outdated = self._running
            await stop_child(self._outdated, GRACE_SECONDS)
        await self._listens.wait()

    async def keep(self) -> NoReturn:
        """Start it again whenever it ends.

        Raises:
            FunitelError: it has ended too often in a row, or a port is in use meanwhile.
        """
        restarts = RestartPolicy(self._settings.max_restarts, STEADY_ROUTER_SECONDS)
        while True:
            started = time.monotonic()
            child = self._running
            await asyncio.wait({child.exited})
            self._listens.clear()
            if child is not self._outdated:
                delay = restarts.delay_after(time.monotonic() - started)
                if delay is None:
                    raise FunitelError(f"{child.exit_reason()}; restarted {restarts.max_in_a_row} times in a row")
                count = f"restart {restarts.num_in_a_row} of {restarts.max_in_a_row}"
                logger.error("the keeper is lost, streams run on: %s; %s in %g s", child.exit_reason(), count, delay)
                await asyncio.sleep(delay)
            self.open()
            await self._start()
            await self._until_listening(self._running)

    async def stop(self) -> None:
        """End it; connections that are left end too."""
        for listener in self._listeners:
            listener.close()
        if self._child is not None:
            await stop_child(self._child, GRACE_SECONDS)

    def kill(self) -> None:
        """End it at once."""
        if self._child is not None:
            self._child.kill()
