"""A fair semaphore: bound concurrent work, and alternate between the API keys of those that wait. Event loop only."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairSemaphore:
    """Blocks that hold it: at most `limit` at once.

    Args:
        limit: of all keys together.
        limit_per_key: of one key.
    """

    def __init__(self, limit: int, limit_per_key: int) -> None:
        self._limit = limit
        self._limit_per_key = limit_per_key
        self._held: Counter[bytes] = Counter()
        self._queues: OrderedDict[bytes, deque[asyncio.Future[None]]] = OrderedDict()  # the next key first

    @asynccontextmanager
    async def acquired(self, key: bytes) -> AsyncIterator[None]:
        """Hold the semaphore while the block runs; wait for that behind others of the key."""
        await self._acquire(key)
        try:
            yield
        finally:
            self._release(key)

    async def _acquire(self, key: bytes) -> None:
        if key not in self._queues and self._is_free_for(key):
            self._held[key] += 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._queues.setdefault(key, deque()).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self._withdraw(key, waiter)
            else:  # it was given the semaphore at the same time
                self._release(key)
            raise

    def _release(self, key: bytes) -> None:
        self._held[key] -= 1
        self._held = +self._held
        self._wake_next()

    def _withdraw(self, key: bytes, waiter: "asyncio.Future[None]") -> None:
        queue = self._queues.get(key, deque())
        if waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self._queues[key]

    def _is_free_for(self, key: bytes) -> bool:
        return self._held.total() < self._limit and self._held[key] < self._limit_per_key

    def _wake_next(self) -> None:
        while (key := next((key for key in self._queues if self._is_free_for(key)), None)) is not None:
            queue = self._queues.pop(key)
            waiter = queue.popleft()
            if queue:
                self._queues[key] = queue  # behind the others
            if not waiter.done():
                self._held[key] += 1
                waiter.set_result(None)
