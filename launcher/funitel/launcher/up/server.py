"""Serve many models: adopt or start the router and the models, print how to go on, stop everything on a signal."""

import asyncio
import logging
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from funitel.launcher.config.child_commands import Commands
from funitel.launcher.control_plane.folders import Folders
from funitel.launcher.control_plane.records import LaunchRequest
from funitel.launcher.lifecycle.composition import ControlPlane
from funitel.launcher.processes.health import reachable
from funitel.launcher.processes.pid_one import OWN_CHILDREN, OrphanReaper, is_pid_one
from funitel.launcher.settings import LauncherSettings
from funitel.launcher.up.router_process import RouterProcess

logger = logging.getLogger(__name__)


class ManyModelServer:
    """A router, a control plane and the models that it is told to serve."""

    def __init__(
        self,
        settings: LauncherSettings,
        hostname: str,
        environ: Mapping[str, str],
        folders: Folders,
        commands: Commands,
    ) -> None:
        """Prepare the server; `run` serves.

        Args:
            settings: of the server.
            hostname: to listen on.
            environ: of this process.
            folders: of files.
            commands: of child processes.
        """
        self._settings = settings
        self._environ = environ
        self._folders = folders
        self._commands = commands
        self._router = RouterProcess(settings, hostname, environ, folders, commands)
        self._plane: ControlPlane | None = None
        self._hostname = hostname
        self._stop_requested = asyncio.Event()
        self._is_stopping = False

    async def run(self, configured: Sequence[LaunchRequest], *, began: float) -> None:
        """Serve until a signal.

        Args:
            configured: models of the configuration file.
            began: instant on the monotonic clock at which the program was started.

        Raises:
            FunitelError: the router cannot be kept alive, a port is in use, or the state cannot be used.
        """
        self._listen_to_signals()
        has_router = self._router.adopt()
        if not has_router:
            self._router.open()  # before anything is started: another server may have the port
        self._plane = ControlPlane(self._settings, self._environ, self._folders, self._commands, outlives=True)
        stopping = asyncio.create_task(self._stop_requested.wait())
        serving = asyncio.create_task(self._serve(configured, has_router=has_router, began=began))
        try:
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
        finally:
            self._is_stopping = True
            for task in (serving, stopping):
                task.cancel()
            await asyncio.gather(serving, stopping, return_exceptions=True)
            await self._stop()

    async def _serve(self, configured: Sequence[LaunchRequest], *, has_router: bool, began: float) -> None:
        plane = self._plane
        assert plane is not None, "the control plane was not made"
        if not has_router:
            await self._router.start()
        keeping = asyncio.create_task(self._router.keep())
        try:
            num_adopted = await plane.start(configured, has_router=has_router)
            watched = asyncio.create_task(plane.until_router_watches())
            await asyncio.wait({keeping, watched}, return_when=asyncio.FIRST_COMPLETED)
            watched.cancel()
            if not keeping.done():
                adopted = f"; adopted router {self._router.pid}" if has_router else ""
                if num_adopted:
                    count = f"{num_adopted} replica{'s' if num_adopted > 1 else ''}"
                    adopted += f" and {count}" if adopted else f"; adopted {count}"
                self._announce(time.monotonic() - began, adopted)
            await keeping
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    def _announce(self, seconds: float, adopted: str) -> None:
        """Print the ready line and what to do next on stdout; with `json_output`, log one event instead."""
        assert self._plane is not None
        names = [entry.name for entry in self._plane.fleet.models()]
        models = f"knows {', '.join(names)}" if names else "has no model yet"
        ready = f"ready: {self._url} {models} (started in {seconds:.1f} s{adopted})"
        if self._settings.json_output:
            logger.info(ready)
            return
        url = "" if self._settings.port == 3000 else f" --url {self._url}"
        if self._settings.users:
            url = f" --url unix://{self._folders.control_socket}"  # which asks for no key
        following = f"funitel launch {self._settings.model_id}{url}\nfunitel list{url}"
        with suppress(OSError):  # the server runs even if stdout is on a full disk
            print(f"\n{ready}\n\n{following}\n", flush=True)

    @property
    def _url(self) -> str:
        host = "localhost" if reachable(self._hostname) in ("127.0.0.1", "::1") else self._hostname
        scheme = "http" if self._settings.tls_pair is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self._settings.port}"

    async def _stop(self) -> None:
        """Stop the router, within the grace period of its requests, and then the models."""
        settings = self._settings
        await self._router.stop(settings.shutdown_delay + settings.graceful_termination_timeout)
        if self._plane is not None:
            await self._plane.stop()
        await asyncio.to_thread(shutil.rmtree, self._folders.run, ignore_errors=True)

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
            loop.add_signal_handler(number, self._on_signal, number)
        if is_pid_one():
            OrphanReaper(OWN_CHILDREN)

    def _on_signal(self, number: signal.Signals) -> None:
        if number is signal.SIGUSR2:
            self._router.request_replacement()
            return
        if self._is_stopping and number is signal.SIGINT:
            logger.warning("interrupted again: killing every process")
            self._router.kill()
            if self._plane is not None:
                self._plane.fleet.kill()
        self._stop_requested.set()
