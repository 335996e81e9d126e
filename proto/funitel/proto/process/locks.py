"""Lock file beside the sockets of a deployment: held by the launcher, removed by its last process."""

import fcntl
import os
import time
from contextlib import suppress

_POLL_SECONDS = 0.01


def lock_of(path: str) -> str:
    """Name of the lock file of the shards' socket path."""
    return f"{path}.lock"


def try_lock(name: str) -> int | None:
    """Lock the file `name`; None when another process holds it or it is not writable."""
    while (descriptor := _open(name)) is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        if _is_named(descriptor, name):
            return descriptor
        os.close(descriptor)  # its owner removed the file before unlocking: this lock excludes no other process
    return None


def _open(name: str) -> int | None:
    try:
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None


def _is_named(descriptor: int, name: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(name))
    except FileNotFoundError:
        return False


def remove_if_free(name: str, seconds: float = 0.0) -> None:
    """Remove a lock file that no process holds, such as that of a killed process; wait up to `seconds` for it."""
    end = time.monotonic() + seconds
    while os.path.exists(name):
        if (descriptor := try_lock(name)) is not None:
            with suppress(OSError):
                os.unlink(name)
            os.close(descriptor)
        elif time.monotonic() >= end:
            return
        else:
            time.sleep(_POLL_SECONDS)
