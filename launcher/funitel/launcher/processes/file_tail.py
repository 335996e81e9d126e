"""Follow the file that a process writes its output to, line by line."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

POLL_SECONDS = 0.2
MAX_LINE_BYTES = 1 << 20  # longer lines are split
MAX_FILE_BYTES = 64 << 20  # beyond it, a file is emptied once its lines have been read
_CHUNK = 1 << 16


class FileTail:
    """The lines that are appended to a file; the file need not exist yet.

    `error` is the last line that began with `error:`, without that word; `last_line` is the last non-empty line.
    """

    def __init__(self, path: Path, on_line: Callable[[str], None]) -> None:
        """Begin at the end of the file."""
        self.error = ""
        self.last_line = ""
        self._path = path
        self._on_line = on_line
        self._position = _size(path)
        self._rest = b""
        self._following: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Read the file in intervals, in a task of its own, until `stop`."""
        self._following = asyncio.create_task(self._follow())

    def stop(self) -> None:
        """Read what is left, and end."""
        if self._following is not None:
            self._following.cancel()
            self._following = None
        self.read()
        if self._rest:
            self._take(self._rest)
            self._rest = b""

    def read(self) -> None:
        """Read what was appended since the last time."""
        size = _size(self._path)
        if size < self._position:  # it was emptied
            self._position, self._rest = 0, b""
        if size == self._position:
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            while chunk := file.read(_CHUNK):
                self._position += len(chunk)
                *whole, self._rest = (self._rest + chunk).split(b"\n")
                if len(self._rest) > MAX_LINE_BYTES:
                    whole, self._rest = [*whole, self._rest], b""
                for line in whole:
                    self._take(line)

    def _take(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        if text.startswith("error: "):
            self.error = text.removeprefix("error: ")
        if text.strip():
            self.last_line = text
        self._on_line(text)

    async def _follow(self) -> None:
        while True:
            self.read()
            if self._position > MAX_FILE_BYTES:  # the process appends, so it goes on at the new end
                os.truncate(self._path, 0)
                self._position = 0
            await asyncio.sleep(POLL_SECONDS)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
