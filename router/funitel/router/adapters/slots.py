"""The adapters in the memory of one replica: loaded when they are wanted, evicted when others are. Event loop only.

At most `max_loaded` are loaded, being loaded or being unloaded. For an adapter that is waited for, an idle one is
evicted, the least recently used first. If all are used, one of them *drains*, the one that was loaded first: its
sequences go on, those that come later wait behind the ones that waited before, and it is unloaded once it is idle. So
each waiting adapter has its turn, and a sequence that waits holds nothing that another one waits for.

Background users, the sequences of batches, wait behind all others, and drain no adapter that others use. An adapter
that background users alone have is the first to drain for others, and its users are displaced: they wait for it again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Hashable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from funitel.proto.errors import FunitelError, InvalidRequest, ShardFailed, StepFailed
from funitel.router.adapters.folder import check_unchanged
from funitel.router.core.background_tasks import Tasks
from funitel.router.core.request import Adapter
from funitel.router.telemetry.adapter_metrics import AdapterMetrics, AdapterUse

logger = logging.getLogger(__name__)

User = Hashable  # the id of a sequence, or an object of a caller without one


class AdapterRanks(Protocol):
    """What has the adapters: the ranks of one replica, called together."""

    async def load_adapter(self, adapter_id: str, path: str) -> int:
        """Load an adapter; return its bytes. After a failure no rank has it."""

    async def unload_adapter(self, adapter_id: str) -> None:
        """Drop an adapter that no row uses."""


class _Stage(Enum):
    LOADING = auto()
    LOADED = auto()
    UNLOADING = auto()


@dataclass(slots=True, eq=False)
class _Slot:
    """One adapter in memory, or on its way."""

    adapter: Adapter
    stage: _Stage = _Stage.LOADING
    users: set[User] = field(default_factory=set)
    num_bytes: int = 0
    loaded: int = 0  # how many were loaded before it
    is_draining: bool = False
    is_displacing: bool = False  # its users are about to leave

    @property
    def is_idle(self) -> bool:
        """Whether it is loaded and none uses it."""
        return self.stage is _Stage.LOADED and not self.users


@dataclass(slots=True, eq=False)
class _Queue:
    """Those that wait for one adapter."""

    adapter: Adapter
    futures: dict[User, asyncio.Future[None]] = field(default_factory=dict)


class AdapterSlots:
    """Loads and unloads the adapters of one replica.

    Args:
        ranks: have them.
        max_loaded: maximum in memory.
        metrics: count loads and evictions.
        rows_dropped: returns once the ranks hold no row of a sequence that has left.
        displace: must release a background user, not from within another call; it may ask for its adapter again.
        check: raises InvalidRequest for an adapter if its files are no longer those of its id; it may block.
    """

    def __init__(
        self,
        ranks: AdapterRanks,
        max_loaded: int,
        metrics: AdapterMetrics,
        rows_dropped: Callable[[], Awaitable[None]],
        displace: Callable[[User], None],
        check: Callable[[Adapter], None] = check_unchanged,
    ) -> None:
        self._ranks = ranks
        self._max_loaded = max_loaded
        self._metrics = metrics
        self._rows_dropped = rows_dropped
        self._displace = displace
        self._check = check
        self._slots: dict[str, _Slot] = {}  # by id; the least recently used first
        self._waiting: dict[str, _Queue] = {}  # by id; the one that was asked for first is first
        self._slot_of: dict[User, _Slot] = {}
        self._queue_of: dict[User, _Queue] = {}
        self._background: set[User] = set()  # of those that have an adapter or wait for one
        self._pinned: set[str] = set()
        self._retired: set[str] = set()
        self._num_loads = 0
        self._tasks = Tasks()
        self._is_closed = False

    def take(self, user: User, adapter: Adapter, *, is_background: bool = False) -> bool:
        """Let a user have an adapter, if it has it or it is loaded and no other one waits for its place."""
        if user in self._slot_of:
            return True
        slot = self._slots.get(adapter.id)
        if slot is None or slot.stage is not _Stage.LOADED or slot.is_draining:
            return False
        if is_background:
            self._background.add(user)
        self._give(slot, user)
        return True

    async def wait(self, user: User, adapter: Adapter, *, is_background: bool = False) -> None:
        """Return once a user has an adapter; leaving early, and `release`, end the wait.

        Raises:
            InvalidRequest: it cannot be loaded.
            FunitelError: loading it failed, or the replica is closed.
        """
        if self._is_closed:
            raise ShardFailed("the replica is closed")
        if self.take(user, adapter, is_background=is_background):
            return
        if is_background:
            self._background.add(user)
        queue = self._waiting.setdefault(adapter.id, _Queue(adapter))
        future = queue.futures[user] = asyncio.get_running_loop().create_future()
        self._queue_of[user] = queue
        self._advance()
        try:
            await future
        except asyncio.CancelledError:
            self.release(user)
            raise

    def release(self, user: User) -> None:
        """Take an adapter back from a user, or end its wait; the user may have neither."""
        self._background.discard(user)
        slot = self._slot_of.pop(user, None)
        if slot is not None:
            slot.users.discard(user)
        queue = self._queue_of.pop(user, None)
        if queue is not None:
            queue.futures.pop(user).cancel()
            if not queue.futures:
                del self._waiting[queue.adapter.id]
        self._advance()

    def pin(self, adapter: Adapter, *, is_pinned: bool) -> None:
        """Never evict an adapter that is loaded, or evict it as others from now on; it is not retired any more."""
        self._retired.discard(adapter.id)
        (self._pinned.add if is_pinned else self._pinned.discard)(adapter.id)

    def retire(self, adapter: Adapter) -> None:
        """Unload an adapter once none uses it or waits for it: no further one will."""
        self._pinned.discard(adapter.id)
        if adapter.id in self._slots or adapter.id in self._waiting:
            self._retired.add(adapter.id)
        self._advance()

    def has(self, adapter: Adapter) -> bool:
        """Whether an adapter is in memory, or will be soon."""
        slot = self._slots.get(adapter.id)
        return adapter.id in self._waiting if slot is None else slot.stage is not _Stage.UNLOADING

    def use(self) -> AdapterUse:
        """What is loaded, used and waited for now."""
        loaded = [slot for slot in self._slots.values() if slot.stage is not _Stage.LOADING]
        return AdapterUse(
            max_loaded=self._max_loaded,
            loaded={slot.adapter.name: slot.num_bytes for slot in loaded},
            running=tuple(slot.adapter.name for slot in loaded if slot.users),
            waiting=tuple(queue.adapter.name for queue in self._waiting.values()),
        )

    def halt(self) -> None:
        """Decide nothing any more; those that wait get an error. `close` comes after."""
        self._is_closed = True
        for queue in self._waiting.values():
            for future in queue.futures.values():
                if not future.done():
                    future.set_exception(ShardFailed("the replica is closed"))
        self._waiting.clear()
        self._queue_of.clear()
        self._background.clear()

    async def close(self) -> None:
        """Halt, and give up what is being loaded and unloaded."""
        self.halt()
        await self._tasks.cancel()

    # Deciding -------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Load, evict or drain what the waiting ones need, in their order; to be called after every change."""
        if self._is_closed:
            return
        room = self._max_loaded - len(self._slots)
        leaving = sum(slot.stage is _Stage.UNLOADING for slot in self._slots.values())
        for slot in self._slots.values():
            slot.is_draining = False
        for adapter_id, queue in sorted(self._waiting.items(), key=lambda each: self._is_behind(each[1].futures)):
            found = self._slots.get(adapter_id)
            if found is not None:
                if found.stage is _Stage.LOADED and not found.is_draining:
                    self._give_waiting(found)
            elif room:
                room -= 1
                self._load(queue.adapter)
            elif leaving:
                leaving -= 1
            else:
                self._make_room(for_background=self._is_behind(queue.futures))
        for adapter_id in tuple(self._retired):
            slot_left = self._slots.get(adapter_id)
            if slot_left is not None and slot_left.is_idle and adapter_id not in self._waiting:
                self._unload(slot_left)

    def _is_behind(self, users: Collection[User]) -> bool:
        """Whether all of some users are background ones."""
        return self._background.issuperset(users)

    def _make_room(self, *, for_background: bool) -> None:
        """Evict the least recently used of the idle, or else have the oldest one drain that does not yet.

        One that background users alone have drains before others, and its users leave at once; for background users no
        other drains, and its users stay to their ends.
        """
        loaded = [
            slot
            for slot in self._slots.values()
            if slot.stage is _Stage.LOADED and slot.adapter.id not in self._pinned and not slot.is_draining
        ]
        idle = next((slot for slot in loaded if slot.is_idle), None)
        if idle is not None:
            self._metrics.count_eviction()
            self._unload(idle)
            return
        behind = [slot for slot in loaded if self._is_behind(slot.users)]
        slot = min(behind if behind or for_background else loaded, key=lambda slot: slot.loaded, default=None)
        if slot is None:
            return
        slot.is_draining = True
        if behind and not for_background and not slot.is_displacing:
            slot.is_displacing = True
            asyncio.get_running_loop().call_soon(self._displace_users, slot)  # this may be in the midst of a step

    def _displace_users(self, slot: _Slot) -> None:
        """Have the background users of an adapter leave, if it still drains for others and has no other users."""
        slot.is_displacing = False
        for user in tuple(slot.users):
            if slot.is_draining and not self._is_closed and self._is_behind(slot.users):
                self._displace(user)

    def _give(self, slot: _Slot, user: User) -> None:
        slot.users.add(user)
        self._slot_of[user] = slot
        adapter_id = slot.adapter.id
        self._slots[adapter_id] = self._slots.pop(adapter_id)  # the most recently used

    def _give_waiting(self, slot: _Slot) -> None:
        """Let all that wait for an adapter have it."""
        queue = self._waiting.pop(slot.adapter.id, None)
        for user, future in () if queue is None else queue.futures.items():
            del self._queue_of[user]
            self._give(slot, user)
            if not future.done():
                future.set_result(None)

    # Carrying out ---------------------------------------------------------------------------------------------------

    def _load(self, adapter: Adapter) -> None:
        slot = self._slots[adapter.id] = _Slot(adapter)
        self._tasks.start(self._run_load(slot))

    async def _run_load(self, slot: _Slot) -> None:
        adapter = slot.adapter
        try:
            await asyncio.to_thread(self._check, adapter)
            slot.num_bytes = await self._ranks.load_adapter(adapter.id, adapter.path)
        except InvalidRequest as error:
            self._fail(
                slot, InvalidRequest(f"adapter {adapter.name!r} cannot be loaded: {error.message}", "adapter_id")
            )
        except FunitelError as error:
            self._fail(slot, error)
        except Exception as error:  # those that wait must not hang
            logger.exception("loading an adapter failed")
            self._fail(slot, StepFailed(f"{type(error).__name__}: {error}"))
        else:
            self._metrics.count_load("loaded")
            logger.info("loaded adapter=%r bytes=%d", adapter.name, slot.num_bytes)
            slot.stage, slot.loaded = _Stage.LOADED, self._num_loads
            self._num_loads += 1
            self._give_waiting(slot)
        self._advance()

    def _fail(self, slot: _Slot, error: FunitelError) -> None:
        """Give those that wait for an adapter the reason that they cannot have it."""
        self._metrics.count_load("failed")
        logger.warning("adapter=%r is not loaded: %s", slot.adapter.name, error.message)
        self._forget(slot)
        queue = self._waiting.pop(slot.adapter.id, None)
        for user, future in () if queue is None else queue.futures.items():
            del self._queue_of[user]
            if not future.done():
                future.set_exception(error)

    def _unload(self, slot: _Slot) -> None:
        slot.stage = _Stage.UNLOADING
        self._tasks.start(self._run_unload(slot))

    async def _run_unload(self, slot: _Slot) -> None:
        try:
            await self._rows_dropped()
            await self._ranks.unload_adapter(slot.adapter.id)
            logger.info("unloaded adapter=%r", slot.adapter.name)
        except FunitelError as error:
            logger.error("adapter=%r may still be in memory: %s", slot.adapter.name, error.message)
        self._forget(slot)
        self._advance()

    def _forget(self, slot: _Slot) -> None:
        del self._slots[slot.adapter.id]
        if slot.adapter.id not in self._waiting:
            self._retired.discard(slot.adapter.id)
