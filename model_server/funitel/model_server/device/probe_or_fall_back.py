"""The fall-back from kernels to slower code: try a kernel at start, and do without it where anything of it fails."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def probe_or_fall_back(probe: Callable[[], T], fall_back: Callable[[Exception], T]) -> T:
    """What `probe` makes and checks, else what `fall_back` makes of the error.

    A compiler, a driver or a GPU fails with errors of any class, and a shard that is slow is better than none.
    """
    try:
        return probe()
    except Exception as error:
        return fall_back(error)


def reason_of(error: Exception) -> str:
    """The class and the message of an error, for log lines."""
    return f"{type(error).__name__}: {error}"
