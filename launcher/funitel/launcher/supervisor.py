"""The life of one deployment: download, shards and router together, and the way back.

A shard that ends on its own takes its replica with it, which is started again, as often as --max-restarts says; when
the last replica has ended for good, or the router has ended, so does everything. Until the deployment is ready any
child's end does that. A signal stops the router first and then the shards. Knows no model and no HTTP beyond "does it
answer".
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
from funitel.launcher.commands import Commands, download_environ, router_environ
from funitel.launcher.download import Download
from funitel.launcher.health import router_answers
from funitel.launcher.process import Child, relay
from funitel.launcher.replica import Replica, blamed, stop_all, stop_child
from funitel.launcher.resolve import ResolvedSettings, describe, fit_to_model, probe_context
from funitel.proto.errors import FunitelError, ShardFailed

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
WAITING_SECONDS = 10.0  # between two lines that say what is waited for
DOWNLOAD_GRACE_SECONDS = 10.0
IDLE_GRACE_SECONDS = 10.0  # for shards that load or have lost a peer: nothing to finish, and they may hang
HURRY_SECONDS = 5.0  # for a router that is to tell its clients that their time is up
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Probe = Callable[[], Awaitable[bool]]


class Supervisor:
    """Owns the children of one deployment from the first to the last."""

    def __init__(
        self, settings: ResolvedSettings, environ: Mapping[str, str], commands: Commands | None = None
    ) -> None:
        self._settings = settings
        self._environ = environ
        self._commands = commands or Commands()
        self._download: Download | None = None
        self._replicas: list[Replica] = []
        self._router: Child | None = None
        self._asked_to_stop = asyncio.Event()
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

    # Start --------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        started = time.monotonic()
        folder = await self._fetch()
        settings = self._settings = fit_to_model(self._settings, folder)
        logger.info("settings: %s", describe(settings))
        await self._start_shards(folder)
        await self._start_router(folder)  # it answers 503 until the shards answer it
        await self._guarded(self._until_ready(self._probes()))
        await self._guarded(self._until_ready({self._running_router: self._router_answers}))
        self._is_ready = True
        announce(settings, seconds=time.monotonic() - started)
        await self._watch()

    async def _fetch(self) -> Path:
        argv = self._commands.download(self._settings)
        self._download = Download(argv, download_environ(self._settings, self._environ))
        return await self._download.folder()

    async def _start_shards(self, folder: Path) -> None:
        settings = self._settings
        self._replicas = [
            Replica(index, settings, self._environ, self._commands, folder) for index in range(settings.num_replicas)
        ]
        await asyncio.gather(*(replica.start() for replica in self._replicas))

    async def _start_router(self, folder: Path) -> None:
        settings = self._settings
        argv = self._commands.route(settings, folder)
        on_line = relay("router", json_output=settings.json_output)
        self._router = Child("router", argv, router_environ(settings, self._environ), on_line)
        await self._router.start()

    def _probes(self) -> dict[Child, Probe]:
        """How to find out of every shard whether it answers."""
        ranks = [(each, rank) for each in self._replicas for rank in range(len(each.shards))]
        return {replica.shards[rank]: partial(replica.answers, rank) for replica, rank in ranks}

    def _router_answers(self) -> Awaitable[bool]:
        return router_answers(self._settings.hostname, self._settings.port, probe_context(self._settings))

    async def _until_ready(self, probes: dict[Child, Probe]) -> None:
        """Return when every child answers its probe; say every ten seconds which do not."""
        started = last_said = time.monotonic()
        while probes:
            probes = {child: probe for child, probe in probes.items() if not await probe()}
            now = time.monotonic()
            if probes and now - last_said >= WAITING_SECONDS:
                last_said = now
                logger.info("waiting for %s since %.0f s", ", ".join(c.name for c in probes), now - started)
            await asyncio.sleep(POLL_SECONDS if probes else 0)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work`, unless a child ends meanwhile: that is an error."""
        task = asyncio.create_task(work)
        shards = [shard for replica in self._replicas for shard in replica.shards]
        children = [*shards, self._running_router]
        try:
            await asyncio.wait({task, *(child.exited for child in children)}, return_when=asyncio.FIRST_COMPLETED)
            if any(child.has_exited for child in children):
                child = await blamed(shards, self._running_router)
                raise FunitelError(child.epitaph()) if child is self._running_router else ShardFailed(child.epitaph())
            task.result()
        finally:
            task.cancel()

    @property
    def _running_router(self) -> Child:
        assert self._router is not None, "the router was not started"
        return self._router

    # Watch --------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Start replicas again as they end; return never.

        Raises:
            ShardFailed, FunitelError: the last replica has ended for good, or the router has ended.
        """
        router = self._running_router
        serving: dict[asyncio.Task[str], Replica] = {
            asyncio.create_task(each.serve(self._settings.max_restarts)): each for each in self._replicas
        }
        goodbyes: list[asyncio.Task[None]] = []
        try:
            while True:
                await asyncio.wait({router.exited, *serving}, return_when=asyncio.FIRST_COMPLETED)
                ended = {task: replica for task, replica in serving.items() if task.done()}
                if router.has_exited:
                    raise FunitelError(router.epitaph())
                for task, replica in ended.items():
                    del serving[task]
                    if not serving:
                        raise ShardFailed(task.result())
                    count = f"{len(serving)} of {len(self._replicas)} replicas go on"
                    logger.error("a replica is lost: %s; %s", task.result(), count)
                    goodbyes.append(asyncio.create_task(replica.stop(IDLE_GRACE_SECONDS)))
        finally:
            for work in (*serving, *goodbyes):
                work.cancel()
            await asyncio.gather(*serving, *goodbyes, return_exceptions=True)

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
        for replica in self._replicas:
            replica.kill()
        if self._router:
            self._router.kill()
        if self._download:
            self._download.child.kill()

    async def _stop(self, serving: "asyncio.Task[None]") -> None:
        """Stop the router, then the shards; until the router has ended replicas are still started again."""
        self._is_stopping = True
        if not self._is_ready:
            await _cancel(serving)
        if self._download:
            await stop_child(self._download.child, DOWNLOAD_GRACE_SECONDS)
        if self._router:
            await self._stop_router(self._router, serving)
        await _cancel(serving)
        shards = [shard for replica in self._replicas for shard in replica.shards]
        is_idle = not self._is_ready or any(shard.has_exited for shard in shards)
        grace = float(self._settings.graceful_termination_timeout)
        await stop_all(shards, min(grace, IDLE_GRACE_SECONDS) if is_idle else grace)

    async def _stop_router(self, router: Child, serving: "asyncio.Task[None]") -> None:
        """Let the router finish what runs, within the grace period and as long as there is a replica to run on."""
        if not router.has_exited:
            router.ask_to_stop()
            grace = float(self._settings.graceful_termination_timeout)
            await asyncio.wait({router.exited, serving}, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
            if not await router.hurry(HURRY_SECONDS):
                logger.warning("%s did not stop within %g s and was killed", router.name, grace)


async def _cancel(task: "asyncio.Task[None]") -> None:
    """End a task; how it ends is known, or of no interest any more."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
