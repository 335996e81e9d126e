"""A file watch: reload on change what was read from files, without a restart."""

import asyncio
import os
from collections.abc import Sequence
from typing import Protocol

POLL_SECONDS = 1.0


class Reloadable(Protocol):
    """Something that was read from files."""

    def refresh(self) -> None:
        """Reload them if they have changed; raise nothing for their content. Called from a thread."""


class FileWatch:
    """Detects whether files were written or replaced since the last check."""

    def __init__(self, *paths: str) -> None:
        self._paths = paths
        self._last = self._state()

    def has_changed(self) -> bool:
        """Check; a change while the files are read is found by the next check."""
        before, self._last = self._last, self._state()
        return self._last != before

    def _state(self) -> list[tuple[int, int, int] | None]:
        return [_marks(path) for path in self._paths]


def _marks(path: str) -> tuple[int, int, int] | None:
    """Time, size and inode of a file; None where there is none. Links are followed, as Kubernetes swaps them."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


async def reload_on_change(sources: Sequence[Reloadable]) -> None:
    """Refresh every source each second, until cancelled."""
    while sources:
        await asyncio.sleep(POLL_SECONDS)
        for source in sources:
            await asyncio.to_thread(source.refresh)  # may block on a slow disk
