"""Die with the process that started us, however it ends. Linux only; elsewhere it does nothing.

The parent is known by the process id it handed down: asked for later, the id might already be that of its successor.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def is_parent_gone(parent: int | None) -> bool:
    """Whether the parent with this process id is gone; None is a parent that does not matter."""
    return parent is not None and os.getppid() != parent


def is_parent_ending(parent: int | None) -> bool:
    """Whether the parent is gone, or about to be: the signal is sent when the first of its threads has ended."""
    return is_parent_gone(parent) or (parent is not None and _state_of(parent) in ("Z", "X"))


def _state_of(process: int) -> str:
    """The kernel's letter for what a process does; empty where there is none. Source: proc(5)."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def stop_with_parent(parent: int | None) -> None:
    """Have the kernel send SIGTERM to this process once its parent is gone, or now if it is. Source: prctl(2)."""
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if is_parent_gone(parent):  # it went before the kernel knew
        os.kill(os.getpid(), signal.SIGTERM)
