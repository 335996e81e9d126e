"""Run one deployment: its replicas and its router are started, watched and stopped; an upgrade starts another."""

import asyncio
import dataclasses
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
from funitel.launcher.supervisor.keeper_process import KeeperProcess
from funitel.launcher.supervisor.lasting_child import ChildMaker, record_of
from funitel.launcher.supervisor.leftovers import fingerprint
from funitel.launcher.supervisor.process import Child
from funitel.launcher.supervisor.replica import ReplicaProcesses, find_culprit, stop_all
from funitel.launcher.supervisor.router_process import ServingRouter, until_readable
from funitel.proto.errors import FunitelError, ShardFailed
from funitel.proto.process.deployment_file import runs

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
WAITING_SECONDS = 10.0  # between two log lines about children that are not ready
IDLE_GRACE_SECONDS = 10.0  # for shards that load or have lost a peer: they have no work to finish, and may hang
STOP_AGAIN_SECONDS = 5.0  # for a router past its grace period, to send errors to its clients

T = TypeVar("T")
Probe = Callable[[], Awaitable[bool]]


@dataclasses.dataclass(frozen=True, slots=True)
class RouterSockets:
    """By what clients and the control plane reach a router.

    Attributes:
        listeners: sockets on which it accepts connections.
        keeper: that accepts them in its place.
        control: of the control plane.
    """

    listeners: Sequence[socket] = ()
    keeper: KeeperProcess | None = None
    control: Path | None = None


class Deployment:
    """Child processes that are started, watched and stopped together."""

    def __init__(
        self,
        settings: ResolvedSettings,
        environ: Mapping[str, str],
        commands: Commands,
        children: ChildMaker,
        sockets: RouterSockets,
        number: int = 0,
    ) -> None:
        """Prepare the deployment; `start` or `adopt` gives it processes.

        Args:
            settings: resolved, and not yet fitted to the model.
            environ: the launcher's.
            commands: of the children.
            children: makes them.
            sockets: of the router.
            number: of the deployment; each upgrade starts another.
        """
        self.settings = settings
        self.number = number
        self.is_ready = False
        self.replicas = [
            ReplicaProcesses(index, settings, environ, commands, children) for index in range(settings.num_replicas)
        ]
        self._fingerprint = fingerprint(settings)
        self._commands = commands
        self._children = children = dataclasses.replace(children, json_output=settings.json_output)
        self._router_environ = router_environ(settings, environ)
        self._sockets = sockets
        self._folder: Path | None = None
        self._router = ServingRouter(
            self._make_router,
            settings.max_restarts,
            sockets.keeper,
            children.on_change,
        )

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
        self._folder = folder = await self._guarded(fetch())
        self.settings = fit_to_model(self.settings, folder)
        logger.info("settings: %s", describe(self.settings))
        for replica in self.replicas:
            replica.load(folder)
        if not is_first:
            await self._start_shards()
        try:
            await self._start_router(is_first=is_first)
        except FunitelError:
            if not self._router.is_refused:
                raise
            self._router.current = None
            await self._guarded(self._until_answered(self._probes()))  # no connection is accepted from here on
            await self._router.replace_keeper()
            await self._start_router(is_first=is_first)
        self.is_ready = True

    async def _start_router(self, *, is_first: bool) -> None:
        """Start the router, and return once it is ready; raises ShardFailed, FunitelError where a child has ended."""
        read_end = await self._router.start(accepts_early=is_first)
        with os.fdopen(read_end, "rb", buffering=0) as ready:
            await self._guarded(self._until_ready(ready.fileno(), is_first=is_first))

    @property
    def record(self) -> Mapping[str, Any]:
        """What `adopt` of another launcher needs, and by which it decides."""
        return {
            "number": self.number,
            "fingerprint": self._fingerprint,
            "is_ready": self.is_ready,
            "folder": str(self._folder),
            "router": record_of(self._router.current),
            "replacement": [record_of(child) for child in self._router.processes[1:]],
            "replicas": [replica.records for replica in self.replicas],
        }

    def adopt(self, record: Mapping[str, Any]) -> None:
        """Go on with the processes of an earlier launcher, which were ready; those that have ended are started again.

        Raises:
            SettingsError: as `start`.
        """
        self._folder = folder = Path(record["folder"])
        self.settings = fit_to_model(self.settings, folder)
        for replica, shards in zip(self.replicas, record["replicas"], strict=True):
            replica.adopt(folder, shards)
        routers = [record["router"], *record["replacement"]]
        running = next(filter(runs, routers), routers[0])
        self._router.adopt(self._children.adopt("router", running))
        self.is_ready = True

    def replace_router(self) -> None:
        """Have another router of the same settings take over from the current one."""
        self._router.request_replacement()

    async def _start_shards(self) -> None:
        await asyncio.gather(*(replica.start() for replica in self.replicas))

    def _make_router(self, ready_fd: int, accepts_early: bool) -> Child:
        assert self._folder is not None, "the router comes after the model"
        keeper = self._sockets.keeper
        descriptors = () if keeper is not None else tuple(each.fileno() for each in self._sockets.listeners)
        argv = self._commands.route(
            self.settings,
            self._folder,
            descriptors,
            ready_fd,
            accepts_early=accepts_early,
            control_socket=self._sockets.control,
            keeper=None if keeper is None else keeper.path,
            generation=self.number,
            deployment_file=self._children.deployment_file,
        )
        return self._children.make("router", "router", argv, self._router_environ, (*descriptors, ready_fd))

    def _probes(self) -> dict[Child, Probe]:
        """The health check of every shard."""
        ranks = [(each, rank) for each in self.replicas for rank in range(len(each.shards))]
        return {replica.shards[rank]: partial(replica.answers, rank) for replica, rank in ranks}

    def _router_answers(self) -> Awaitable[bool]:
        return router_answers(self.settings.hostname, self.settings.port, probe_context(self.settings))

    async def _until_ready(self, descriptor: int, *, is_first: bool) -> None:
        """Return once every shard answers and the router has written to the pipe; the first answers over HTTP too."""
        told = asyncio.create_task(until_readable(descriptor))
        try:
            await self._until_answered(self._probes(), told)
            await told
            if is_first:
                await self._until_answered({self._router.running: self._router_answers}, told)
        finally:
            told.cancel()

    async def _until_answered(self, probes: dict[Child, Probe], told: "asyncio.Task[None] | None" = None) -> None:
        """Return when every health check succeeds; they are made again in intervals, and once the router is ready.

        Those that do not succeed are logged every ten seconds.
        """
        started = last_logged = time.monotonic()
        while probes := {child: probe for child, probe in probes.items() if not await probe()}:
            now = time.monotonic()
            if now - last_logged >= WAITING_SECONDS:
                last_logged = now
                logger.info("waiting for %s since %.0f s", ", ".join(c.name for c in probes), now - started)
            if told is None or told.done():
                await asyncio.sleep(POLL_SECONDS)
            else:
                await asyncio.wait({told}, timeout=POLL_SECONDS)

    async def _guarded(self, work: Awaitable[T]) -> T:
        """The result of `work`; the end of a child meanwhile is an error."""
        task = asyncio.ensure_future(work)
        router = self._router.current
        children = [*self._shards, *([router] if router else [])]
        try:
            await asyncio.wait({task, *(child.exited for child in children)}, return_when=asyncio.FIRST_COMPLETED)
            if any(child.has_exited for child in children):
                child = await find_culprit(self._shards, router)
                raise (FunitelError if child is router else ShardFailed)(child.exit_reason())
            return task.result()
        finally:
            task.cancel()

    @property
    def _shards(self) -> list[Child]:
        return [shard for replica in self.replicas for shard in replica.shards]

    async def watch(self) -> None:
        """Restart replicas and the router as they end; never return.

        Raises:
            ShardFailed, FunitelError: no replica, or no router, is left after its restarts.
        """
        routing = asyncio.create_task(self._router.serve())
        serving: dict[asyncio.Task[str], ReplicaProcesses] = {
            asyncio.create_task(each.serve(self.settings.max_restarts)): each for each in self.replicas
        }
        stopping: list[asyncio.Task[None]] = []
        try:
            while True:
                await asyncio.wait({routing, *serving}, return_when=asyncio.FIRST_COMPLETED)
                ended = {task: replica for task, replica in serving.items() if task.done()}
                if routing.done():
                    raise FunitelError(routing.result())
                for task, replica in ended.items():
                    del serving[task]
                    if not serving:
                        raise ShardFailed(task.result())
                    count = f"{len(serving)} of {len(self.replicas)} replicas go on"
                    logger.error("a replica is lost: %s; %s", task.result(), count)
                    stopping.append(asyncio.create_task(replica.stop(IDLE_GRACE_SECONDS)))
        finally:
            for work in (routing, *serving, *stopping):
                work.cancel()
            await asyncio.gather(routing, *serving, *stopping, return_exceptions=True)

    async def drain(self, watching: "asyncio.Task[None]") -> None:
        """Let the router finish its requests, then stop everything; another deployment takes new requests."""
        finishing = asyncio.create_task(self._router.finish(Child.request_drain, follows=True))
        try:
            await asyncio.wait({finishing, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end(finishing)
        await self.stop(watching)

    async def stop(self, watching: "asyncio.Task[None]") -> None:
        """Stop the router, then the shards; until the router has ended, `watching` restarts replicas."""
        await self._router.begin_end()
        if self._router.current is not None:
            await self._stop_router(watching)
        await end(watching)
        for replica in self.replicas:
            replica.forget_pipes()
        is_idle = not self.is_ready or any(shard.has_exited for shard in self._shards)
        grace = float(self.settings.graceful_termination_timeout)
        await stop_all(self._shards, min(grace, IDLE_GRACE_SECONDS) if is_idle else grace)
        remove_sockets(self.settings.shard_uds_path, self.settings.num_shard, self.settings.num_replicas)

    async def _stop_router(self, watching: "asyncio.Task[None]") -> None:
        """Let the router finish its requests, within the grace period and while a replica is left."""
        follows = self.is_ready and not watching.done()
        if self._router.running.has_exited and not follows:
            return
        grace = self.settings.shutdown_delay + self.settings.graceful_termination_timeout
        # A start that was cancelled has no watch task; its router may serve already, and needs each of its shards.
        lost = {shard.exited for shard in self._shards} if watching.done() else {watching}
        finishing = asyncio.create_task(self._router.finish(Child.request_stop, follows=follows))
        try:
            await asyncio.wait({finishing, *lost}, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end(finishing)
        router = self._router.running
        if not router.has_exited and not await router.stop_again(STOP_AGAIN_SECONDS):
            logger.warning("%s did not stop within %g s and was killed", router.name, grace)

    def kill(self) -> None:
        """End every child at once."""
        for shard in self._shards:
            shard.kill()
        self._router.kill()


async def end(task: "asyncio.Task[Any]") -> None:
    """Cancel a task and discard its result."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
