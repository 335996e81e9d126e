"""Die with the process that started us, however it ends. Linux only; elsewhere it does nothing."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def stop_with_parent() -> None:
    """Have the kernel send SIGTERM to this process once its parent is gone. Source: prctl(2)."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it went before the kernel knew
        os.kill(os.getpid(), signal.SIGTERM)
