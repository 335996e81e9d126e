"""Count what code does, where its seconds would depend on what else the machine does."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def work_of(run: Callable[[], object]) -> int:
    """Calls and returns while `run` runs, of functions in Python and in C; a string's method counts its length too."""
    total = 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal total
        total += 1
        owner = getattr(arg, "__self__", None) if event == "c_call" else None
        if isinstance(owner, str):
            total += len(owner)

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return total
