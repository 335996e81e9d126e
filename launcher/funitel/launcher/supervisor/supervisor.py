"""Supervise the deployment: download, start, restarts, rolling upgrade on SIGHUP, shutdown.

A shard that ends ends its replica, which is restarted at most --max-restarts times in a row. The launcher ends when no
replica is left or the router has ended; before the deployment is ready, when any child ends. SIGHUP starts another
deployment beside the running one, and replaces it once the new one is ready. Any other signal stops the router and
then the shards.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from socket import socket

import typer

from funitel.launcher.config.child_commands import Commands, download_environ
from funitel.launcher.config.resolve import ResolvedSettings
from funitel.launcher.processes.pid_one import OWN_CHILDREN, OrphanReaper, is_pid_one
from funitel.launcher.supervisor.announce import announce
from funitel.launcher.supervisor.deployment import Deployment, end
from funitel.launcher.supervisor.download import Download
from funitel.launcher.supervisor.process import stop_child
from funitel.proto.errors import FunitelError, SettingsError
from funitel.proto.process import logs

logger = logging.getLogger(__name__)

DOWNLOAD_GRACE_SECONDS = 10.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class NextDeployment:
    """What another deployment is started with; `located` makes an error of a message about these settings."""

    settings: ResolvedSettings
    environ: Mapping[str, str]
    located: Callable[[str], SettingsError]


ResolveNext = Callable[[int], NextDeployment]
"""Reads the settings again for the deployment of a number, counted from 0; raises SettingsError."""


class Supervisor:
    """Owns all child processes of the launcher."""

    def __init__(
        self,
        settings: ResolvedSettings,
        environ: Mapping[str, str],
        listeners: Sequence[socket],
        resolve_next: ResolveNext,
        commands: Commands | None = None,
        on_upgrade: Callable[[ResolvedSettings], None] = lambda settings: None,
        control_socket: Path | None = None,
    ) -> None:
        """Prepare the supervisor; `run` starts the deployment.

        Args:
            settings: the launcher's, resolved.
            environ: its environment.
            listeners: sockets on which its routers accept connections.
            resolve_next: called by an upgrade for its settings.
            commands: of the children.
            on_upgrade: called with the settings of a deployment that has replaced another.
            control_socket: of a control plane beside it, for its routers.
        """
        self._settings = settings
        self._environ = environ
        self._listeners = listeners
        self._resolve_next = resolve_next
        self._commands = commands or Commands()
        self._on_upgrade = on_upgrade
        self._control_socket = control_socket
        self.ready = asyncio.Event()
        self.current: Deployment | None = None  # that takes new requests
        self.load_seconds: float | None = None  # of the start
        self._download: Download | None = None
        self._deployments: dict[Deployment, asyncio.Task[None]] = {}  # oldest first, each with its watch task
        self._num_deployments = 0
        self._draining: set[asyncio.Task[None]] = set()
        self._stop_requested = asyncio.Event()
        self._upgrade_requested = asyncio.Event()
        self._has_terminal = sys.stderr.isatty()
        self._is_ready = False
        self._is_stopping = False

    async def run(self) -> None:
        """Serve until a signal (then return) or until a child has ended without a restart (then raise).

        Raises:
            ShardFailed, FunitelError: a shard, or the router, ended on its own.
            typer.Exit: the download failed and has logged the reason.
        """
        self._listen_to_signals()
        serving = asyncio.create_task(self._serve())
        stopping = asyncio.create_task(self._stop_requested.wait())
        try:
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
        finally:
            stopping.cancel()
            await self._stop(serving)

    async def _serve(self) -> None:
        started = time.monotonic()
        current = await self._start(self._settings, self._environ)
        self._is_ready = True
        self.current, self.load_seconds = current, time.monotonic() - started
        announce(current.settings, seconds=self.load_seconds)
        self.ready.set()
        while True:
            requested = asyncio.create_task(self._upgrade_requested.wait())
            watching = self._deployments[current]
            await asyncio.wait({requested, watching}, return_when=asyncio.FIRST_COMPLETED)
            requested.cancel()
            if watching.done():
                watching.result()
            self._upgrade_requested.clear()
            self.current = current = await self._upgrade(current, watching)

    async def _start(self, settings: ResolvedSettings, environ: Mapping[str, str]) -> Deployment:
        """Start a deployment and return it once it is ready."""
        deployment = Deployment(settings, environ, self._commands, self._listeners, self._control_socket)
        fetch = partial(self._fetch, settings, environ)
        starting = asyncio.create_task(deployment.start(fetch, is_first=not self._is_ready))
        self._deployments[deployment] = starting
        await starting
        self._deployments[deployment] = asyncio.create_task(deployment.watch())
        return deployment

    async def _fetch(self, settings: ResolvedSettings, environ: Mapping[str, str]) -> Path:
        argv = self._commands.download(settings)
        self._download = Download(argv, download_environ(settings, environ), json_output=settings.json_output)
        return await self._download.folder()

    # Upgrades -----------------------------------------------------------------------------------------------

    async def _upgrade(self, current: Deployment, watching: "asyncio.Task[None]") -> Deployment:
        """Replace the current deployment by another one; if that fails, the current one goes on."""
        logger.info("upgrading: starting another deployment")
        began = time.monotonic()
        starting = asyncio.create_task(self._start_another())
        try:
            await asyncio.wait({starting, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                watching.result()  # raises: the current deployment has ended
            fresh = starting.result()
        except asyncio.CancelledError:
            await end(starting)
            raise
        except (FunitelError, typer.Exit) as error:
            await end(starting)
            await self._stop_unready(current)
            if watching.done():
                raise
            reason = error.message if isinstance(error, FunitelError) else "the model could not be fetched"
            logger.error("the upgrade has failed, the current deployment goes on: %s", reason)
            return current
        logs.configure("launcher", json_output=fresh.settings.json_output, level=fresh.settings.log_level)
        self._on_upgrade(fresh.settings)
        logger.info("upgraded in %.1f s: %s", time.monotonic() - began, fresh.settings.served_model_name)
        retiring = asyncio.create_task(self._retire(current, watching))
        self._draining.add(retiring)
        retiring.add_done_callback(self._draining.discard)
        return fresh

    async def _start_another(self) -> Deployment:
        """Start a deployment with the settings as they are now."""
        self._num_deployments += 1
        following = self._resolve_next(self._num_deployments)
        try:
            return await self._start(following.settings, following.environ)
        except SettingsError as error:
            raise following.located(error.message) from error

    async def _stop_unready(self, current: Deployment) -> None:
        """Stop a deployment that was to replace the current one."""
        for deployment, task in [each for each in self._deployments.items() if each[0] is not current]:
            if not deployment.is_ready:
                await deployment.stop(task)
                del self._deployments[deployment]

    async def _retire(self, old: Deployment, watching: "asyncio.Task[None]") -> None:
        await old.drain(watching)
        del self._deployments[old]
        logger.info("the deployment before the upgrade has ended")

    # Stop ---------------------------------------------------------------------------------------------------

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        if is_pid_one():
            OrphanReaper(OWN_CHILDREN)

    def _on_signal(self, number: signal.Signals) -> None:
        if number is signal.SIGHUP and self._is_ready and not self._has_lost_terminal():
            self._upgrade_requested.set()
            return
        if self._is_stopping and number is signal.SIGINT:
            logger.warning("interrupted again: killing every process")
            self._kill()
        self._stop_requested.set()

    def _has_lost_terminal(self) -> bool:
        """Whether the terminal of the launcher is gone: SIGHUP then asks it to end."""
        return self._has_terminal and not os.isatty(sys.stderr.fileno())

    def _kill(self) -> None:
        for deployment in self._deployments:
            deployment.kill()
        if self._download:
            self._download.child.kill()

    async def _stop(self, serving: "asyncio.Task[None]") -> None:
        """Stop the download and every deployment."""
        self._is_stopping = True
        await end(serving)
        if self._download:
            await stop_child(self._download.child, DOWNLOAD_GRACE_SECONDS)
        await asyncio.gather(*(deployment.stop(task) for deployment, task in tuple(self._deployments.items())))
        for listener in self._listeners:
            listener.close()
        for retiring in tuple(self._draining):  # each is removed as it ends
            await end(retiring)
