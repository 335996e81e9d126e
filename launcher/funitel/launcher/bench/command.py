"""`funitel bench`: probe each server, run load levels in turns on all servers, and report."""

import json
import random
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from funitel.launcher.bench.apis import IGNORE_EOS, USAGE
from funitel.launcher.bench.figures import Objectives, summarise
from funitel.launcher.bench.http import Endpoint
from funitel.launcher.bench.load import Level, run_level
from funitel.launcher.bench.plot import check_plot, plot
from funitel.launcher.bench.progress import BenchProgress, progress
from funitel.launcher.bench.report import LevelResult, ServerResult, summary, tables, warnings
from funitel.launcher.bench.settings import BenchSettings
from funitel.launcher.bench.target import Target
from funitel.launcher.bench.workload import Workload, arrivals
from funitel.launcher.terminal_ui.http_client import context_of
from funitel.launcher.terminal_ui.terminal import one_line, without_controls
from funitel.proto.errors import FunitelError

DEFAULT_CONCURRENCY = (1, 4, 16)
WARM_TOKENS = 8  # of a warm-up answer
REQUESTS_PER_STREAM, MIN_REQUESTS, REQUESTS_WITH_RATE = 4, 8, 64
SEEDS = 1 << 32


def bench(settings: BenchSettings) -> None:
    """Measure and print.

    Raises:
        FunitelError: settings are invalid, a server does not answer, or no request succeeded.
    """
    if settings.plot is not None:
        check_plot(settings.plot)
    seed = random.randrange(SEEDS) if settings.seed is None else settings.seed
    results = run_loop(Bench(settings, seed).run())
    print(without_controls("\n".join(tables(settings, results))))
    for warning in warnings(results):
        print(f"warning: {one_line(warning)}", file=sys.stderr)
    if settings.plot is not None:
        plot(settings.plot, results)
    print(json.dumps(summary(settings, seed, results)), flush=True)
    if not any(figures["output_tokens"] for server in results for level in server.levels for figures in level.rounds):
        raise FunitelError(f"no request succeeded: {results[0].levels[0].failures[0].message}")


run_loop: Callable[[Coroutine[Any, Any, list[ServerResult]]], list[ServerResult]] = uvloop.run
"""uvloop takes half the CPU time of asyncio's own loop, which leaves more to the server."""


class Bench:
    """One benchmark of one or several servers."""

    def __init__(self, settings: BenchSettings, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        self._levels = _levels(settings)
        self._workload = Workload(
            settings.workload,
            settings.prompt_length,
            settings.output_length,
            settings.prefix_length,
            settings.num_groups,
        )
        self._objectives = Objectives(_seconds(settings.slo_ttft_ms), _seconds(settings.slo_itl_ms))
        options = frozenset({USAGE, IGNORE_EOS} if settings.ignore_eos else {USAGE})
        context = context_of(settings)
        self._targets = [
            Target(
                settings.name_of(index),
                settings.api_of(index),
                Endpoint(url, settings.api_key_of(index), context),
                model=settings.model_of(index),
                options=options,
                timeout=settings.timeout,
            )
            for index, url in enumerate(settings.url)
        ]

    async def run(self) -> list[ServerResult]:
        """Every level of every server, round after round.

        Raises:
            FunitelError: a server does not answer a first request.
        """
        for target in self._targets:
            await target.probe()
        results = [ServerResult(target, [LevelResult(level) for level in self._levels]) for target in self._targets]
        num_runs = self._settings.rounds * len(self._targets)
        with progress(num_runs * sum(map(self._num_requests, self._levels))) as bar:
            for target in self._targets:
                await self._warm_up(target, bar)
            for number in range(self._settings.rounds):
                for index in range(len(self._levels)):
                    # Every other round is reversed, so that a machine that slows down or warms up favours no server.
                    for server in results if number % 2 == 0 else reversed(results):
                        await self._measure(server, index, number, bar)
        return results

    async def _warm_up(self, target: Target, bar: BenchProgress) -> None:
        """Run requests that are not measured, so that no level includes one-time costs."""
        count = self._settings.warmup
        streams = max((level.concurrency or 4) for level in self._levels)
        prompts = await target.prepare(
            Workload("fixed", self._settings.prompt_length, WARM_TOKENS).prompt_specs(
                streams if count is None else count, self._seed, "warm-up", target.name
            )
        )
        if prompts:
            bar.begin(f"{target.name}: warm-up")
            await run_level(target, Level(concurrency=streams), prompts, (), lambda timeline: None)

    async def _measure(self, server: ServerResult, index: int, number: int, bar: BenchProgress) -> None:
        """Run one level on one server; prompts are the same for all servers in a round, and differ between rounds."""
        level, targets = self._levels[index], [target.endpoint.url for target in self._targets]
        # A server that is given twice, to compare its APIs, gets other prompts the second time: no cached prefix.
        twin = targets[: self._targets.index(server.target)].count(server.target.endpoint.url)
        count, key = self._num_requests(level), (self._seed, number, index, twin)
        counter = next((target for target in self._targets if target.counts_prompts), self._targets[0])
        prompts = await counter.prepare(self._workload.prompt_specs(count, *key))
        label = f"round {number + 1} of {self._settings.rounds}, " if self._settings.rounds > 1 else ""
        bar.begin(f"{server.target.name}: {label}{level}")
        instants = arrivals(level.rate, count, *key, "instants") if level.rate is not None else ()
        run = await run_level(server.target, level, prompts, instants, bar.report)
        figures = summarise(run.timelines, self._objectives)
        figures |= {"client_cpu_share": run.client.cpu_share, "client_lag_ms_p99": run.client.lag_ms_p99}
        server.levels[index].add(figures, run.timelines)

    def _num_requests(self, level: Level) -> int:
        if self._settings.num_requests is not None:
            return self._settings.num_requests
        if level.concurrency is None:
            return REQUESTS_WITH_RATE
        return max(MIN_REQUESTS, REQUESTS_PER_STREAM * level.concurrency)


def _levels(settings: BenchSettings) -> list[Level]:
    if settings.request_rate is not None:
        return [Level(rate=rate) for rate in settings.request_rate]
    return [Level(concurrency=count) for count in settings.concurrency or DEFAULT_CONCURRENCY]


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
