"""The life of one deployment: download, shards and router together, and the way back.

A shard that ends on its own takes its replica with it; the last replica, or the router, everything. Until the
deployment is ready any child does. A signal stops the router first and then the shards. Knows no model and no HTTP
beyond "does it answer".
"""

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from funitel.launcher.announce import announce
from funitel.launcher.commands import Commands, download_environ, router_environ, shard_environ
from funitel.launcher.download import Download
from funitel.launcher.health import router_answers, shard_answers
from funitel.launcher.process import Child, relay
from funitel.launcher.replicas import environ_of_replica, settings_of_replica
from funitel.launcher.resolve import ResolvedSettings, describe, fit_to_model
from funitel.launcher.sockets import path_of_replica, socket_of
from funitel.proto.errors import FunitelError, ShardFailed

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
WAITING_SECONDS = 10.0  # between two lines that say what is waited for
SETTLE_SECONDS = 1.0  # for the other ranks to tell the reason too, once one has ended
DOWNLOAD_GRACE_SECONDS = 10.0
IDLE_GRACE_SECONDS = 10.0  # for shards that load or have lost a peer: nothing to finish, and they may hang
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """Owns the children of one deployment from the first to the last."""

    def __init__(
        self, settings: ResolvedSettings, environ: Mapping[str, str], commands: Commands | None = None
    ) -> None:
        self._settings = settings
        self._environ = environ
        self._commands = commands or Commands()
        self._download: Download | None = None
        self._replicas: list[list[Child]] = []  # those that serve, each its shards in rank order
        self._lost: list[Child] = []  # shards of replicas that serve no more
        self._goodbyes: set[asyncio.Task[None]] = set()
        self._router: Child | None = None
        self._asked_to_stop = asyncio.Event()
        self._is_ready = False
        self._is_stopping = False

    async def run(self) -> None:
        """Serve until a signal (then return) or until a child ends (then raise).

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
            await self._stop(serving, stopping)

    # Start --------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        started = time.monotonic()
        folder = await self._fetch()
        settings = self._settings = fit_to_model(self._settings, folder)
        logger.info("settings: %s", describe(settings))
        await self._start_shards(folder)
        await self._start_router(folder)  # it answers 503 until the shards answer it
        await self._guarded(self._until_ready(self._shard_probes()))
        await self._guarded(self._until_ready({self._running_router: self._probe_router}))
        self._is_ready = True
        announce(settings, seconds=time.monotonic() - started)
        await self._watch()

    async def _fetch(self) -> Path:
        argv = self._commands.download(self._settings)
        self._download = Download(argv, download_environ(self._settings, self._environ))
        return await self._download.folder()

    async def _start_shards(self, folder: Path) -> None:
        for replica in range(self._settings.num_replicas):
            settings = settings_of_replica(self._settings, replica)
            inherited = environ_of_replica(self._settings, self._environ, replica)
            prefix = f"replica {replica} " if self._settings.num_replicas > 1 else ""
            shards = []
            for rank in range(settings.num_shard):
                argv = self._commands.shard(settings, folder, rank)
                on_line = relay(f"{prefix}shard {rank}", json_output=settings.json_output)
                environ = shard_environ(settings, inherited, rank)
                shards.append(Child(f"{prefix}shard rank {rank}", argv, environ, on_line))
            self._replicas.append(shards)
        await asyncio.gather(*(shard.start() for shard in self._shards()))

    async def _start_router(self, folder: Path) -> None:
        settings = self._settings
        argv = self._commands.route(settings, folder)
        on_line = relay("router", json_output=settings.json_output)
        self._router = Child("router", argv, router_environ(settings, self._environ), on_line)
        await self._router.start()

    def _shards(self) -> list[Child]:
        """The shards of every replica that serves."""
        return [shard for replica in self._replicas for shard in replica]

    def _shard_probes(self) -> dict[Child, Callable[[], Awaitable[bool]]]:
        bases = (path_of_replica(self._settings.shard_uds_path, replica) for replica in range(len(self._replicas)))
        return {
            shard: partial(shard_answers, socket_of(base, rank))
            for base, replica in zip(bases, self._replicas, strict=True)
            for rank, shard in enumerate(replica)
        }

    def _probe_router(self) -> Awaitable[bool]:
        return router_answers(self._settings.hostname, self._settings.port)

    @property
    def _running_router(self) -> Child:
        assert self._router is not None, "the router was not started"
        return self._router

    async def _until_ready(self, probes: dict[Child, Callable[[], Awaitable[bool]]]) -> None:
        """Return when every child answers its probe; say every ten seconds which do not."""
        started = last_said = time.monotonic()
        while probes:
            probes = {child: probe for child, probe in probes.items() if not await probe()}
            now = time.monotonic()
            if probes and now - last_said >= WAITING_SECONDS:
                last_said = now
                logger.info("waiting for %s since %.0f s", ", ".join(c.name for c in probes), now - started)
            await asyncio.sleep(POLL_SECONDS if probes else 0)

    # Watch --------------------------------------------------------------------------------------------------

    async def _guarded(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do `work`, unless a child ends meanwhile: that is an error."""
        task = asyncio.create_task(work)
        try:
            exits = [child.exited for child in self._children()]
            await asyncio.wait({task, *exits}, return_when=asyncio.FIRST_COMPLETED)
            if any(child.has_exited for child in self._children()):
                raise await self._failure()
            task.result()
        finally:
            task.cancel()

    async def _failure(self) -> FunitelError:
        blamed = await _blamed(self._shards(), self._router)
        return FunitelError(blamed.epitaph()) if blamed is self._router else ShardFailed(blamed.epitaph())

    async def _watch(self) -> None:
        """Let go of replicas as they end; return never.

        Raises:
            ShardFailed, FunitelError: the last replica, or the router, ended.
        """
        while True:
            await asyncio.wait([child.exited for child in self._children()], return_when=asyncio.FIRST_COMPLETED)
            lost = [replica for replica in self._replicas if any(shard.has_exited for shard in replica)]
            if self._running_router.has_exited or len(lost) == len(self._replicas):
                raise await self._failure()
            for replica in lost:
                await self._let_go(replica)

    async def _let_go(self, replica: list[Child]) -> None:
        """Say why a replica is lost, and stop what is left of it; the router moves its requests to the others."""
        self._replicas.remove(replica)
        self._lost += replica
        blamed = await _blamed(replica)
        logger.error(
            "a replica is lost: %s; %d of %d replicas go on",
            blamed.epitaph(),
            len(self._replicas),
            self._settings.num_replicas,
        )
        goodbye = asyncio.create_task(_stop_all(replica, IDLE_GRACE_SECONDS))
        self._goodbyes.add(goodbye)
        goodbye.add_done_callback(self._goodbyes.discard)

    def _children(self) -> list[Child]:
        """Children that shall not end, once they were started."""
        return [*self._shards(), *([self._router] if self._router else [])]

    # Stop ---------------------------------------------------------------------------------------------------

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._is_stopping and number is signal.SIGINT:
            logger.warning("interrupted again: killing every process")
            self._kill()
        self._asked_to_stop.set()

    def _kill(self) -> None:
        for child in [*self._children(), *self._lost, *([self._download.child] if self._download else [])]:
            child.kill()

    async def _stop(self, *tasks: "asyncio.Task[Any]") -> None:
        self._is_stopping = True
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        grace = float(self._settings.graceful_termination_timeout)
        is_idle = not self._is_ready or any(shard.has_exited for shard in self._shards())
        if self._download:
            await _stop_child(self._download.child, DOWNLOAD_GRACE_SECONDS)
        if self._router:
            await _stop_child(self._router, grace)
        shard_grace = min(grace, IDLE_GRACE_SECONDS) if is_idle else grace
        await asyncio.gather(_stop_all([*self._shards(), *self._lost], shard_grace), *self._goodbyes)


async def _blamed(shards: list[Child], router: Child | None = None) -> Child:
    """Find the child to blame, as one has ended: who was killed, or else the lowest rank that gave a reason."""
    children = [*shards, *([router] if router else [])]
    first = next(child for child in children if child.has_exited)
    await asyncio.wait([child.exited for child in children], timeout=SETTLE_SECONDS)
    dead = [shard for shard in shards if shard.has_exited]
    told = [shard for shard in dead if shard.error]
    return first if first.exited.result() < 0 else (told or dead or [first])[0]


async def _stop_all(children: list[Child], grace_seconds: float) -> None:
    await asyncio.gather(*(_stop_child(child, grace_seconds) for child in children))


async def _stop_child(child: Child, grace_seconds: float) -> None:
    if not await child.stop(grace_seconds):
        logger.warning("%s did not stop within %g s and was killed", child.name, grace_seconds)
