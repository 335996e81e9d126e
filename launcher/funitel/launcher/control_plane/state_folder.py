"""The folder of a control plane's state, which one process has, and the folder of its sockets."""

import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from funitel.proto.errors import SettingsError

DATABASE = "fleet.db"
LOGS = "logs"
CONTROL_SOCKET = "control.sock"
LOCK = "lock"
_HASH_DIGITS = 8


def default_state_folder(port: int, environ: Mapping[str, str]) -> Path:
    """The state folder of a server on a port: `$XDG_STATE_HOME/funitel/PORT` or `~/.local/state/funitel/PORT`."""
    given = environ.get("XDG_STATE_HOME", "")
    base = Path(given) if given.startswith("/") else Path("~/.local/state").expanduser()
    return base / "funitel" / str(port)


@contextmanager
def owning(root: Path) -> Iterator[Path]:
    """Make the state folder and have it to this process; a lock ends with the process, however that ends.

    Raises:
        SettingsError: another process has it, or it cannot be made; the message has the process id.
    """
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        (root / LOGS).mkdir(exist_ok=True)
        lock = (root / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--state-dir {root}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip() or "of unknown id"
            raise SettingsError(
                f"--state-dir {root} belongs to a control plane that runs, process {owner}: stop it, or give another "
                "--state-dir"
            ) from None
        try:
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
        except OSError as error:
            raise SettingsError(f"--state-dir {root}: {error.strerror}") from error
        yield root


def run_folder(state_folder: Path) -> Path:
    """Make the folder of the sockets of a state folder; its path is short, as the path of a socket must be.

    Raises:
        SettingsError: another user has it, or it is no folder.
    """
    digest = hashlib.sha256(str(state_folder.absolute()).encode()).hexdigest()[:_HASH_DIGITS]
    path = Path(f"/tmp/funitel-{os.getuid()}-{digest}")
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        facts = path.lstat()
    except OSError as error:
        raise SettingsError(f"the folder of sockets {path} cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise SettingsError(f"the folder of sockets {path} belongs to another user: remove it")
    path.chmod(0o700)
    return path
