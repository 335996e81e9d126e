"""The whole server: launcher, router and a shard, with many streams of its own model's tokens over HTTP."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import mean

from funitel.launcher.bench.apis import IGNORE_EOS
from funitel.launcher.bench.figures import Timeline
from funitel.launcher.bench.http import Endpoint
from funitel.launcher.bench.load import Level, Run, run_level
from funitel.launcher.bench.target import PreparedRequest, Target
from funitel_testing.servers import Server, cpu_seconds, serving
from gpu_sections import checkpoint
from gpu_sections.figures import Facts, Line
from gpu_sections.plan import Plan

TIMEOUT = 120.0  # of a request, in seconds
BUSY = 0.5  # share of a core from which on the client, not the server, may be what is measured
WARM_TOKENS = 16  # of answers and prompts that record the graphs


@dataclass(frozen=True)
class Pace:
    """What streams got while all of them were being answered."""

    tokens_a_second: float
    context: float  # of a stream, in tokens, on average

    @classmethod
    def of(cls, timelines: Sequence[Timeline], prompt_tokens: int) -> "Pace":
        """Between the last first token and the first last one.

        Raises:
            ValueError: there is no such time, or a request failed.
        """
        failures = [timeline.failure for timeline in timelines if timeline.failure is not None]
        if failures:
            raise ValueError(f"{len(failures)} of {len(timelines)} requests failed: {failures[0].message}")
        begin = max(timeline.arrivals[0] for timeline in timelines)
        end = min(timeline.arrivals[-1] for timeline in timelines)
        if end <= begin:
            raise ValueError("streams ended before all had begun: their answers are too short")
        before = sum(at <= begin for timeline in timelines for at in timeline.arrivals)
        until = sum(at <= end for timeline in timelines for at in timeline.arrivals)
        context = prompt_tokens + (before + until) / 2 / len(timelines)
        return cls((until - before) / (end - begin), context)


def whole_pace(timelines: Sequence[Timeline]) -> float:
    """Tokens a second from the first request to the last answer, prompts included."""
    return sum(timeline.num_tokens for timeline in timelines) / seconds_of(timelines)


def seconds_of(timelines: Sequence[Timeline]) -> float:
    """From the first request to the last answer."""
    return max(timeline.ended for timeline in timelines) - min(timeline.started for timeline in timelines)


def measure(plan: Plan, facts: Facts) -> Iterator[Line]:
    """Start the server, press it, end it."""
    folder = checkpoint.ensure(plan)
    begin = time.perf_counter()
    with serving(plan.folder, *_flags(plan, folder)) as server:
        yield Line("start", "start of the server, until it is ready", time.perf_counter() - begin, "s")
        numbers = count()
        for streams in (plan.streams, plan.peer_streams):
            _press(plan, server, streams, WARM_TOKENS, WARM_TOKENS, numbers)
        yield from _streams(plan, server, numbers)
        timelines = _press(plan, server, plan.peer_streams, plan.context, plan.peer_answer, numbers).timelines
        name = f"over HTTP, {plan.peer_streams} streams of {plan.context} + {plan.peer_answer} tokens, all of it"
        yield Line("http_whole", name, whole_pace(timelines), "tokens/s")


def _flags(plan: Plan, folder: Path) -> list[str]:
    flags = ["--model-id", str(folder), "--dtype", plan.dtype_name, "--max-concurrent-requests", str(2 * plan.streams)]
    return flags if plan.is_gpu else [*flags, "--num-threads", "1", "--max-batch-total-tokens", "4000"]


def _streams(plan: Plan, server: Server, numbers: Iterator[int]) -> Iterator[Line]:
    """The figures of all streams at once."""
    pids = {"router": server.router_pid(), "shard": server.shard_pids()[0]}
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    run = _press(plan, server, plan.streams, plan.context, plan.answer, numbers)
    seconds = seconds_of(run.timelines)
    pace = Pace.of(run.timelines, plan.context)
    name = f"over HTTP, {plan.streams} streams"
    yield Line("http", f"{name}, while all run", pace.tokens_a_second, "tokens/s")
    yield Line("http_context", f"{name}: context of a stream in that time", pace.context, "tokens on average")
    gap = mean(gap for timeline in run.timelines for gap in timeline.gaps) * 1e3
    yield Line("http_gap", f"{name}: gap between tokens, prompts' time included", gap, "ms on average")
    for process, pid in pids.items():
        share = (cpu_seconds(pid) - before[process]) / seconds
        yield Line(f"{process}_cpu", f"{name}: CPU of the {process}", share * 100, "% of a core")
    unit = "% of a core" + (", so much that the server may have waited for it" if run.client.cpu_share > BUSY else "")
    yield Line("client_cpu", f"{name}: CPU of the client", run.client.cpu_share * 100, unit)


def _press(plan: Plan, server: Server, streams: int, prompt: int, answer: int, numbers: Iterator[int]) -> Run:
    """So many requests at once, with prompts that none had before."""
    vocab_size = plan.config["vocab_size"]
    prompts = [PreparedRequest(checkpoint.prompt_of(next(numbers), prompt, vocab_size), answer) for _ in range(streams)]
    target = Target("", "tgi", Endpoint(server.url), model="", options=frozenset({IGNORE_EOS}), timeout=TIMEOUT)
    return asyncio.run(run_level(target, Level(concurrency=streams), prompts, (), lambda timeline: None))
