"""Replica membership: which replicas serve, health checks, the loss of a replica and its return. Event loop only."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from funitel.proto.errors import FunitelError, NotReady, ShardFailed
from funitel.router.core.background_tasks import Tasks
from funitel.router.replica_set.failover import NO_REPLICA, STEADY_SECONDS, ReturnTimeout, next_pause, reconnect
from funitel.router.settings import RouterSettings
from funitel.router.shard_client.shards import Shards
from funitel.router.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

RECHECK_SECONDS = 0.5  # between two checks of a replica that has disconnected and answers all the same


@dataclass(eq=False, slots=True, kw_only=True)
class Slot:
    """What stays of a replica when it is lost."""

    index: int
    pause_seconds: float = 0.0  # before its shards are connected to again

    def note_loss(self, since: float) -> None:
        """Note that a replica is lost that served here `since` an instant of the monotonic clock."""
        is_steady = time.monotonic() - since >= STEADY_SECONDS
        self.pause_seconds = 0.0 if is_steady else next_pause(self.pause_seconds)


@dataclass(eq=False, slots=True, kw_only=True)
class Member:
    """One replica while it serves."""

    slot: Slot
    shards: Shards
    since: float = field(default_factory=time.monotonic)
    watch: asyncio.Task[None] | None = None

    def health(self) -> Awaitable[object]:
        """Raise a FunitelError unless every shard answers."""
        return self.shards.health()

    async def close(self) -> None:
        """Close the connections to the shards."""
        await self.shards.close()


T = TypeVar("T", bound=Member)


class Membership(ABC, Generic[T]):
    """The replicas of one model, by their index."""

    def __init__(self, num_replicas: int, settings: RouterSettings, metrics: Metrics) -> None:
        """Begin without any that serves."""
        self._num_replicas = num_replicas
        self._settings = settings
        self._metrics = metrics
        self._addresses = (settings.master_url, *settings.replica_address)
        self._serving: list[T] = []
        self._return_timeout = ReturnTimeout(settings.shard_return_timeout, self.fail_all)
        self._is_draining = False
        self._tasks = Tasks()
        self._closing = Tasks()

    @abstractmethod
    async def _rejoin(self, lost: T, shards: Shards) -> T:
        """Make a member of shards that answer in place of a lost one's; raise a FunitelError if they cannot serve."""

    @abstractmethod
    def _on_join(self, member: T) -> str:
        """Let a member work, and all that waits for one; return what the log says of that."""

    @abstractmethod
    def _on_loss(self, member: T, error: FunitelError) -> str:
        """Let other members have the work of a lost one; return what the log says of that."""

    @abstractmethod
    def fail_all(self, error: FunitelError) -> None:
        """End every request; clients get the error."""

    def _check_open(self) -> None:
        if self._is_draining:
            raise NotReady("the server is shutting down")
        if self._return_timeout.is_over:
            raise ShardFailed(NO_REPLICA)

    async def health(self) -> None:
        """Return once one replica answers; raise a FunitelError when none does."""
        failure: FunitelError = ShardFailed(NO_REPLICA)
        pending = {self._tasks.start(_health(member)) for member in self._serving}
        while pending:  # checks that are still pending end by themselves
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if error is None:
                    return
                if not isinstance(error, FunitelError):
                    raise error
                failure = error
        raise failure

    async def _close_members(self) -> None:
        serving, self._serving = self._serving, []  # none is lost from now on
        self._return_timeout.renew()
        await self._tasks.cancel()
        await asyncio.gather(*(member.close() for member in serving), self._closing.ended())

    def _add(self, member: T) -> str:
        """Let a replica serve from now on."""
        self._serving.append(member)
        self._serving.sort(key=lambda each: each.slot.index)
        member.watch = self._tasks.start(self._watch(member))
        self._report_replicas()
        return self._on_join(member)

    def _report_replicas(self) -> None:
        self._metrics.set_replicas(len(self._serving), self._num_replicas - len(self._serving))

    async def _watch(self, member: T) -> None:
        """Notice the end of a replica at once, idle or not."""
        while member in self._serving:
            await member.shards.disconnected()
            try:
                await member.health()
            except FunitelError as error:
                self._lose(member, error)
            await asyncio.sleep(RECHECK_SECONDS)

    def _lose(self, member: T, error: FunitelError) -> None:
        """Go on without a replica, until it comes back."""
        if member not in self._serving:
            return
        self._serving.remove(member)
        member.shards.fence()
        if not self._serving:
            self._return_timeout.begin()
        words = self._on_loss(member, error)
        member.slot.note_loss(member.since)
        self._report_replicas()
        logger.error("replica %d is lost: %s; %s", member.slot.index, error.message, self._state(words))
        if member.watch is not None:
            member.watch.cancel()
        self._closing.start(member.close())
        if self._settings.shard_return_timeout:
            self._tasks.start(self._reconnect(member))

    async def _reconnect(self, lost: T) -> None:
        """Let a replica serve again as soon as its shards answer."""
        began, slot, rejoin = time.monotonic(), lost.slot, partial(self._rejoin, lost)
        member = await reconnect(self._addresses[slot.index], self._settings.shard_tls, rejoin, slot.pause_seconds)
        self._return_timeout.renew()
        words = self._add(member)
        self._metrics.count_return()
        seconds = time.monotonic() - began
        logger.warning("replica %d serves again after %.1f s; %s", slot.index, seconds, self._state(words))

    def _state(self, words: str) -> str:
        return f"{words}, {len(self._serving)} of {self._num_replicas} replicas serve"


async def _health(member: Member) -> None:
    await member.health()
