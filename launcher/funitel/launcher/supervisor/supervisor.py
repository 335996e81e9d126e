"""Supervise the deployment: download, start, restarts, rolling upgrade on SIGHUP, shutdown.

A shard that ends ends its replica, which is restarted at most --max-restarts times in a row, and so are the router and
the keeper, which holds the connections meanwhile. The launcher ends when no replica or no router is left; before the
deployment is ready, when any child but the keeper ends. SIGHUP starts another deployment beside the running one, and
replaces it once the new one is ready. SIGUSR2 starts another router, which takes over from the running one. Any other
signal stops the router, then the shards, then the keeper. The processes of a launcher that has died are adopted.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer

from funitel.launcher.config.child_commands import Commands, download_environ
from funitel.launcher.config.resolve import ResolvedSettings
from funitel.launcher.config.sockets import keeper_path
from funitel.launcher.processes.pid_one import OWN_CHILDREN, OrphanReaper, is_pid_one
from funitel.launcher.supervisor.announce import announce
from funitel.launcher.supervisor.deployment import Deployment, RouterSockets, end
from funitel.launcher.supervisor.download import Download
from funitel.launcher.supervisor.keeper_process import KeeperProcess, Listen
from funitel.launcher.supervisor.lasting_child import ChildMaker, LastingFiles
from funitel.launcher.supervisor.leftovers import Leftovers, RetiringProcesses
from funitel.launcher.supervisor.process import stop_child
from funitel.proto.errors import FunitelError, SettingsError
from funitel.proto.process import logs
from funitel.proto.process.deployment_file import write
from funitel.proto.process.start_times import start_of

logger = logging.getLogger(__name__)

DOWNLOAD_GRACE_SECONDS = 10.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)


@dataclass(frozen=True, slots=True)
class NextDeployment:
    """What another deployment is started with; `located` makes an error of a message about these settings."""

    settings: ResolvedSettings
    environ: Mapping[str, str]
    located: Callable[[str], SettingsError]


ResolveNext = Callable[[int], NextDeployment]
"""Reads the settings again for the deployment of a number, counted from 0; raises SettingsError."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the processes of a launcher share.

    Attributes:
        uds_path: socket path of the first deployment, beside which the other files are.
        listen: opens the ports.
        lasting: files of children that outlive the launcher; None where they end with it.
        leftovers: of an earlier launcher, to adopt.
        control_socket: of a control plane beside it, for its routers.
    """

    uds_path: str
    listen: Listen
    lasting: LastingFiles | None = None
    leftovers: Leftovers | None = None
    control_socket: Path | None = None


class Supervisor:
    """Owns all child processes of the launcher."""

    def __init__(
        self,
        settings: ResolvedSettings,
        environ: Mapping[str, str],
        surroundings: Surroundings,
        resolve_next: ResolveNext,
        commands: Commands | None = None,
        on_upgrade: Callable[[ResolvedSettings], None] = lambda settings: None,
    ) -> None:
        """Prepare the supervisor, and open the ports; `run` starts the deployment.

        Args:
            settings: of the first deployment, or of the one that is adopted, resolved.
            environ: its environment.
            surroundings: what the processes share.
            resolve_next: called by an upgrade for its settings.
            commands: of the children.
            on_upgrade: called with the settings of a deployment that has replaced another.

        Raises:
            SettingsError: a port is in use.
        """
        self._settings = settings
        self._environ = environ
        self._lasting = surroundings.lasting
        self._leftovers = surroundings.leftovers
        self._resolve_next = resolve_next
        self._commands = commands or Commands()
        self._on_upgrade = on_upgrade
        self._children = ChildMaker.lasting_in(self._lasting, self._note, json_output=settings.json_output)
        self._keeper: KeeperProcess | None = None
        if settings.keeper:
            self._keeper = KeeperProcess(
                keeper_path(surroundings.uds_path),
                *(settings, environ, self._commands, self._children, surroundings.listen),
            )
            if self._leftovers is None:
                self._keeper.open()
        self._listeners = [] if self._keeper is not None else surroundings.listen()
        self._sockets = RouterSockets(self._listeners, self._keeper, surroundings.control_socket)
        self._inherited: list[RetiringProcesses] = []
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
        adopted = self._adopt() if self._leftovers is not None else None
        self._note()
        keeping = asyncio.create_task(self._keep())
        serving = asyncio.create_task(self._serve(adopted))
        stopping = asyncio.create_task(self._stop_requested.wait())
        try:
            await asyncio.wait({keeping, serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in (keeping, serving):
                if task.done():
                    task.result()
        finally:
            stopping.cancel()
            await self._stop(serving, keeping)

    async def _keep(self) -> None:
        """Have a keeper all the time, if there is to be one; never return."""
        if self._keeper is None:
            await asyncio.Event().wait()
            return
        if not self._keeper.has_process:
            self._keeper.open()
            await self._keeper.start()
        await self._keeper.keep()

    async def _serve(self, adopted: Deployment | None) -> None:
        started = time.monotonic()
        current = adopted or await self._start(self._settings, self._environ)
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
        deployment = self._deployment(settings, environ)
        fetch = partial(self._fetch, settings, environ)
        starting = asyncio.create_task(deployment.start(fetch, is_first=not self._is_ready))
        self._deployments[deployment] = starting
        await starting
        self._deployments[deployment] = asyncio.create_task(deployment.watch())
        self._note()
        return deployment

    def _deployment(self, settings: ResolvedSettings, environ: Mapping[str, str]) -> Deployment:
        number = self._num_deployments
        return Deployment(settings, environ, self._commands, self._children, self._sockets, number)

    # Adoption -----------------------------------------------------------------------------------------------

    def _adopt(self) -> Deployment:
        """Go on with the deployment of a launcher that has died."""
        leftovers = self._leftovers
        assert leftovers is not None, "there is something to adopt"
        assert self._keeper is not None, "only deployments with a keeper outlive a launcher"
        assert leftovers.current is not None, "it was ready"
        assert leftovers.keeper is not None, "it was ready"
        self._num_deployments = leftovers.number
        deployment = self._deployment(self._settings, self._environ)
        deployment.adopt(leftovers.current)
        self._keeper.adopt(leftovers.keeper)
        self._deployments[deployment] = asyncio.create_task(deployment.watch())
        self._inherited = [RetiringProcesses(record, self._children) for record in leftovers.retiring]
        for retiring in self._inherited:
            self._until_drained(self._finish(retiring))
        logger.info("adopted the processes of an earlier launcher: %s", ", ".join(map(str, leftovers.pids)))
        return deployment

    async def _finish(self, retiring: RetiringProcesses) -> None:
        await retiring.retire(self._settings.graceful_termination_timeout)
        self._inherited.remove(retiring)
        self._note()

    def _note(self) -> None:
        """Write which processes there are, for another launcher if this one dies."""
        if self._lasting is None or self._lasting.deployment_file is None:
            return
        me = os.getpid()
        content = {
            "launcher": {"pid": me, "started": start_of(me)},
            "adopt_timeout": self._settings.adopt_timeout if any(each.is_ready for each in self._deployments) else 0.0,
            "port": self._settings.port,
            "keeper": None if self._keeper is None else self._keeper.record,
            "deployments": [*(each.record for each in self._inherited), *(each.record for each in self._deployments)],
        }
        try:
            write(self._lasting.deployment_file, content)
        except OSError as error:
            logger.error("%s cannot be written: %s", self._lasting.deployment_file, error.strerror)

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
        self._until_drained(self._retire(current, watching))
        return fresh

    def _until_drained(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)

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
        self._note()
        logger.info("the deployment before the upgrade has ended")

    # Stop ---------------------------------------------------------------------------------------------------

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        if is_pid_one():
            OrphanReaper(OWN_CHILDREN)

    def _on_signal(self, number: signal.Signals) -> None:
        if number is signal.SIGUSR2:
            if self.current is not None and not self._is_stopping:
                self.current.replace_router()
            return
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
        for retiring in self._inherited:
            retiring.kill()
        if self._download:
            self._download.child.kill()
        if self._keeper:
            self._keeper.kill()

    async def _stop(self, serving: "asyncio.Task[None]", keeping: "asyncio.Task[None]") -> None:
        """Stop the download and every deployment, and then the keeper."""
        self._is_stopping = True
        await end(serving)
        if self._download:
            await stop_child(self._download.child, DOWNLOAD_GRACE_SECONDS)
        grace = self._settings.graceful_termination_timeout
        await asyncio.gather(
            *(deployment.stop(task) for deployment, task in tuple(self._deployments.items())),
            *(retiring.stop(grace) for retiring in tuple(self._inherited)),
        )
        await end(keeping)
        if self._keeper:
            await self._keeper.stop()
        for listener in self._listeners:
            listener.close()
        for retiring in tuple(self._draining):  # each is removed as it ends
            await end(retiring)
