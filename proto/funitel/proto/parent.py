"""Die with the process that started us, however it ends. Linux only; elsewhere it does nothing.

The parent is known by the process id it handed down: asked for later, the id might already be that of its successor.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def has_lost(parent: int | None) -> bool:
    """Whether the parent with this process id is gone; None is a parent that does not matter."""
    return parent is not None and os.getppid() != parent


def stop_with_parent(parent: int | None) -> None:
    """Have the kernel send SIGTERM to this process once its parent is gone, or now if it is. Source: prctl(2)."""
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if has_lost(parent):  # it went before the kernel knew
        os.kill(os.getpid(), signal.SIGTERM)
