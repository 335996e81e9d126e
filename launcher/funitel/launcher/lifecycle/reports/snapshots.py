"""Give each watcher the newest snapshot after each change; those that a slow one misses are left out."""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from funitel.launcher.control_plane.records import Snapshot

GATHER_SECONDS = 0.02  # changes within it are one snapshot


class MakeSnapshot(Protocol):
    """Makes a snapshot of the present."""

    def __call__(self, *, is_first: bool) -> Snapshot: ...


class Snapshots:
    """The snapshots of a server."""

    def __init__(self, make: "MakeSnapshot") -> None:
        """Take the function that makes one of the present, for the first watcher or for a further one."""
        self._make = make
        self._version = 0
        self._changed = asyncio.Condition()
        self._waking: asyncio.Task[None] | None = None
        self._watchers: list[object] = []  # the first one has come first

    @property
    def num_watchers(self) -> int:
        """Watchers that there are."""
        return len(self._watchers)

    def changed(self) -> None:
        """Have every watcher get a snapshot."""
        self._version += 1
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._wake())

    async def _wake(self) -> None:
        seen = -1
        while seen != self._version:
            seen = self._version
            await asyncio.sleep(GATHER_SECONDS)
            async with self._changed:
                self._changed.notify_all()

    async def watch(self) -> AsyncIterator[Snapshot]:
        """One at once, then one after each change."""
        this = object()
        self._watchers.append(this)
        try:
            while True:
                seen = self._version
                yield self._make(is_first=self._watchers[0] is this)
                async with self._changed:
                    await self._changed.wait_for(lambda seen=seen: self._version != seen)  # type: ignore[misc]
        finally:
            self._watchers.remove(this)
            self.changed()  # another one may be the first now
