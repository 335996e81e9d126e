"""End this process with its parent process, by PR_SET_PDEATHSIG. Linux only; elsewhere it does nothing.

The parent passes its process id, since `getppid` may already give the id of another process.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def is_parent_gone(parent: int | None) -> bool:
    """Whether the parent with this process id has ended; None means no parent to watch."""
    return parent is not None and os.getppid() != parent


def is_parent_ending(parent: int | None) -> bool:
    """Whether the parent has ended or is ending: the signal is sent when its first thread has ended."""
    return is_parent_gone(parent) or (parent is not None and _state_of(parent) in ("Z", "X"))


def _state_of(process: int) -> str:
    """The kernel's state letter of a process; empty if it does not exist. Source: proc(5)."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def stop_with_parent(parent: int | None) -> None:
    """Have the kernel send SIGTERM when the parent ends; send it now if it has ended. Source: prctl(2)."""
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if is_parent_gone(parent):  # it ended before the call above
        os.kill(os.getpid(), signal.SIGTERM)
