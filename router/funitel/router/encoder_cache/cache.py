"""The media items that the shards of one replica have encoded: encoded when they are wanted, evicted for others.

A sequence *holds* its items from before it is queued to its end: after a preemption their features are needed again.
Sequences that wait are served one after the other, those of batches behind all others; API keys take turns, so that one
of many images delays others by one sequence. Items are encoded one by one, or small ones of one shape together, which
the shards compute at once: those of the sequence that is served, then those of others, as far as there is room. Only
the sequence that is served makes room, by eviction of the items that no sequence holds, the least recently used first;
it holds nothing itself while it waits, so that sequences never wait for each other. Event loop only.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from funitel.proto.errors import FunitelError, InvalidRequest, ShardFailed, StepFailed
from funitel.proto.step import MediaFacts, MediaInput
from funitel.router.core.background_tasks import Tasks
from funitel.router.telemetry.media_metrics import MediaMetrics

logger = logging.getLogger(__name__)

MAX_BATCH_BYTES = 1 << 20  # of the values of items that are encoded together; a shard's own bound is the same


class MediaRanks(Protocol):
    """What has the features: the ranks of one replica, called together."""

    async def encode_media(self, media: MediaInput) -> int:
        """Encode an item on every rank; return the bytes of its features on one. After a failure no rank has them."""

    async def drop_media(self, keys: Sequence[bytes]) -> None:
        """Drop the features of items that no row needs."""


@dataclass(slots=True, eq=False)
class _Item:
    """An item that the ranks have."""

    num_bytes: int
    users: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Waiting:
    """A sequence that waits for its items."""

    inputs: dict[bytes, MediaInput]
    api_key: bytes
    is_background: bool
    future: "asyncio.Future[None]"


class EncoderCache:
    """Which media items the ranks of one replica have, and which sequences hold them.

    Args:
        ranks: encode, and have the features.
        facts: bytes that a rank keeps, and bytes of a feature.
        metrics: count what is encoded and found.
        rows_dropped: returns once the ranks hold no row of a sequence that has left.
    """

    def __init__(
        self,
        ranks: MediaRanks,
        facts: MediaFacts,
        metrics: MediaMetrics,
        rows_dropped: Callable[[], Awaitable[None]],
    ) -> None:
        self._ranks = ranks
        self._facts = facts
        self._metrics = metrics
        self._rows_dropped = rows_dropped
        self._items: dict[bytes, _Item] = {}  # by key; the least recently used first
        self._held: dict[int, tuple[bytes, ...]] = {}  # by sequence
        self._waiting: dict[int, _Waiting] = {}  # by sequence; in the order they came
        self._served: int | None = None  # the sequence that items are encoded for
        self._turns: Counter[bytes] = Counter()  # by API key: sequences that were served while others waited
        self._num_bytes = 0  # of all items
        self._is_encoding = self._is_short = False  # the first that waits needs room that is held
        self._tasks = Tasks()
        self._is_closed = False
        metrics.watch(self.num_bytes)

    def num_bytes(self) -> int:
        """Bytes of features on each rank."""
        return self._num_bytes

    def has(self, key: bytes) -> bool:
        """Whether the ranks have an item."""
        return key in self._items

    def take(self, user: int, media: Sequence[MediaInput]) -> bool:
        """Let a sequence hold its items, if the ranks have all of them and no other one waits for room."""
        if self._is_short or any(each.key not in self._items for each in media):
            return False
        self._hold(user, dict.fromkeys(each.key for each in media))
        return True

    async def wait(
        self, user: int, media: Sequence[MediaInput], api_key: bytes = b"", *, is_background: bool = False
    ) -> None:
        """Return once a sequence holds its items; leaving early, and `release`, end the wait.

        Raises:
            InvalidRequest: an item cannot be encoded, or all of them are larger than the cache.
            FunitelError: encoding one failed, or the replica is closed.
        """
        if self._is_closed:
            raise ShardFailed("the replica is closed")
        if user in self._held or self.take(user, media):
            return
        inputs = {each.key: each for each in media}
        needed = sum(map(self._size_of, inputs.values()))
        if needed > self._facts.cache_bytes:
            most = self._facts.cache_bytes
            raise InvalidRequest(f"features of the images take {needed} bytes, the shards keep at most {most}")
        future = asyncio.get_running_loop().create_future()
        others = {each.api_key for each in self._waiting.values()}
        if api_key not in others:  # no turns are saved up while nothing waits
            self._turns[api_key] = min((self._turns[other] for other in others), default=0)
        self._waiting[user] = _Waiting(inputs, api_key, is_background, future)
        self._advance()
        try:
            await future
        except asyncio.CancelledError:
            self.release(user)
            raise

    def release(self, user: int) -> None:
        """Take its items back from a sequence, or end its wait; it may have neither."""
        for key in self._held.pop(user, ()):
            self._items[key].users.discard(user)
        waiting = self._waiting.pop(user, None)
        if waiting is not None:
            waiting.future.cancel()
        self._advance()

    def halt(self) -> None:
        """Decide nothing any more; those that wait get an error. `close` comes after."""
        self._is_closed = True
        self._metrics.unwatch(self.num_bytes)
        for waiting in self._waiting.values():
            if not waiting.future.done():
                waiting.future.set_exception(ShardFailed("the replica is closed"))
        self._waiting.clear()

    async def close(self) -> None:
        """Halt, and give up what is being encoded."""
        self.halt()
        await self._tasks.cancel()

    # Deciding -------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Serve the ones that wait, in turn, until one needs an item that is encoded first."""
        self._is_short = False
        while self._waiting and not (self._is_encoding or self._is_closed):
            user = self._served = self._next()
            waiting = self._waiting[user]
            missing = next((each for key, each in waiting.inputs.items() if key not in self._items), None)
            if missing is None:
                del self._waiting[user]
                self._turns[waiting.api_key] += 1
                if not self._waiting:
                    self._turns.clear()
                self._hold(user, waiting.inputs)
                if not waiting.future.done():
                    waiting.future.set_result(None)
                continue
            evicted = self._evicted_for(missing, waiting)
            if evicted is None:
                self._is_short = True
                return
            self._is_encoding = True
            self._tasks.start(self._encode(self._batch(user, missing), evicted))

    def _batch(self, user: int, first: MediaInput) -> list[tuple[int, MediaInput]]:
        """An item that a sequence waits for, and small ones of the same shape behind it; each with its sequence."""
        batch = {first.key: (user, first)}
        budget = MAX_BATCH_BYTES - len(first.values)
        room = self._facts.cache_bytes - self._num_bytes - self._size_of(first)
        is_background = self._waiting[user].is_background
        for other in (user, *(each for each, its in self._waiting.items() if its.is_background == is_background)):
            for key, each in self._waiting[other].inputs.items():
                is_alike = (each.kind, each.shape, each.grid) == (first.kind, first.shape, first.grid)
                if is_alike and key not in self._items and key not in batch:
                    budget -= len(each.values)
                    room -= self._size_of(each)
                    if budget < 0 or room < 0:
                        return list(batch.values())
                    batch[key] = other, each
        return list(batch.values())

    def _next(self) -> int:
        """The sequence to serve: the one that was, else the first of the API key that had the fewest turns."""
        eager = [user for user, each in self._waiting.items() if not each.is_background]
        users = eager or list(self._waiting)
        if self._served in users:
            return self._served
        return min(users, key=lambda user: self._turns[self._waiting[user].api_key])

    def _hold(self, user: int, keys: dict[bytes, object] | dict[bytes, MediaInput]) -> None:
        if user in self._held:
            return
        self._held[user] = tuple(keys)
        for key in keys:
            item = self._items[key] = self._items.pop(key)  # the most recently used
            item.users.add(user)
        self._metrics.count_held(len(keys))

    def _size_of(self, media: MediaInput) -> int:
        found = self._items.get(media.key)
        return media.num_features * self._facts.feature_bytes if found is None else found.num_bytes

    def _evicted_for(self, media: MediaInput, waiting: _Waiting) -> list[bytes] | None:
        """Forget items to make room for one that is waited for; return their keys, None where too much is held."""
        excess = self._num_bytes + self._size_of(media) - self._facts.cache_bytes
        evicted = []
        for key, item in self._items.items():
            if excess <= 0:
                break
            if not item.users and key not in waiting.inputs:
                evicted.append(key)
                excess -= item.num_bytes
        if excess > 0:
            return None
        for key in evicted:
            self._num_bytes -= self._items.pop(key).num_bytes
        return evicted

    # Carrying out ---------------------------------------------------------------------------------------------------

    async def _encode(self, batch: Sequence[tuple[int, MediaInput]], evicted: Sequence[bytes]) -> None:
        """Encode items that sequences wait for, which may leave meanwhile: others may need the items as well."""
        try:
            if evicted:
                await self._drop(evicted)
            began = time.monotonic()
            found = await asyncio.gather(
                *(self._ranks.encode_media(media) for _, media in batch), return_exceptions=True
            )
        except FunitelError as error:
            self._fail(batch[0][0], error)
        except Exception as error:  # the one that waits must not hang
            logger.exception("encoding a media item failed")
            self._fail(batch[0][0], StepFailed(f"{type(error).__name__}: {error}"))
        else:
            self._settle(batch, found, (time.monotonic() - began) / len(batch))
        finally:
            self._is_encoding = False
        self._advance()

    def _settle(
        self, batch: Sequence[tuple[int, MediaInput]], found: Sequence[int | BaseException], seconds: float
    ) -> None:
        """Note what became of items, each of which took so many seconds."""
        for (user, media), result in zip(batch, found, strict=True):
            if isinstance(result, FunitelError):
                self._fail(user, result)
            elif isinstance(result, BaseException):
                logger.error("encoding a media item failed", exc_info=result)
                self._fail(user, StepFailed(f"{type(result).__name__}: {result}"))
            else:
                self._metrics.count_encoded(seconds)
                self._items[media.key] = _Item(result)
                self._num_bytes += result

    async def _drop(self, keys: Sequence[bytes]) -> None:
        await self._rows_dropped()
        await self._ranks.drop_media(keys)
        self._metrics.count_evictions(len(keys))

    def _fail(self, user: int, error: FunitelError) -> None:
        """Give the sequence that an item was encoded for the reason that it cannot have it."""
        self._metrics.count_failure()
        logger.warning("a media item is not encoded: %s", error.message)
        waiting = self._waiting.pop(user, None)
        if waiting is not None and not waiting.future.done():
            waiting.future.set_exception(error)
