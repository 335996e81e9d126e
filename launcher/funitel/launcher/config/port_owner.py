"""Name the process that listens on a TCP port, by the tables of Linux below /proc."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from funitel.proto.printable import printable

_TABLES = ("tcp", "tcp6")
_LISTEN = "0A"
_SOCKET = re.compile(r"socket:\[(\d+)\]")


def owner_of(port: int, proc: Path = Path("/proc")) -> str | None:
    """`process PID (NAME)`; None where the system does not say, as of another user's process."""
    inodes = set(_listening(port, proc))
    for folder in proc.iterdir() if inodes else ():
        if not folder.name.isdecimal():
            continue
        with suppress(OSError):  # ended, or another user's
            if any(_inode(link) in inodes for link in (folder / "fd").iterdir()):
                name = (folder / "comm").read_text(errors="replace").strip()  # cut at 15 bytes
                return f"process {folder.name} ({printable(name)})"
    return None


def _listening(port: int, proc: Path) -> Iterator[str]:
    """Inodes of the sockets that listen on a port."""
    for table in _TABLES:
        with suppress(OSError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
                if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                    yield inode


def _inode(link: Path) -> str | None:
    with suppress(OSError):  # closed since
        found = _SOCKET.fullmatch(os.readlink(link))
        return found[1] if found else None
    return None
