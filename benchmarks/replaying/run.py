"""Replays of one trace under several variants, each in a process of its own as cores allow."""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from funitel.router.kv_cache.block_pool import BlockPool
from funitel.router.scheduler.plan import SchedulerPolicy
from funitel.router.scheduler.scheduler import Scheduler
from replaying.costs import StepCosts
from replaying.measures import Measures
from replaying.simulation import SimulatedReplica, simulate
from replaying.trace import Arrival, Synthetic, read

TOLD_EVERY = 100  # requests between two signs of progress
SHOWN_EVERY = 0.2  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One system to try the trace on; can be sent to another process. `num_blocks` are those of one replica."""

    policy: str  # grow: the router's own; reserve: TGI's
    num_replicas: int
    trace: Path | Synthetic
    num_requests: int
    num_blocks: int
    block_size: int
    max_batch_prefill_tokens: int
    max_batch_size: int | None
    has_prefix_cache: bool
    target_gap_seconds: float | None
    pipeline_steps: int
    costs: StepCosts

    def scheduler(self) -> Scheduler:
        """A replica's scheduler.

        As TGI's: blocks for all that a request may need before it starts, prefills by themselves, nothing found again,
        one step after the other.
        """
        grows = self.policy == "grow"
        policy = SchedulerPolicy(
            max_batch_prefill_tokens=self.max_batch_prefill_tokens,
            max_batch_size=self.max_batch_size,
            is_chunked=grows,
            has_prefix_cache=grows and self.has_prefix_cache,
            target_gap_seconds=self.target_gap_seconds if grows else None,
        )
        return Scheduler(policy, BlockPool(self.num_blocks, self.block_size))

    def arrivals(self) -> Iterable[Arrival]:
        """The trace, from its beginning."""
        return read(self.trace) if isinstance(self.trace, Path) else self.trace


def replay(variant: Variant, advance: Callable[[int], None]) -> dict[str, Any]:
    """Run one variant; `advance` is told of requests that have come, how many at a time."""
    measures = Measures()
    steps = variant.pipeline_steps if variant.policy == "grow" else 1
    replicas = [
        SimulatedReplica(variant.scheduler(), variant.costs, measures, steps) for _ in range(variant.num_replicas)
    ]
    begin = time.perf_counter()
    told = 0

    def count(num_arrived: int) -> None:
        nonlocal told
        if num_arrived - told >= TOLD_EVERY:
            advance(num_arrived - told)
            told = num_arrived

    simulate(variant.arrivals(), replicas, count)
    advance(variant.num_requests - told)
    measures.num_preempted = sum(replica.scheduler.num_preempted for replica in replicas)
    report = {"policy": variant.policy, "replicas": variant.num_replicas, "replayed_in": time.perf_counter() - begin}
    return report | measures.report()


def replay_all(variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Run every variant, with one progress bar on stderr."""
    total = sum(variant.num_requests for variant in variants)
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("replaying", total=total)
        if len(variants) == 1:
            return [replay(variants[0], lambda count: bar.advance(task, count))]
        context = multiprocessing.get_context("spawn")
        counter = context.Value("q", 0)
        workers = min(len(variants), os.cpu_count() or 1)
        with ProcessPoolExecutor(workers, context, initializer=_share_counter, initargs=(counter,)) as pool:
            futures = [pool.submit(_replay_counted, variant) for variant in variants]
            while not all(future.done() for future in futures):
                time.sleep(SHOWN_EVERY)
                bar.update(task, completed=counter.value)
            bar.update(task, completed=counter.value)
            return [future.result() for future in futures]


_counter: Any = None  # of a worker process


def _share_counter(counter: Any) -> None:
    global _counter
    _counter = counter


def _replay_counted(variant: Variant) -> dict[str, Any]:
    def advance(count: int) -> None:
        with _counter.get_lock():
            _counter.value += count

    return replay(variant, advance)
