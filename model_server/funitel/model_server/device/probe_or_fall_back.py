"""The fall-back from kernels to slower code: try a kernel at start, and do without it where anything of it fails."""

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")

PROBE_BOUND = 2e-2  # relative error: what is wrong is off by far more, and bfloat16 by half of it


def probe_or_fall_back(probe: Callable[[], T], fall_back: Callable[[Exception], T]) -> T:
    """What `probe` makes and checks, else what `fall_back` makes of the error.

    A compiler, a driver or a GPU fails with errors of any class, and a shard that is slow is better than none.
    """
    try:
        return probe()
    except Exception as error:
        return fall_back(error)


def check_probe(
    found: torch.Tensor, expected: torch.Tensor, bound: float = PROBE_BOUND, probe: str = "a probe"
) -> None:
    """Raise ValueError unless a kernel's result is that of torch, within a relative error of `bound`."""
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    if not error <= bound:
        raise ValueError(f"{probe} is off by {error:.2g} of what torch computes, at most {bound:g} is right")


def reason_of(error: Exception) -> str:
    """The class and the message of an error, for log lines."""
    return f"{type(error).__name__}: {error}"
