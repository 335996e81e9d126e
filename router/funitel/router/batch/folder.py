"""The folder of batches: contents of files, written whole or not at all; a lock, so that one process owns it.

A reserve of a megabyte is given up when the disk is full, so that the state that says so can be written.
"""

import asyncio
import fcntl
import os
import threading
import uuid
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from funitel.router.batch.store import storage_errors

RESERVE_BYTES = 1 << 20
DATABASE = "batches.sqlite3"
_LOCK, _RESERVE, _FILES, _PARTS = "lock", "reserve", "files", "parts"


class BatchFolder:
    """The folder that `--batch-dir` names. Methods block, except `path_of` and `writing`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock: BinaryIO | None = None

    @property
    def database(self) -> Path:
        """The path of the store's file."""
        return self.root / DATABASE

    def path_of(self, file_id: str) -> Path:
        """The path of a file's content."""
        return self.root / _FILES / file_id

    def lock(self) -> bool:
        """Take the folder for this process, as long as it lives; False where another process has it.

        Raises:
            StorageFailed: the folder cannot be made or written.
        """
        with storage_errors():
            for part in (_FILES, _PARTS):
                (self.root / part).mkdir(parents=True, exist_ok=True)
            lock = (self.root / _LOCK).open("ab")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                return False
            self._lock = lock
        return True

    def release(self) -> None:
        """Let another process take the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def tidy(self, known: Collection[str]) -> None:
        """Remove what a process left that ended early: parts, and contents that the store does not know."""
        with storage_errors():
            for path in (self.root / _PARTS).iterdir():
                path.unlink()
            for path in (self.root / _FILES).iterdir():
                if path.name not in known:
                    path.unlink()
            self._make_reserve()

    def _make_reserve(self) -> None:
        path = self.root / _RESERVE
        if not path.exists():
            with suppress(OSError):  # there is none on a disk that is full
                path.write_bytes(bytes(RESERVE_BYTES))

    def give_up_reserve(self) -> None:
        """Free the reserve, for the state that says that the disk is full."""
        with suppress(OSError):
            (self.root / _RESERVE).unlink(missing_ok=True)

    @asynccontextmanager
    async def writing(self) -> AsyncIterator["PartialFile"]:
        """A file that is written in parts; removed at the end of the block unless it was kept.

        The event loop waits for no disk: removing a large file takes long.
        """
        part = PartialFile(self, self.root / _PARTS / uuid.uuid4().hex)
        try:
            await asyncio.to_thread(part.open)
            yield part
        finally:
            removed = asyncio.get_running_loop().run_in_executor(None, part.discard)
            await asyncio.shield(removed)  # it is done even if this task is cancelled again

    def remove(self, file_id: str) -> None:
        """Remove the content of a file."""
        with storage_errors():
            self.path_of(file_id).unlink(missing_ok=True)


class PartialFile:
    """A content that is being written, under a name that no reader knows. Methods block."""

    def __init__(self, folder: BatchFolder, path: Path) -> None:
        self._folder = folder
        self._path = path
        self._opened: BinaryIO | None = None
        self._lock = threading.Lock()  # a task that is cancelled while the file is opened discards it at once
        self._is_discarded = False
        self.num_bytes = 0

    def open(self) -> None:
        """Make the file, empty; raises StorageFailed."""
        with storage_errors(), self._lock:
            if not self._is_discarded:
                self._opened = self._path.open("xb")

    @property
    def _file(self) -> BinaryIO:
        assert self._opened is not None, "it is not open"
        return self._opened

    def write(self, content: bytes) -> None:
        """Append to it; raises StorageFailed."""
        with storage_errors():
            self._file.write(content)
        self.num_bytes += len(content)

    def keep(self, file_id: str) -> None:
        """Make it the content of a file, once all of it is on the disk; raises StorageFailed."""
        with storage_errors():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._path.rename(self._folder.path_of(file_id))

    def discard(self) -> None:
        """Remove it, unless it was kept."""
        with self._lock:
            self._is_discarded = True
            if self._opened is not None:
                with suppress(OSError):
                    self._opened.close()
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
