"""One model of a server: its state, its replicas, and what is done to it, one thing at a time."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from typing import Any

from funitel.launcher.control_plane.records import (
    Activity,
    LaunchProgress,
    ModelEntry,
    ModelState,
    ReplicaStage,
)
from funitel.launcher.control_plane.store import StoredModel
from funitel.launcher.lifecycle.replica import IDLE_GRACE_SECONDS, ManagedReplica, to_its_end
from funitel.launcher.lifecycle.resources.budget import ModelMemory
from funitel.launcher.lifecycle.server import ServerFacts
from funitel.proto.errors import Conflict, FunitelError, LaunchCancelled, LaunchFailed, NotFound

logger = logging.getLogger(__name__)

RELEASE_SECONDS = 3.0  # for the router to say that it does not use a replica that it never attached
RETRY_SECONDS = 10.0  # that a failed load answers for the loads that requests ask for


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHooks:
    """What a model tells the server.

    Attributes:
        changed: its entry has changed; False where that is no matter of the stored state.
        note: a stage and a line for its history.
        has_router: whether a router watches.
        loaded: a load has ended well, after so many seconds.
        failed: it has failed.
        evicted: it was unloaded for another one.
        restarted: a replica of it is restarted.
    """

    changed: Callable[["ManagedModel", bool], None]
    note: Callable[[str, str, str], None]
    has_router: Callable[[], bool]
    loaded: Callable[["ManagedModel", float], None]
    failed: Callable[["ManagedModel"], None]
    evicted: Callable[["ManagedModel"], None]
    restarted: Callable[["ManagedModel"], None]


class ManagedModel:
    """A model and what runs of it.

    Attributes:
        entry: what is shown of it, without replicas.
        request: of its launch; None for a registration that was never launched.
        is_wanted: whether a start of the control plane loads it.
        replicas: by id.
        turn: held by what ends replicas, one thing at a time.
        bytes_awake: its memory before it was put to sleep.
        has_need: whether `entry.bytes` is more than a rough guess.
    """

    def __init__(self, stored: StoredModel, server: ServerFacts, memory: ModelMemory, hooks: ModelHooks) -> None:
        """Take a model, new or of an earlier control plane; nothing is started."""
        self.entry = replace(stored.entry, replicas=())
        self.request = stored.request
        self.is_wanted = stored.is_wanted
        self.replicas: dict[int, ManagedReplica] = {}
        self.server = server
        self.memory = memory
        self.hooks = hooks
        self.downloaded: tuple[int, int] | None = None
        self.gone_reason: str | None = None
        self.next_replica = 0
        self.bytes_awake: int | None = None
        self.has_need = stored.entry.load_seconds is not None
        self.news = asyncio.Event()  # of replicas: attached, released, gone
        self._work: asyncio.Task[None] | None = None
        self._cancelled: asyncio.Task[None] | None = None  # the work that was told to end
        self._evicting: asyncio.Task[None] | None = None
        self.turn = asyncio.Lock()  # what ends replicas, one thing at a time
        self._activity = Activity(running=0, waiting=0, idle_s=0.0, requests=0)
        self._failed_at = -RETRY_SECONDS
        self._starting: dict[int, asyncio.Task[None]] = {}  # replicas beside those that serve, by id

    # What is shown -------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Its name."""
        return self.entry.name

    @property
    def state(self) -> ModelState:
        """Where it is in its life."""
        return self.entry.state

    def snapshot(self) -> ModelEntry:
        """The entry with its replicas."""
        return replace(self.entry, replicas=tuple(replica.entry for replica in self.replicas.values()))

    def stored(self) -> StoredModel:
        """What an adoption needs."""
        return StoredModel(entry=self.snapshot(), request=self.request, is_wanted=self.is_wanted)

    def progress(self) -> LaunchProgress:
        """How far its launch is."""
        done, total = self.downloaded or (None, None)
        return LaunchProgress(
            progress=self.entry.progress,
            stage=str(self.state),
            bytes=done,
            total_bytes=total or None,
            error=self.entry.error,
        )

    def change(self, *, is_stored: bool = True, **changes: Any) -> None:
        """Change the entry."""
        self.entry = replace(self.entry, **changes)
        self.hooks.changed(self, is_stored)

    def enter(self, state: ModelState, message: str, **changes: Any) -> None:
        """Go into a state, with a line for the history."""
        self.hooks.note(self.name, str(state), message)
        self.change(state=state, **changes)

    def note(self, message: str) -> None:
        """Add a line to the history."""
        self.hooks.note(self.name, str(self.state), message)

    # Requests ------------------------------------------------------------------------------------------------

    @property
    def is_fixed(self) -> bool:
        """Whether it is never evicted."""
        return self.entry.pinned or self.entry.is_static

    @property
    def is_idle(self) -> bool:
        """Whether it is loaded, no request is in it, and nothing else happens to it."""
        is_loaded = self.state in (ModelState.READY, ModelState.SLEEPING)
        return is_loaded and not self._activity.running and not self._activity.waiting and not self.turn.locked()

    @property
    def last_used(self) -> float:
        """Instant of its last request, or of its creation."""
        return self.entry.last_used or self.entry.created

    def take_activity(self, activity: Activity) -> None:
        """Note what the router says."""
        was_idle, self._activity = self.is_idle, activity
        last_used = time.time() - activity.idle_s if activity.requests else None
        if last_used is not None and last_used > (self.entry.last_used or 0):
            self.change(is_stored=False, last_used=last_used)
        if self.is_idle and not was_idle:
            self.memory.changed()

    @property
    def has_expired(self) -> bool:
        """Whether its ttl has passed since the last request."""
        ttl = self.entry.ttl
        return ttl is not None and self.is_idle and not self.is_fixed and time.time() - self.last_used >= ttl

    # The router ----------------------------------------------------------------------------------------------

    def attached(self, replica: int, error: str | None) -> None:
        """Note that the router uses a replica, or why it cannot."""
        found = self.replicas.get(replica)
        if found is None:
            return
        found.attach_error = error
        if error is None:
            found.released.clear()
            found.attached.set()
        else:
            self.note(f"the router cannot use replica {replica}: {error}")
        self.news.set()

    def released(self, replica: int) -> None:
        """Note that the router uses a replica no more."""
        found = self.replicas.get(replica)
        if found is not None:
            found.attached.clear()
            found.released.set()

    def gone(self, replica: ManagedReplica, reason: str) -> None:
        """Note that a replica is lost for good."""
        replica.released.set()
        self.gone_reason = reason
        self.news.set()
        if replica.entry.state is ReplicaStage.DRAINING or replica.entry.id not in self.replicas:
            return
        logger.error("%s: replica %d is lost: %s", self.name, replica.entry.id, reason)
        if self.state in (ModelState.READY, ModelState.SLEEPING):
            self._run(self._bury(replica, reason))

    async def _bury(self, replica: ManagedReplica, reason: str) -> None:
        """Remove a replica that is lost for good; with the last one the model has failed."""
        async with self.turn:
            if self.replicas.get(replica.entry.id) is not replica:
                return  # it was stopped meanwhile
            await replica.stop(IDLE_GRACE_SECONDS)
            del self.replicas[replica.entry.id]
            self.server.gpus.give_back(f"{self.name}/{replica.entry.id}")
            if any(each.is_serving for each in self.replicas.values()):
                self.note(f"replica {replica.entry.id} is lost for good: {reason}")
                self.share_memory()
                self.change()
                return
            await self.stop_replicas(IDLE_GRACE_SECONDS)
            self.fail(reason)

    # Loading -------------------------------------------------------------------------------------------------

    @property
    def is_working(self) -> bool:
        """Whether a load or a wake is under way."""
        return self._work is not None and not self._work.done()

    @property
    def recent_failure(self) -> str | None:
        """The error of a load that has just failed."""
        is_recent = time.monotonic() - self._failed_at < RETRY_SECONDS
        return self.entry.error if self.state is ModelState.FAILED and is_recent else None

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin a load or a wake; nothing else of that kind may be under way."""
        assert not self.is_working, f"{self.name} is being loaded already"
        self._run(work)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(_retrieve)
        self._work = task

    async def until_ready(self) -> None:
        """Wait for the load under way; the load goes on when the call is cancelled.

        Raises:
            LaunchFailed, DoesNotFit, LaunchCancelled: it ends otherwise.
        """
        work = self._work
        if work is not None:
            await asyncio.wait({work})
            if work.cancelled():
                raise LaunchCancelled(f"the launch of {self.name} was cancelled")
            error = work.exception()
            if isinstance(error, FunitelError):
                raise error if error.http_status == 507 else LaunchFailed(f"{self.name}: {error.message}")
            if error is not None:
                raise error

    async def cancel_work(self) -> None:
        """End a load or a wake, and what it has started."""
        work = self._work
        if work is not None and not work.done():
            if work is not self._cancelled:  # once: it waits for the end of its processes then
                self._cancelled = work
                work.cancel()
            await asyncio.wait({work})

    async def cancel(self) -> None:
        """Cancel a launch; raises Conflict where there is none."""
        if not self.is_working:
            raise Conflict(f"{self.name} is {self.state}: there is no launch to cancel")
        await self.cancel_work()
        self.enter(ModelState.CANCELLED, "cancelled", error=None)

    def fail(self, reason: str) -> None:
        """Note that it has failed."""
        self._failed_at = time.monotonic()
        self.hooks.failed(self)
        self.memory.give_back(self.name)
        logger.error("%s has failed: %s", self.name, reason)
        self.enter(ModelState.FAILED, reason, error=reason)

    def start_beside(self, replica: ManagedReplica) -> None:
        """Start a replica of a model that serves; one that fails is removed."""
        task = asyncio.create_task(self._start_beside(replica))
        self._starting[replica.entry.id] = task
        task.add_done_callback(lambda _: self._starting.pop(replica.entry.id, None))

    async def _start_beside(self, replica: ManagedReplica) -> None:
        try:
            await replica.start()
        except FunitelError as error:
            logger.error("%s: replica %d cannot be started: %s", self.name, replica.entry.id, error.message)
            self.note(f"replica {replica.entry.id} cannot be started: {error.message}")
            await replica.stop(IDLE_GRACE_SECONDS)
            if self.replicas.get(replica.entry.id) is replica:
                self._remove(replica.entry.id)

    # Ending --------------------------------------------------------------------------------------------------

    async def unload(self, reason: str, *, is_wanted: bool = False, state: ModelState = ModelState.REGISTERED) -> None:
        """End a load, or drain the replicas and stop them; the model stays known.

        Args:
            reason: for the history.
            is_wanted: whether a later start of the control plane loads it.
            state: that it is in afterwards.
        """
        await self.cancel_work()
        async with self.turn:
            self.is_wanted = is_wanted
            if self.replicas:
                self.enter(ModelState.DRAINING, reason)
                await self.drain(self.replicas.values())
                await self.stop_replicas(self.server.grace_seconds)
            self.memory.give_back(self.name)
            self.enter(state, reason, progress=0.0, error=None)

    async def evict(self, reason: str) -> None:
        """Free its memory for another model."""
        self.hooks.evicted(self)
        self._evicting = asyncio.create_task(self.unload(reason))
        await asyncio.shield(self._evicting)  # it goes on where the load that wants the memory is cancelled

    async def remove_replica(self, number: int) -> None:
        """Drain and stop one replica.

        Raises:
            NotFound: there is none of that id.
            Conflict: it is the last one.
        """
        async with self.turn:
            replica = self.replicas.get(number)
            if replica is None:
                raise NotFound(f"{self.name} has no replica {number}: it has {', '.join(map(str, self.replicas))}")
            if len([each for each in self.replicas.values() if each.entry.state is not ReplicaStage.DRAINING]) == 1:
                raise Conflict(f"replica {number} is the last one of {self.name}: terminate or unload the model")
            self.note(f"replica {number} is removed")
            if (starting := self._starting.get(number)) is not None:
                starting.cancel()
                await asyncio.wait({starting})
            await self.drain([replica])
            await replica.stop(self.server.grace_seconds)
            if number in self.replicas:
                self._remove(number)

    def _remove(self, number: int) -> None:
        """Forget a replica that has ended, with its memory and its GPUs; a later load starts those that are left."""
        del self.replicas[number]
        self.server.gpus.give_back(f"{self.name}/{number}")
        if self.request is not None:
            self.request = replace(self.request, replicas=max(1, len(self.replicas)))
        self.share_memory()
        self.change()

    async def drain(self, replicas: Iterable[ManagedReplica], state: ReplicaStage = ReplicaStage.DRAINING) -> None:
        """Have the router use replicas no more: running requests end, within the grace period."""
        replicas = tuple(replicas)
        for replica in replicas:
            if not replica.attached.is_set() and replica.entry.state is ReplicaStage.STARTING:
                replica.released.set()  # the router has not heard of it
            replica.change(state=state)
        seconds = self.server.grace_seconds if any(each.attached.is_set() for each in replicas) else RELEASE_SECONDS
        waits = [asyncio.create_task(replica.released.wait()) for replica in replicas]
        deadline = time.monotonic() + seconds
        alone_since: float | None = None
        try:
            while waits and not all(wait.done() for wait in waits) and (left := deadline - time.monotonic()) > 0:
                alone_since = None if self.hooks.has_router() else alone_since or time.monotonic()
                if alone_since is not None and time.monotonic() - alone_since > RELEASE_SECONDS:
                    break  # there is no router that would use them
                await asyncio.wait(waits, timeout=min(left, 0.25), return_when=asyncio.ALL_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def stop_replicas(self, grace_seconds: float) -> None:
        """Stop every replica; a cancellation of the caller takes effect once they have ended."""
        await to_its_end(self._stop_replicas(grace_seconds))

    async def _stop_replicas(self, grace_seconds: float) -> None:
        for task in tuple(self._starting.values()):
            task.cancel()
            await asyncio.wait({task})
        replicas, self.replicas = self.replicas, {}
        for number in replicas:
            self.server.gpus.give_back(f"{self.name}/{number}")
        await asyncio.gather(*(replica.stop(grace_seconds) for replica in replicas.values()))

    def share_memory(self) -> None:
        """Have the budget count one replica less than before."""
        count = len(self.replicas)
        if self.entry.bytes is not None:
            self.change(bytes=self.entry.bytes * count // (count + 1))
            self.memory.put(self.name, self.entry.bytes)


def _retrieve(task: "asyncio.Task[None]") -> None:
    """Take the exception of a task, for which no caller may wait."""
    if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, FunitelError):
        logger.error("unexpected", exc_info=error)
