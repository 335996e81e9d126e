"""What is read from files and read again when they change, without a restart."""

import asyncio
import os
from collections.abc import Sequence
from typing import Protocol

POLL_SECONDS = 1.0


class Reloadable(Protocol):
    """Something that was read from files."""

    def refresh(self) -> None:
        """Read them again if they have changed; raises nothing for what they hold. Called from a thread."""
        ...


class FileWatch:
    """Tells whether files were written or replaced since it last looked."""

    def __init__(self, *paths: str) -> None:
        self._paths = paths
        self._seen = self._look()

    def has_changed(self) -> bool:
        """Look; what is written while the files are read is seen by the next look."""
        before, self._seen = self._seen, self._look()
        return self._seen != before

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_marks(path) for path in self._paths]


def _marks(path: str) -> tuple[int, int, int] | None:
    """What changes with a file's content; None where there is no file. Links are followed, as Kubernetes swaps them."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


async def reload_on_change(sources: Sequence[Reloadable]) -> None:
    """Have every source refreshed each second, for ever."""
    while sources:
        await asyncio.sleep(POLL_SECONDS)
        for source in sources:
            await asyncio.to_thread(source.refresh)  # a disk may be slow
