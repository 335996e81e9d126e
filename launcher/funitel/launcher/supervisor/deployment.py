"""The shards of a model and the router in front of them, of one start: an upgrade puts others in their place."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from socket import socket
from typing import Any

from funitel.launcher.config.child_commands import Commands, router_environ
from funitel.launcher.config.resolve import ResolvedSettings, probe_context
from funitel.launcher.config.sockets import remove_sockets
from funitel.launcher.supervisor.health import router_answers
from funitel.launcher.supervisor.process import Child, relay
from funitel.launcher.supervisor.replica import ReplicaProcesses, blamed, stop_all
from funitel.proto.errors import FunitelError, ShardFailed

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
WAITING_SECONDS = 10.0  # between two lines that say what is waited for
IDLE_GRACE_SECONDS = 10.0  # for shards that load or have lost a peer: nothing to finish, and they may hang
HURRY_SECONDS = 5.0  # for a router that is to tell its clients that their time is up

Probe = Callable[[], Awaitable[bool]]


class Deployment:
    """Children that are started, watched and stopped together."""

    def __init__(
        self,
        settings: ResolvedSettings,
        environ: Mapping[str, str],
        commands: Commands,
        folder: Path,
        listeners: Sequence[socket],
    ) -> None:
        """Describe it; `start` makes its processes.

        Args:
            settings: fitted to the model.
            environ: the launcher's own.
            commands: what the children run.
            folder: of the model.
            listeners: sockets that the router takes connections from.
        """
        self.settings = settings
        self.is_ready = False
        self._replicas = [
            ReplicaProcesses(index, settings, environ, commands, folder) for index in range(settings.num_replicas)
        ]
        self._router_argv = partial(commands.route, settings, folder)
        self._router_environ = router_environ(settings, environ)
        self._listeners = listeners
        self._router: Child | None = None

    async def start(self, *, is_first: bool) -> None:
        """Start every child, and return once the router serves.

        The first router answers from the beginning, with 503 until it serves; a later one takes no connection before.

        Raises:
            ShardFailed, FunitelError: a child has ended.
        """
        await asyncio.gather(*(replica.start() for replica in self._replicas))
        read_end, write_end = os.pipe()
        try:
            await self._start_router(write_end, is_first=is_first)
        finally:
            os.close(write_end)
        with os.fdopen(read_end, "rb", buffering=0) as ready:
            await self._guarded(self._until_ready(self._probes()))
            if is_first:
                await self._guarded(self._until_ready({self._running_router: self._router_answers}))
            else:
                await self._guarded(_told(ready.fileno()))
        self.is_ready = True

    async def _start_router(self, write_end: int, *, is_first: bool) -> None:
        descriptors = tuple(listener.fileno() for listener in self._listeners)
        ready = None if is_first else write_end
        argv = self._router_argv(descriptors, ready)
        on_line = relay("router", json_output=self.settings.json_output)
        passed = descriptors if ready is None else (*descriptors, ready)
        self._router = Child("router", argv, self._router_environ, on_line, pass_fds=passed)
        await self._router.start()

    def _probes(self) -> dict[Child, Probe]:
        """How to find out of every shard whether it answers."""
        ranks = [(each, rank) for each in self._replicas for rank in range(len(each.shards))]
        return {replica.shards[rank]: partial(replica.answers, rank) for replica, rank in ranks}

    def _router_answers(self) -> Awaitable[bool]:
        return router_answers(self.settings.hostname, self.settings.port, probe_context(self.settings))

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
        children = [*self._shards, self._running_router]
        try:
            await asyncio.wait({task, *(child.exited for child in children)}, return_when=asyncio.FIRST_COMPLETED)
            if any(child.has_exited for child in children):
                child = await blamed(self._shards, self._running_router)
                raise FunitelError(child.epitaph()) if child is self._running_router else ShardFailed(child.epitaph())
            task.result()
        finally:
            task.cancel()

    @property
    def _shards(self) -> list[Child]:
        return [shard for replica in self._replicas for shard in replica.shards]

    @property
    def _running_router(self) -> Child:
        assert self._router is not None, "the router was not started"
        return self._router

    async def watch(self) -> None:
        """Start replicas again as they end; return never.

        Raises:
            ShardFailed, FunitelError: the last replica has ended for good, or the router has ended.
        """
        router = self._running_router
        serving: dict[asyncio.Task[str], ReplicaProcesses] = {
            asyncio.create_task(each.serve(self.settings.max_restarts)): each for each in self._replicas
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

    async def hand_over(self, watching: "asyncio.Task[None]") -> None:
        """Let the router serve what has reached it, and stop all once it has; others are where new clients go."""
        router = self._running_router
        router.ask_to_hand_over()
        await asyncio.wait({router.exited, watching}, return_when=asyncio.FIRST_COMPLETED)
        await self.stop(watching)

    async def stop(self, watching: "asyncio.Task[None]") -> None:
        """Stop the router, then the shards; until the router has ended, `watching` starts replicas again."""
        if self._router:
            await self._stop_router(self._router, watching)
        await end(watching)
        is_idle = not self.is_ready or any(shard.has_exited for shard in self._shards)
        grace = float(self.settings.graceful_termination_timeout)
        await stop_all(self._shards, min(grace, IDLE_GRACE_SECONDS) if is_idle else grace)
        remove_sockets(self.settings.shard_uds_path, self.settings.num_shard, self.settings.num_replicas)

    async def _stop_router(self, router: Child, watching: "asyncio.Task[None]") -> None:
        """Let the router finish what runs, within the grace period and as long as there is a replica to run on."""
        if not router.has_exited:
            router.ask_to_stop()
            grace = float(self.settings.graceful_termination_timeout)
            await asyncio.wait({router.exited, watching}, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
            if not await router.hurry(HURRY_SECONDS):
                logger.warning("%s did not stop within %g s and was killed", router.name, grace)

    def kill(self) -> None:
        """End every child at once."""
        for child in (*self._shards, *([self._router] if self._router else [])):
            child.kill()


async def _told(descriptor: int) -> None:
    """Return once a child has written something; never, where it has ended before."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(descriptor)
    if not os.read(descriptor, 1):
        await asyncio.Event().wait()


async def end(task: "asyncio.Task[Any]") -> None:
    """End a task; how it ends is known, or of no interest any more."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
