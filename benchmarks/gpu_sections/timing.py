"""Work on the clock, and what this card does at most: a copy within its memory, a product of large matrices."""

import statistics
import time
from collections.abc import Callable

import torch

from gpu_sections.plan import Plan

WARM_UPS = 2


def wait(plan: Plan) -> None:
    """Until the device has done all it was told."""
    if plan.is_gpu:
        torch.cuda.synchronize(plan.device)


def seconds_of(plan: Plan, work: Callable[[], object], *, at_once: int = 1) -> float:
    """Median time of some work, after runs that do not count.

    `at_once` runs are queued before the device is waited for, as a shard queues a step while the one before runs.
    """
    taken = []
    for number in range(plan.repeats + WARM_UPS):
        wait(plan)
        begin = time.perf_counter()
        for _ in range(at_once):
            work()
        wait(plan)
        if number >= WARM_UPS:
            taken.append((time.perf_counter() - begin) / at_once)
    return statistics.median(taken)


def copy_rate(plan: Plan) -> float:
    """Bytes a second, those read and those written counted."""
    source = torch.ones(plan.copied // 2, dtype=torch.uint8, device=plan.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_of(plan, lambda: target.copy_(source))


def matmul_rate(plan: Plan) -> float:
    """Floating-point operations a second, on random numbers."""
    n = plan.matrix
    a, b = (torch.randn(n, n, device=plan.device).to(plan.dtype) for _ in range(2))
    return 2 * n**3 / seconds_of(plan, lambda: a @ b)
