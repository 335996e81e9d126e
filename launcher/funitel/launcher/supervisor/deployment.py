"""Run one deployment: its replicas and its router are started, watched and stopped; an upgrade starts another."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from socket import socket
from typing import Any, TypeVar

from funitel.launcher.config.child_commands import Commands, router_environ
from funitel.launcher.config.resolve import ResolvedSettings, describe, fit_to_model, probe_context
from funitel.launcher.config.sockets import remove_sockets
from funitel.launcher.processes.health import router_answers
from funitel.launcher.processes.relay import relay
from funitel.launcher.supervisor.process import Child
from funitel.launcher.supervisor.replica import ReplicaProcesses, find_culprit, stop_all
from funitel.proto.errors import FunitelError, ShardFailed

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
WAITING_SECONDS = 10.0  # between two log lines about children that are not ready
IDLE_GRACE_SECONDS = 10.0  # for shards that load or have lost a peer: they have no work to finish, and may hang
STOP_AGAIN_SECONDS = 5.0  # for a router past its grace period, to send errors to its clients

T = TypeVar("T")
Probe = Callable[[], Awaitable[bool]]


class Deployment:
    """Child processes that are started, watched and stopped together."""

    def __init__(
        self,
        settings: ResolvedSettings,
        environ: Mapping[str, str],
        commands: Commands,
        listeners: Sequence[socket],
        control_socket: Path | None = None,
    ) -> None:
        """Prepare the deployment; `start` starts its processes.

        Args:
            settings: resolved, and not yet fitted to the model.
            environ: the launcher's.
            commands: of the children.
            listeners: sockets on which the router accepts connections.
            control_socket: of the control plane, for the router.
        """
        self.settings = settings
        self.is_ready = False
        self.replicas = [ReplicaProcesses(index, settings, environ, commands) for index in range(settings.num_replicas)]
        self._commands = commands
        self._router_environ = router_environ(settings, environ)
        self._listeners = listeners
        self._control_socket = control_socket
        self._router: Child | None = None

    async def start(self, fetch: Callable[[], Awaitable[Path]], *, is_first: bool) -> None:
        """Start every child, and return once the router is ready.

        The shards of the first deployment import what they need while `fetch` makes the model present; those of a
        later one, beside which another serves, are started then. The first router accepts connections at once and
        answers 503 until ready; a later one accepts none before.

        Raises:
            ShardFailed, FunitelError: a child has ended.
            SettingsError: the model does not fit the settings.
        """
        if is_first:
            await self._start_shards()
        folder = await self._guarded(fetch())
        self.settings = fit_to_model(self.settings, folder)
        logger.info("settings: %s", describe(self.settings))
        for replica in self.replicas:
            replica.load(folder)
        if not is_first:
            await self._start_shards()
        read_end, write_end = os.pipe()
        try:
            await self._start_router(folder, write_end, is_first=is_first)
        finally:
            os.close(write_end)
        with os.fdopen(read_end, "rb", buffering=0) as ready:
            await self._guarded(self._until_ready(ready.fileno(), is_first=is_first))
        self.is_ready = True

    async def _start_shards(self) -> None:
        await asyncio.gather(*(replica.start() for replica in self.replicas))

    async def _start_router(self, folder: Path, write_end: int, *, is_first: bool) -> None:
        descriptors = tuple(listener.fileno() for listener in self._listeners)
        argv = self._commands.route(
            self.settings,
            folder,
            descriptors,
            write_end,
            accepts_early=is_first,
            control_socket=self._control_socket,
        )
        on_line = relay("router", json_output=self.settings.json_output)
        self._router = Child("router", argv, self._router_environ, on_line, pass_fds=(*descriptors, write_end))
        await self._router.start()

    def _probes(self) -> dict[Child, Probe]:
        """The health check of every shard."""
        ranks = [(each, rank) for each in self.replicas for rank in range(len(each.shards))]
        return {replica.shards[rank]: partial(replica.answers, rank) for replica, rank in ranks}

    def _router_answers(self) -> Awaitable[bool]:
        return router_answers(self.settings.hostname, self.settings.port, probe_context(self.settings))

    async def _until_ready(self, descriptor: int, *, is_first: bool) -> None:
        """Return once every shard answers and the router has written to the pipe; the first answers over HTTP too."""
        told = asyncio.create_task(_until_readable(descriptor))
        try:
            await self._until_answered(self._probes(), told)
            await told
            if is_first:
                await self._until_answered({self._running_router: self._router_answers}, told)
        finally:
            told.cancel()

    async def _until_answered(self, probes: dict[Child, Probe], told: "asyncio.Task[None]") -> None:
        """Return when every health check succeeds; they are made again in intervals, and once the router is ready.

        Those that do not succeed are logged every ten seconds.
        """
        started = last_logged = time.monotonic()
        while probes := {child: probe for child, probe in probes.items() if not await probe()}:
            now = time.monotonic()
            if now - last_logged >= WAITING_SECONDS:
                last_logged = now
                logger.info("waiting for %s since %.0f s", ", ".join(c.name for c in probes), now - started)
            await (asyncio.sleep(POLL_SECONDS) if told.done() else asyncio.wait({told}, timeout=POLL_SECONDS))

    async def _guarded(self, work: Awaitable[T]) -> T:
        """The result of `work`; the end of a child meanwhile is an error."""
        task = asyncio.ensure_future(work)
        children = [*self._shards, *([self._router] if self._router else [])]
        try:
            await asyncio.wait({task, *(child.exited for child in children)}, return_when=asyncio.FIRST_COMPLETED)
            if any(child.has_exited for child in children):
                child = await find_culprit(self._shards, self._router)
                raise (FunitelError if child is self._router else ShardFailed)(child.exit_reason())
            return task.result()
        finally:
            task.cancel()

    @property
    def _shards(self) -> list[Child]:
        return [shard for replica in self.replicas for shard in replica.shards]

    @property
    def _running_router(self) -> Child:
        assert self._router is not None, "the router was not started"
        return self._router

    async def watch(self) -> None:
        """Restart replicas as they end; never return.

        Raises:
            ShardFailed, FunitelError: no replica is left after its restarts, or the router has ended.
        """
        router = self._running_router
        serving: dict[asyncio.Task[str], ReplicaProcesses] = {
            asyncio.create_task(each.serve(self.settings.max_restarts)): each for each in self.replicas
        }
        stopping: list[asyncio.Task[None]] = []
        try:
            while True:
                await asyncio.wait({router.exited, *serving}, return_when=asyncio.FIRST_COMPLETED)
                ended = {task: replica for task, replica in serving.items() if task.done()}
                if router.has_exited:
                    raise FunitelError(router.exit_reason())
                for task, replica in ended.items():
                    del serving[task]
                    if not serving:
                        raise ShardFailed(task.result())
                    count = f"{len(serving)} of {len(self.replicas)} replicas go on"
                    logger.error("a replica is lost: %s; %s", task.result(), count)
                    stopping.append(asyncio.create_task(replica.stop(IDLE_GRACE_SECONDS)))
        finally:
            for work in (*serving, *stopping):
                work.cancel()
            await asyncio.gather(*serving, *stopping, return_exceptions=True)

    async def drain(self, watching: "asyncio.Task[None]") -> None:
        """Let the router finish its requests, then stop everything; another deployment takes new requests."""
        router = self._running_router
        router.request_drain()
        await asyncio.wait({router.exited, watching}, return_when=asyncio.FIRST_COMPLETED)
        await self.stop(watching)

    async def stop(self, watching: "asyncio.Task[None]") -> None:
        """Stop the router, then the shards; until the router has ended, `watching` restarts replicas."""
        if self._router:
            await self._stop_router(self._router, watching)
        await end(watching)
        for replica in self.replicas:
            replica.forget_pipes()
        is_idle = not self.is_ready or any(shard.has_exited for shard in self._shards)
        grace = float(self.settings.graceful_termination_timeout)
        await stop_all(self._shards, min(grace, IDLE_GRACE_SECONDS) if is_idle else grace)
        remove_sockets(self.settings.shard_uds_path, self.settings.num_shard, self.settings.num_replicas)

    async def _stop_router(self, router: Child, watching: "asyncio.Task[None]") -> None:
        """Let the router finish its requests, within the grace period and while a replica is left."""
        if not router.has_exited:
            router.request_stop()
            grace = self.settings.shutdown_delay + self.settings.graceful_termination_timeout
            # A start that was cancelled has no watch task; its router may serve already, and needs each of its shards.
            lost = {shard.exited for shard in self._shards} if watching.done() else {watching}
            await asyncio.wait({router.exited, *lost}, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
            if not await router.stop_again(STOP_AGAIN_SECONDS):
                logger.warning("%s did not stop within %g s and was killed", router.name, grace)

    def kill(self) -> None:
        """End every child at once."""
        for child in (*self._shards, *([self._router] if self._router else [])):
            child.kill()


async def _until_readable(descriptor: int) -> None:
    """Return once a child has written to the pipe; never if it ends first."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(descriptor)
    if not os.read(descriptor, 1):
        await asyncio.Event().wait()


async def end(task: "asyncio.Task[Any]") -> None:
    """Cancel a task and discard its result."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
