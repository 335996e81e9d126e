"""Unix sockets that only their owner reaches: whoever may connect to one may run the model and read what others ask."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

SOCKET_MODE = 0o600
_NOBODY_ELSE = 0o077


def bind_private(path: str) -> socket.socket:
    """Make a Unix socket at a path that is free; it takes no connection before somebody listens.

    Raises:
        OSError: the path is taken, too long or not ours.
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
    """Let whoever listens within the block make the socket at `path`: at no instant is it open to others.

    Files that other threads make meanwhile are theirs alone too.
    """
    before = os.umask(_NOBODY_ELSE)
    try:
        yield
    finally:
        os.umask(before)
    os.chmod(path, SOCKET_MODE)
