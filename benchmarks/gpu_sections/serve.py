"""The whole server: launcher, router and a shard, with many streams of its own model's tokens over HTTP.

First all prompts are new, which shows the wait for first tokens. Then the same prompts are sent again and found in the
prefix cache, so that all streams begin at once and run together for nearly their whole answers.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from threading import Event, Thread

import numpy as np

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
NEW_SHARE = 4  # answers to new prompts have this part of the tokens of later ones: first tokens are what is measured
WATCH_SECONDS = 0.1  # between two readings of the CPU time of processes


@dataclass(frozen=True)
class Pace:
    """What streams got while all of them were being answered."""

    tokens_a_second: float
    context: float  # of a stream, in tokens, on average
    begin: float  # of the time, an instant of the timelines' clock
    end: float

    @property
    def num_tokens(self) -> float:
        """Tokens of all streams in that time."""
        return self.tokens_a_second * (self.end - self.begin)

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
        return cls((until - before) / (end - begin), context, begin, end)


class CpuWatch:
    """CPU seconds of processes, read again and again: how many were used between two instants."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self._instants: list[float] = []
        self._seconds: dict[str, list[float]] = {name: [] for name in pids}

    def note(self, instant: float, seconds: Mapping[str, float]) -> None:
        """Take one reading of every process."""
        self._instants.append(instant)
        for name, value in seconds.items():
            self._seconds[name].append(value)

    def used(self, name: str, begin: float, end: float) -> float:
        """CPU seconds of a process between two instants, interpolated between readings."""
        first, last = np.interp([begin, end], self._instants, self._seconds[name])
        return float(last - first)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Read in a thread until the context ends."""
        done = Event()
        thread = Thread(target=self._run, args=(done,))
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _run(self, done: Event) -> None:
        is_last = False
        while True:
            with suppress(OSError):  # a thread ended between its listing and its reading
                self.note(time.perf_counter(), {name: cpu_seconds(pid) for name, pid in self._pids.items()})
            if is_last:
                return
            is_last = done.wait(WATCH_SECONDS)


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
        many, few = range(plan.streams), range(plan.streams, plan.streams + plan.peer_streams)
        for numbers in (many, few):
            _press(plan, server, numbers, WARM_TOKENS, WARM_TOKENS)
        new = _press(plan, server, many, plan.context, max(1, plan.answer // NEW_SHARE)).timelines
        yield from _first_tokens(plan, new)
        peer = _press(plan, server, few, plan.context, plan.peer_answer).timelines
        name = f"over HTTP, {plan.peer_streams} streams of {plan.context} + {plan.peer_answer} tokens, all of it"
        yield Line("http_whole", name, whole_pace(peer), "tokens/s")
        yield from _streams(plan, server, many)


def _flags(plan: Plan, folder: Path) -> list[str]:
    flags = ["--model-id", str(folder), "--dtype", plan.dtype_name, "--max-concurrent-requests", str(2 * plan.streams)]
    return flags if plan.is_gpu else [*flags, "--num-threads", "1", "--max-batch-total-tokens", "4000"]


def _first_tokens(plan: Plan, timelines: Sequence[Timeline]) -> Iterator[Line]:
    """The figures of as many new prompts at once."""
    failures = [timeline.failure for timeline in timelines if timeline.failure is not None]
    if failures:
        raise ValueError(f"{len(failures)} of {len(timelines)} requests failed: {failures[0].message}")
    name = f"over HTTP, {plan.streams} new prompts of {plan.context} tokens at once"
    waits = [timeline.ttft for timeline in timelines]
    yield Line("first_token", f"{name}: first token", median(waits), "s, the median")
    unit = f"s; {plan.streams * plan.context / max(waits):.0f} tokens of prompts a second"
    yield Line("first_token_last", f"{name}: last first token", max(waits), unit)
    gaps = [gap for timeline in timelines for gap in timeline.gaps]
    if gaps:
        yield Line("gap_beside", f"{name}: gaps", float(np.percentile(gaps, 99)) * 1e3, "ms, the 99th percentile")


def _streams(plan: Plan, server: Server, numbers: Sequence[int]) -> Iterator[Line]:
    """The figures of all streams at once, of prompts that are cached."""
    watch = CpuWatch({"router": server.router_pid(), "shard": server.shard_pids()[0]})
    with watch.running():
        run = _press(plan, server, numbers, plan.context, plan.answer)
    name = f"over HTTP, {plan.streams} streams"
    unit = "% of a core" + (", so much that the server may have waited for it" if run.client.cpu_share > BUSY else "")
    yield Line("client_cpu", f"{name}: CPU of the client", run.client.cpu_share * 100, unit)
    pace = Pace.of(run.timelines, plan.context)
    yield Line("http", f"{name}, while all run", pace.tokens_a_second, "tokens/s")
    yield Line("http_context", f"{name}: context of a stream in that time", pace.context, "tokens on average")
    gap = mean(gap for timeline in run.timelines for gap in timeline.gaps) * 1e3
    yield Line("http_gap", f"{name}: gap between tokens", gap, "ms on average")
    for process in ("router", "shard"):
        used = watch.used(process, pace.begin, pace.end)
        share = used / (pace.end - pace.begin) * 100
        yield Line(f"{process}_cpu", f"{name}: CPU of the {process} in that time", share, "% of a core")
        yield Line(
            f"{process}_us_per_token", f"{name}: CPU of the {process} for a token", used / pace.num_tokens * 1e6, "us"
        )


def _press(plan: Plan, server: Server, numbers: Sequence[int], prompt: int, answer: int) -> Run:
    """All requests at once, with the prompt of each number."""
    vocab_size = plan.config["vocab_size"]
    prompts = [PreparedRequest(checkpoint.prompt_of(number, prompt, vocab_size), answer) for number in numbers]
    target = Target("", "tgi", Endpoint(server.url), model="", options=frozenset({IGNORE_EOS}), timeout=TIMEOUT)
    return asyncio.run(run_level(target, Level(concurrency=len(prompts)), prompts, (), lambda timeline: None))
