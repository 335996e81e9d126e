"""Write a folder atomically: what has its final name is complete, and only one process writes it.

Work happens in a hidden folder on the same filesystem and is renamed into place when it has reached the disk.
The kernel lets go of a lock when its process dies, and the next holder sweeps away what that process left.
"""

import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def exclusive(target: Path, *, waits: bool = True) -> Iterator[None]:
    """Be the only process that works on `target`; wait, and say so, while another does, or raise BlockingIOError."""
    locks = target.parent / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    with (locks / f"{target.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not waits:
                raise
            print(f"waiting for another process that prepares {target.name}", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def scratch(target: Path) -> Iterator[Path]:
    """Lend an empty folder beside `target`, gone afterwards. Call with `exclusive(target)` held."""
    folder = target.parent / f".{target.name}.partial"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def install(finished: Path, target: Path) -> None:
    """Move a finished file or folder to `target` once it is on the disk, in one step; a folder there is removed.

    Processes that have files of that folder open or mapped keep them.
    """
    paths = [finished, *finished.rglob("*")] if finished.is_dir() else [finished]
    for path in paths:
        _sync(path)
    remove(target)
    finished.rename(target)
    _sync(target.parent)


def remove(folder: Path) -> None:
    """Remove a folder, if it is there, so that it is never seen with some of its files only; of a link, the link."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.is_dir():
        doomed = folder.parent / f".{folder.name}.removed"
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
