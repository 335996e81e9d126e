"""Tell at once that a file of a folder was written to, by inotify(7). Linux only."""

import asyncio
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

_IN_MODIFY = 0x2
_EVENT_BYTES = 1 << 14


class FolderWatch:
    """Calls functions after each write to a file of a folder; without inotify it calls none."""

    def __init__(self, folder: Path) -> None:
        """Prepare the watch, which begins with the first function."""
        self._folder = folder
        self._calls: list[Callable[[], None]] = []
        self._descriptor: int | None = None

    def add(self, call: Callable[[], None]) -> None:
        """Call a function from now on, in the running event loop."""
        self._calls.append(call)
        if self._descriptor is None:
            self._open()

    def remove(self, call: Callable[[], None]) -> None:
        """Call it no more."""
        self._calls.remove(call)
        if not self._calls and self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if descriptor < 0:  # the user has no instance left, or the kernel has none
            return
        if libc.inotify_add_watch(descriptor, os.fsencode(self._folder), _IN_MODIFY) < 0:
            os.close(descriptor)
            return
        self._descriptor = descriptor
        asyncio.get_running_loop().add_reader(descriptor, self._on_change, descriptor)

    def _on_change(self, descriptor: int) -> None:
        try:
            while len(os.read(descriptor, _EVENT_BYTES)) > _EVENT_BYTES // 2:
                pass
        except BlockingIOError:
            pass
        for call in tuple(self._calls):
            call()
