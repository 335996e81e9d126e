"""Programmatic dependent launch: a kernel starts while the kernel before it on the stream still runs.

It loads what does not depend on that kernel, such as weights, then waits for its results. Hopper and newer have it.
Every program of a dependent kernel waits, also one with nothing to do: the kernel behind it relies on that.

Source: CUDA programming guide, "Programmatic Dependent Launch and Synchronization".
"""

from functools import cache

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

_FIRST_ARCH = 90  # compute capability, times 10


@triton.jit
def wait_for_previous(IS_DEPENDENT: tl.constexpr):
    """Wait until the kernel before has ended and its results are visible; the kernel behind may start meanwhile."""
    if IS_DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


def dependent() -> dict[str, bool]:
    """The arguments of a launch: whether the kernel is dependent, for its code and for its launch."""
    if triton.knobs.runtime.interpret:
        return {"IS_DEPENDENT": False}
    return _arguments(driver.active.get_current_device())


@cache
def _arguments(device: int) -> dict[str, bool]:
    target = driver.active.get_current_target()
    if target.backend == "cuda" and target.arch >= _FIRST_ARCH:
        return {"IS_DEPENDENT": True, "launch_pdl": True}
    return {"IS_DEPENDENT": False}
