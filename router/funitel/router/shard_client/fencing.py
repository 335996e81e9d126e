"""Fencing (STONITH): kill a shard that hangs before another takes its place.

A process that hangs would keep its socket and its memory, and the launcher restarts only processes that have ended. The
kernel names the owner of a Unix socket; shards of other machines cannot be fenced.
"""

import logging
import os
import signal
import socket
import struct

logger = logging.getLogger(__name__)

_CREDENTIALS = struct.Struct("3i")  # of a peer: process, user, group; see unix(7)


def fence(url: str) -> None:
    """Kill the process that listens at an address "unix:///path"; no other is touched."""
    if not url.startswith("unix://"):
        return
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)  # one that hangs accepts no connection, and its backlog may be full
            probe.connect(url.removeprefix("unix://"))
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        process, _, _ = _CREDENTIALS.unpack(credentials)
        if process not in (0, os.getpid()):  # 0 is in another container
            os.kill(process, signal.SIGKILL)
            logger.error("killed process %d, which listens at %s and does not answer as it should", process, url)
    except (ConnectionRefusedError, FileNotFoundError):
        return  # it has ended
    except OSError as error:
        logger.warning("the shard at %s cannot be killed: %s", url, error)
