"""The attention kernels against the reference, over random shapes, contexts and block tables.

Nearly every case is compiled for its own shape, which takes seconds, so several processes share them. Nothing is timed.
"""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import torch

from funitel_testing.attention_cases import BOUNDS, draw, error_of
from gpu_sections.figures import Facts, Line
from gpu_sections.plan import Plan


def measure(plan: Plan, facts: Facts) -> Iterator[Line]:
    """The largest error of random steps, as a share of what is allowed, for each type of number."""
    first = int.from_bytes(os.urandom(3)) * plan.num_cases  # fresh ones each time; the line says which
    seeds = range(first, first + plan.num_cases)
    errors = list(_errors(plan, seeds))
    kinds = [draw(seed, is_short=not plan.is_gpu).dtype for seed in seeds]
    for dtype, bound in BOUNDS.items():
        own = [(error, seed) for error, seed, kind in zip(errors, seeds, kinds, strict=True) if kind is dtype]
        worst, seed = max(own, default=(0.0, first))
        name = str(dtype).removeprefix("torch.")
        unit = f"of {len(own)} cases, share of what is allowed; seed {seed}"
        label = f"largest error of attention, {name}"
        yield Line(f"attention_{name}", label, worst, unit, worst / bound, 1.0, is_most=True)


def _errors(plan: Plan, seeds: range) -> Iterator[float]:
    if plan.num_workers == 1:
        yield from (error_of(draw(seed, is_short=not plan.is_gpu), plan.device) for seed in seeds)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(plan.num_workers, context, torch.set_num_threads, (1,)) as workers:
        yield from workers.map(_error, seeds, [plan] * len(seeds))


def _error(seed: int, plan: Plan) -> float:
    return error_of(draw(seed, is_short=not plan.is_gpu), plan.device)
