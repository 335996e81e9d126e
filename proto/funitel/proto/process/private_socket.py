"""Create Unix sockets with owner-only permissions, since a connection gives access to the model and all requests."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

SOCKET_MODE = 0o600
_OWNER_ONLY_UMASK = 0o077


def bind_private(path: str) -> socket.socket:
    """Bind a Unix socket to a free path; it accepts no connections until `listen`.

    Raises:
        OSError: the path is in use, too long or not writable.
    """
    made = socket.socket(socket.AF_UNIX)
    try:
        made.bind(path)
        os.chmod(path, SOCKET_MODE)
    except OSError:
        made.close()
        raise
    return made


@contextmanager
def keeping_private(path: str) -> Iterator[None]:
    """Give the socket at `path`, created within the block, owner-only permissions from its creation on.

    The umask also applies to files that other threads create meanwhile.
    """
    before = os.umask(_OWNER_ONLY_UMASK)
    try:
        yield
    finally:
        os.umask(before)
    os.chmod(path, SOCKET_MODE)
