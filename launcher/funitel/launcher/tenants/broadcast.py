"""Tells routers each change of tenants, and waits until they have taken it. Event loop only.

So a change that was answered holds: a key that was made is valid, and one that was revoked is not.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

logger = logging.getLogger(__name__)

TAKEN_SECONDS = 2.0  # that a router may need; one that hangs holds up no change for longer


class TenantBroadcast:
    """The versions of a state, and the last one that each watcher has taken.

    Args:
        state: the present state as a JSON object.
    """

    def __init__(self, state: Callable[[], dict[str, Any]]) -> None:
        self._state = state
        self._version = 0
        self._num_watchers = 0
        self._taken: dict[int, int] = {}
        self._changed = asyncio.Condition()

    async def publish(self) -> None:
        """Tell watchers that the state has changed; returns once they have taken it, or after a time."""
        async with self._changed:
            self._version += 1
            version = self._version
            self._changed.notify_all()
            try:
                async with asyncio.timeout(TAKEN_SECONDS):
                    await self._changed.wait_for(lambda: all(taken >= version for taken in self._taken.values()))
            except TimeoutError:
                logger.warning("a router has not taken a change of users and keys after %g s", TAKEN_SECONDS)

    async def taken(self, watcher: int, version: int) -> None:
        """Note that a watcher has taken a version."""
        async with self._changed:
            if watcher in self._taken:
                self._taken[watcher] = max(version, self._taken[watcher])
                self._changed.notify_all()

    async def watch(self) -> AsyncIterator[dict[str, Any]]:
        """The state at once, then after each change, with `watcher` and `version` for what says that it was taken."""
        self._num_watchers += 1
        watcher, seen = self._num_watchers, -1
        self._taken[watcher] = -1
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda seen=seen: self._version != seen)  # type: ignore[misc]
                    seen = self._version
                yield self._state() | {"watcher": watcher, "version": seen}
        finally:
            del self._taken[watcher]
            async with self._changed:
                self._changed.notify_all()
