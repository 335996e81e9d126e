"""Replica membership: which replicas serve, how they join and leave, health checks, losses and returns.

A replica has an id that stays: a lost one that returns has the id it had. Event loop only.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Generic, TypeVar

from funitel.proto.errors import FunitelError, InvalidRequest, NotFound, NotReady, ShardFailed
from funitel.router.core.background_tasks import Tasks
from funitel.router.replica_set.failover import NO_REPLICA, NONE_LEFT, ReturnTimeout, reconnect
from funitel.router.replica_set.table import Member, ReplicaAddress, ReplicaStatus, Slot, check_weight
from funitel.router.settings import RouterSettings
from funitel.router.shard_client.shards import Shards
from funitel.router.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

RECHECK_SECONDS = 0.5  # between two checks of a replica that has disconnected and answers all the same

T = TypeVar("T", bound=Member)


class Membership(ABC, Generic[T]):
    """The table of the replicas of one model, by their ids."""

    def __init__(self, settings: RouterSettings, metrics: Metrics) -> None:
        """Begin without any."""
        self._settings = settings
        self._metrics = metrics
        self._slots: dict[int, Slot] = {}  # of all replicas: those that serve, that drain and that are lost
        self._joining: dict[int, ReplicaAddress] = {}  # those that `add` connects to
        self._serving: list[T] = []
        self._leaving: list[T] = []  # those that drain
        self._refuses = False  # the last replica was taken away, and nothing waits for another one
        self._return_timeout = ReturnTimeout(settings.shard_return_timeout, self.fail_all)
        self._is_draining = False
        self._tasks = Tasks()
        self._closing = Tasks()

    @abstractmethod
    async def _join(self, place: ReplicaAddress, shards: Shards) -> T:
        """Make a member of the shards of a new replica; raise a FunitelError if they cannot serve."""

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
    def _on_drain(self, member: T) -> str:
        """Let other members have what waits at one that drains; return what the log says of that."""

    @abstractmethod
    async def _drained(self, member: T) -> None:
        """Return once nothing runs at a member that drains, or it is lost."""

    @abstractmethod
    def _on_change(self) -> None:
        """Take note of replicas that have come or gone, or of weights that have changed."""

    @abstractmethod
    def _counts(self, member: T) -> tuple[int, int]:
        """How many sequences wait at a member, and how many run."""

    @abstractmethod
    def fail_all(self, error: FunitelError) -> None:
        """End every request; clients get the error."""

    def _check_open(self) -> None:
        if self._is_draining:
            raise NotReady("the server is shutting down")
        if self._refuses:
            raise NotReady(NONE_LEFT)
        if self._return_timeout.is_over:
            raise ShardFailed(NO_REPLICA)

    async def health(self) -> None:
        """Return once one replica answers; raise a FunitelError when none does."""
        failure: FunitelError = ShardFailed(NO_REPLICA if self._slots else NONE_LEFT)
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

    @property
    def replicas(self) -> list[ReplicaStatus]:
        """The table, by ids."""
        members = {member.slot: member for member in (*self._serving, *self._leaving)}
        found = []
        for slot in sorted(self._slots.values(), key=lambda each: each.replica_id):
            member = members.get(slot)
            state = "lost" if member is None else "serving" if member in self._serving else "draining"
            waiting, running = (0, 0) if member is None else self._counts(member)
            found.append(
                ReplicaStatus(
                    replica_id=slot.replica_id,
                    address=slot.address,
                    weight=slot.weight,
                    state=state,
                    num_waiting=waiting,
                    num_running=running,
                )
            )
        return found

    # Joining and leaving --------------------------------------------------------------------------------------------

    async def add(self, replica_id: int, address: str, weight: float = 1.0) -> None:
        """Connect to the shards of a new replica, warm them up, and let it serve beside the others.

        Args:
            replica_id: no replica of the table has it.
            address: of rank 0.
            weight: its share of new sequences, relative to that of others; 0 for none.

        Raises:
            InvalidRequest: the id or the address is taken, or the weight is none.
            StartupError: the shards do not answer in time, or cannot serve beside the others.
            ShardFailed: they are lost already.
            NotReady: the router drains, or the replica was taken away meanwhile.
        """
        self._check_new(replica_id, address, weight)
        place = self._joining[replica_id] = ReplicaAddress(replica_id, address, weight)
        began = time.monotonic()
        try:
            async with AsyncExitStack() as undo:
                timeout = self._settings.shard_connect_timeout
                is_kept = self._settings.keeper is not None
                shards = await Shards.connect(address, timeout, self._settings.shard_tls, keeps=is_kept)
                undo.push_async_callback(shards.close)
                if is_kept:
                    await shards.settle()
                member = await self._join(place, shards)
                undo.callback(member.slot.metrics.remove)
                undo.push_async_callback(member.close)
                self._check_wanted(place)
                undo.pop_all()
        finally:
            if self._joining.get(replica_id) is place:
                del self._joining[replica_id]
        self._refuses = False
        self._return_timeout.renew()
        words = self._enter(member)
        seconds = time.monotonic() - began
        self._metrics.observe_attach(seconds)
        logger.info("replica %d joined after %.1f s; %s", replica_id, seconds, self._state(words))

    def add_when_it_answers(self, place: ReplicaAddress) -> None:
        """Let a replica serve beside the others once its shards answer, however long that takes."""
        self._joining[place.replica_id] = place
        self._tasks.start(self._add_when_it_answers(place))

    async def _add_when_it_answers(self, place: ReplicaAddress) -> None:
        began = time.monotonic()
        member = await reconnect(place.address, self._settings.shard_tls, partial(self._join, place))
        if self._joining.get(place.replica_id) is not place:
            member.slot.metrics.remove()
            await member.close()
            return
        del self._joining[place.replica_id]
        words = self._enter(member)
        logger.info(
            "replica %d joined after %.1f s; %s", place.replica_id, time.monotonic() - began, self._state(words)
        )

    def _check_new(self, replica_id: int, address: str, weight: float) -> None:
        if self._is_draining:
            raise NotReady("the server is shutting down")
        if replica_id in self._slots or replica_id in self._joining:
            raise InvalidRequest(f"`replica` {replica_id} is there already", "replica")
        addresses = {each.address for each in self._joining.values()} | {slot.address for slot in self._slots.values()}
        if address in addresses:
            raise InvalidRequest(f"`address` {address} is that of another replica", "address")
        check_weight(replica_id, weight)

    def _check_wanted(self, place: ReplicaAddress) -> None:
        """Raise NotReady if a replica that joins is to serve no more."""
        if self._is_draining:
            raise NotReady("the server is shutting down")
        if self._joining.get(place.replica_id) is not place:
            raise NotReady(f"replica {place.replica_id} was removed while it joined")

    async def drain(self, replica_id: int, *, holds: bool = True) -> None:
        """Give a replica no new sequence, let those that run there end, and close it; what waits there moves to others.

        Where it is lost, or its shards are lost meanwhile, it is removed. Cancelling the call does not end the drain.

        Args:
            replica_id: one of the table.
            holds: where it is the last one, requests wait for `add`; if not, what is there ends and new ones are
                refused by NotReady.

        Raises:
            NotFound: there is none of that id.
        """
        if self._joining.pop(replica_id, None) is not None:
            return
        slot = self._slot(replica_id)
        if slot.draining is None:
            member = next((each for each in self._serving if each.slot is slot), None)
            if member is None:
                self.remove(replica_id, holds=holds)
                return
            self._withdraw(member)
            self._leaving.append(member)
            self._settle_emptiness(holds=holds)
            words = self._on_drain(member)
            self._report_replicas()
            logger.info("replica %d drains; %s", replica_id, self._state(words))
            slot.draining = self._closing.start(self._finish_drain(member))
        await asyncio.shield(slot.draining)

    async def _finish_drain(self, member: T) -> None:
        await self._drained(member)
        if member not in self._leaving:
            return  # it was lost, or everything is closed
        self._withdraw(member)
        self._forget(member.slot)
        if member.watch is not None:
            member.watch.cancel()
        await member.close()
        logger.info("replica %d has drained", member.slot.replica_id)

    def remove(self, replica_id: int, *, holds: bool = True) -> None:
        """Take a replica away at once: what was there goes on elsewhere, as if it were lost, and it does not return.

        Args:
            replica_id: one of the table.
            holds: as for `drain`.

        Raises:
            NotFound: there is none of that id.
        """
        if self._joining.pop(replica_id, None) is not None:
            return
        slot = self._slot(replica_id)
        member = next((each for each in (*self._serving, *self._leaving) if each.slot is slot), None)
        words = "it was lost"
        if member is not None:
            self._withdraw(member)
            self._settle_emptiness(holds=holds)
            words = self._on_loss(member, ShardFailed(f"replica {replica_id} was removed"))
            self._leave(member)
        self._forget(slot)
        if not self._slots:
            self._settle_emptiness(holds=holds)
        logger.info("replica %d is removed; %s", replica_id, self._state(words))

    def set_weights(self, weights: Mapping[int, float]) -> None:
        """Set what share of the new sequences replicas get, relative to one another; 0 for none.

        Args:
            weights: by ids; the weights of others stay.

        Raises:
            NotFound: there is none of an id.
            InvalidRequest: a weight is none, or nothing but zeros would be left. All stay as they were.
        """
        for replica_id, weight in weights.items():
            self._slot(replica_id)
            check_weight(replica_id, weight)
        if not any(weights.get(slot.replica_id, slot.weight) for slot in self._slots.values()):
            raise InvalidRequest("`weights` must leave one replica a weight above 0", "weights")
        for replica_id, weight in weights.items():
            self._slots[replica_id].weight = weight
            self._slots[replica_id].metrics.set_weight(weight)
        self._on_change()

    def _slot(self, replica_id: int) -> Slot:
        slot = self._slots.get(replica_id)
        if slot is None:
            raise NotFound(f"there is no replica {replica_id}")
        return slot

    def _withdraw(self, member: T) -> None:
        """Count a member neither among those that serve nor among those that drain."""
        (self._serving if member in self._serving else self._leaving).remove(member)
        self._on_change()

    def _settle_emptiness(self, *, holds: bool) -> None:
        """If no replica serves any more: let requests wait for the next one, without a timeout, or refuse them."""
        if not self._serving:
            self._return_timeout.renew()
            self._refuses = not holds

    def _forget(self, slot: Slot) -> None:
        """Drop a row of the table, with its series."""
        if slot.reconnecting is not None:
            slot.reconnecting.cancel()
        self._slots.pop(slot.replica_id, None)
        slot.metrics.remove()
        self._report_replicas()

    async def _close_members(self) -> None:
        members, self._serving, self._leaving = [*self._serving, *self._leaving], [], []  # none is lost from now on
        self._return_timeout.renew()
        await self._tasks.cancel()
        await asyncio.gather(*(member.close() for member in members), self._closing.ended())

    # Losses and returns ---------------------------------------------------------------------------------------------

    def _enter(self, member: T) -> str:
        """Let a replica serve from now on."""
        self._slots[member.slot.replica_id] = member.slot
        self._serving.append(member)
        self._serving.sort(key=lambda each: each.slot.replica_id)
        member.slot.metrics.set_weight(member.slot.weight)
        member.watch = self._tasks.start(self._watch(member))
        self._report_replicas()
        return self._on_join(member)

    def _report_replicas(self) -> None:
        serving, draining = len(self._serving), len(self._leaving)
        self._metrics.set_replicas(serving, len(self._slots) - serving - draining, draining)
        for member in (*self._serving, *self._leaving):
            member.slot.metrics.set_up()
        self._on_change()

    async def _watch(self, member: T) -> None:
        """Notice the end of a replica at once, idle or not."""
        while member in self._serving or member in self._leaving:
            await member.shards.disconnected()
            try:
                await member.health()
            except FunitelError as error:
                self._lose(member, error)
            await asyncio.sleep(RECHECK_SECONDS)

    def _lose(self, member: T, error: FunitelError) -> None:
        """Go on without a replica, until it comes back; one that drains does not."""
        was_serving = member in self._serving
        if not was_serving and member not in self._leaving:
            return
        self._withdraw(member)
        member.shards.fence()
        if was_serving and not self._serving:
            self._return_timeout.begin()
        words = self._on_loss(member, error)
        member.slot.note_loss(member.since)
        self._report_replicas()
        logger.error("replica %d is lost: %s; %s", member.slot.replica_id, error.message, self._state(words))
        self._leave(member)
        if not was_serving:
            self._forget(member.slot)
        elif self._settings.shard_return_timeout:
            member.slot.reconnecting = self._tasks.start(self._reconnect(member))

    def _leave(self, member: T) -> None:
        """Close a member that is in no list any more."""
        if member.watch is not None:
            member.watch.cancel()
        self._closing.start(member.close())

    async def _reconnect(self, lost: T) -> None:
        """Let a replica serve again as soon as its shards answer."""
        began, slot, rejoin = time.monotonic(), lost.slot, partial(self._rejoin, lost)
        member = await reconnect(slot.address, self._settings.shard_tls, rejoin, slot.pause_seconds)
        slot.reconnecting = None
        self._refuses = False
        self._return_timeout.renew()
        words = self._enter(member)
        self._metrics.count_return()
        seconds = time.monotonic() - began
        logger.warning("replica %d serves again after %.1f s; %s", slot.replica_id, seconds, self._state(words))

    def _state(self, words: str) -> str:
        return f"{words}, {len(self._serving)} of {len(self._slots)} replicas serve"


async def _health(member: Member) -> None:
    await member.health()
