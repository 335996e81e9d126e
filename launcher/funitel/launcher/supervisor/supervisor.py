"""The life of one deployment: download, shards and router together, upgrades, and the way back.

A shard that ends on its own takes its replica with it, which is started again, as often as --max-restarts says; when
the last replica has ended for good, or the router has ended, so does everything. Until the deployment is ready any
child's end does that. SIGHUP starts another generation of children beside the one that serves, and puts it in its place
once it is ready. Any other signal stops the router first and then the shards. Knows no model and no HTTP beyond "does
it answer".
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from socket import socket

import typer

from funitel.launcher.config.child_commands import Commands, download_environ
from funitel.launcher.config.resolve import ResolvedSettings, describe, fit_to_model
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
class Anew:
    """What another generation is started with; `blamed` makes an error of a message about these settings."""

    settings: ResolvedSettings
    environ: Mapping[str, str]
    blamed: Callable[[str], SettingsError]


Again = Callable[[int], Anew]
"""Reads everything anew for the generation of a number, counted from 0; raises SettingsError."""


class Supervisor:
    """Owns the children of one deployment from the first to the last."""

    def __init__(
        self,
        settings: ResolvedSettings,
        environ: Mapping[str, str],
        listeners: Sequence[socket],
        again: Again,
        commands: Commands | None = None,
    ) -> None:
        """Describe the deployment; `run` makes it.

        Args:
            settings: the launcher's, resolved.
            environ: its environment.
            listeners: sockets that its routers take connections from.
            again: what an upgrade asks for its settings.
            commands: what the children run.
        """
        self._settings = settings
        self._environ = environ
        self._listeners = listeners
        self._again = again
        self._commands = commands or Commands()
        self._download: Download | None = None
        self._generations: dict[Deployment, asyncio.Task[None]] = {}  # oldest first, each with its watch
        self._num_generations = 0
        self._handing_over: set[asyncio.Task[None]] = set()
        self._asked_to_stop = asyncio.Event()
        self._asked_to_upgrade = asyncio.Event()
        self._has_terminal = sys.stderr.isatty()
        self._is_ready = False
        self._is_stopping = False

    async def run(self) -> None:
        """Serve until a signal (then return) or until a child ends for good (then raise).

        Raises:
            ShardFailed, FunitelError: a shard, or the router, ended on its own.
            typer.Exit: the download failed and has said why.
        """
        self._listen_to_signals()
        serving = asyncio.create_task(self._serve())
        stopping = asyncio.create_task(self._asked_to_stop.wait())
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
        announce(current.settings, seconds=time.monotonic() - started)
        while True:
            asked = asyncio.create_task(self._asked_to_upgrade.wait())
            watching = self._generations[current]
            await asyncio.wait({asked, watching}, return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
            if watching.done():
                watching.result()
            self._asked_to_upgrade.clear()
            current = await self._upgrade(current, watching)

    async def _start(self, settings: ResolvedSettings, environ: Mapping[str, str]) -> Deployment:
        """Start a generation and return it once it serves."""
        folder = await self._fetch(settings, environ)
        settings = fit_to_model(settings, folder)
        logger.info("settings: %s", describe(settings))
        generation = Deployment(settings, environ, self._commands, folder, self._listeners)
        starting = self._generations[generation] = asyncio.create_task(generation.start(is_first=not self._is_ready))
        await starting
        self._generations[generation] = asyncio.create_task(generation.watch())
        return generation

    async def _fetch(self, settings: ResolvedSettings, environ: Mapping[str, str]) -> Path:
        argv = self._commands.download(settings)
        self._download = Download(argv, download_environ(settings, environ))
        return await self._download.folder()

    # Upgrades -----------------------------------------------------------------------------------------------

    async def _upgrade(self, current: Deployment, watching: "asyncio.Task[None]") -> Deployment:
        """Put another generation in the place of the current one; where that cannot be, this one goes on."""
        logger.info("upgrading: starting beside what serves")
        began = time.monotonic()
        starting = asyncio.create_task(self._start_another())
        try:
            await asyncio.wait({starting, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                watching.result()  # raises: what served has ended
            fresh = starting.result()
        except asyncio.CancelledError:
            await end(starting)
            raise
        except (FunitelError, typer.Exit) as error:
            await end(starting)
            await self._give_up(current)
            if watching.done():
                raise
            reason = error.message if isinstance(error, FunitelError) else "the model could not be fetched"
            logger.error("the upgrade has failed, what served goes on: %s", reason)
            return current
        logs.configure("launcher", json_output=fresh.settings.json_output, level=fresh.settings.log_level)
        logger.info("upgraded in %.1f s: %s", time.monotonic() - began, fresh.settings.served_model_name)
        farewell = asyncio.create_task(self._retire(current, watching))
        self._handing_over.add(farewell)
        farewell.add_done_callback(self._handing_over.discard)
        return fresh

    async def _start_another(self) -> Deployment:
        """Start a generation by what the settings are now."""
        self._num_generations += 1
        anew = self._again(self._num_generations)
        try:
            return await self._start(anew.settings, anew.environ)
        except SettingsError as error:
            raise anew.blamed(error.message) from error

    async def _give_up(self, current: Deployment) -> None:
        """Stop a generation that was to take the place of the current one."""
        for generation, task in [each for each in self._generations.items() if each[0] is not current]:
            if not generation.is_ready:
                await generation.stop(task)
                del self._generations[generation]

    async def _retire(self, old: Deployment, watching: "asyncio.Task[None]") -> None:
        await old.hand_over(watching)
        del self._generations[old]
        logger.info("what served before the upgrade has ended")

    # Stop ---------------------------------------------------------------------------------------------------

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if number is signal.SIGHUP and self._is_ready and not self._has_lost_terminal():
            self._asked_to_upgrade.set()
            return
        if self._is_stopping and number is signal.SIGINT:
            logger.warning("interrupted again: killing every process")
            self._kill()
        self._asked_to_stop.set()

    def _has_lost_terminal(self) -> bool:
        """Whether the terminal that this was started in is gone: then SIGHUP means what it has always meant."""
        return self._has_terminal and not os.isatty(sys.stderr.fileno())

    def _kill(self) -> None:
        for generation in self._generations:
            generation.kill()
        if self._download:
            self._download.child.kill()

    async def _stop(self, serving: "asyncio.Task[None]") -> None:
        """Stop every generation; the download with them."""
        self._is_stopping = True
        await end(serving)
        if self._download:
            await stop_child(self._download.child, DOWNLOAD_GRACE_SECONDS)
        await asyncio.gather(*(generation.stop(task) for generation, task in tuple(self._generations.items())))
        for listener in self._listeners:
            listener.close()
        for farewell in tuple(self._handing_over):  # each leaves as it ends
            await end(farewell)
