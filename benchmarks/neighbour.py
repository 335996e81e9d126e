"""Measure the cost of a busy neighbour: gaps between tokens of one stream, alone and beside a busy process.

The neighbour is one thread in an endless loop, kept to one core (`--core`, the last this process may use when not
given), at ordinary priority. It comes and goes: in each round every server is asked without it and with it, for prompts
of the same lengths and never the same twice, and every other round in reverse order, so that a machine that drifts
favours no server. Servers are given by
URL, whatever they are, one at a time under load; start them with the threads they would have alone.

TPOT is the median over requests of the mean gap, p99 the 99th percentile of all gaps of a round; both are medians over
rounds, and a ratio is that of the two medians. A server that sends several tokens in an event has longer gaps. The last
line on stdout is one JSON object.

    python benchmarks/neighbour.py --url http://127.0.0.1:3000 --name ours --url http://127.0.0.1:8080 --name theirs
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from funitel.launcher.bench.apis import DIALECTS, IGNORE_EOS, USAGE
from funitel.launcher.bench.figures import Figures, Objectives, medians, summarise
from funitel.launcher.bench.http import Endpoint
from funitel.launcher.bench.load import Level, run_level
from funitel.launcher.bench.target import Target
from funitel.launcher.bench.workload import Workload
from funitel.proto.errors import FunitelError

ALONE, BESIDE = "alone", "beside a neighbour"
MEASURES = {"tpot_ms": "tpot_ms_p50", "gap_ms_p99": "itl_ms_p99", "ttft_ms": "ttft_ms_p50"}
SPIN = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\nwhile True: pass"
TIMEOUT_SECONDS = 300.0


@contextmanager
def neighbour(core: int) -> Iterator[None]:
    """A process that keeps one core busy."""
    process = subprocess.Popen([sys.executable, "-c", SPIN, str(core)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()  # it is on its core
        yield
    finally:
        process.kill()
        process.communicate()


class Measurement:
    """Rounds of some servers, each alone and beside the neighbour."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._seed = random.randrange(1 << 32)
        self._workload = Workload("fixed", arguments.prompt_tokens, arguments.output_tokens)
        self.targets = [self._target(i) for i in range(len(arguments.url))]
        self.rounds: dict[tuple[str, str], list[Figures]] = {
            (target.name, company): [] for target in self.targets for company in (ALONE, BESIDE)
        }

    def _target(self, index: int) -> Target:
        arguments = self._arguments
        name = arguments.name[index] if arguments.name else arguments.url[index]
        api = arguments.api[index if len(arguments.api) > 1 else 0]
        endpoint = Endpoint(arguments.url[index], None)
        options = frozenset({USAGE, IGNORE_EOS})
        return Target(name, api, endpoint, model="", options=options, timeout=TIMEOUT_SECONDS)

    async def run(self) -> None:
        """Ask every server in both companies, round after round; what comes of it is in `rounds`."""
        for target in self.targets:
            await target.probe()
            await self._ask(target, "warm-up")
        for number in range(self._arguments.rounds):
            turns = [(target, company) for target in self.targets for company in (ALONE, BESIDE)]
            for target, company in turns if number % 2 == 0 else reversed(turns):
                key = f"{number} {company}"  # a prefix cache must not know the prompts from the other company
                if company == ALONE:
                    figures = await self._ask(target, key)
                else:
                    with neighbour(self._arguments.core):
                        figures = await self._ask(target, key)
                self.rounds[target.name, company].append(figures)

    async def _ask(self, target: Target, key: str) -> Figures:
        prompts = await target.prepare(self._workload.prompt_specs(self._arguments.num_requests, self._seed, key))
        run = await run_level(target, Level(concurrency=1), prompts, (), lambda timeline: None)
        failed = [timeline.failure for timeline in run.timelines if timeline.failure is not None]
        if failed:
            raise FunitelError(f"{target.name}: {failed[0].kind}: {failed[0].message}")
        return summarise(run.timelines, Objectives())


def results_of(measurement: Measurement) -> dict[str, dict[str, dict[str, float]]]:
    """For each server and measure: milliseconds in both companies, and how many times as long the second is."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    for target in measurement.targets:
        alone, beside = (medians(measurement.rounds[target.name, company]) for company in (ALONE, BESIDE))
        results[target.name] = {}
        for name, figure in MEASURES.items():
            before, after = alone[figure], beside[figure]
            if before is not None and after is not None:
                results[target.name][name] = {"alone": before, "beside": after, "ratio": after / before}
    return results


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; what does not fit together ends the program in one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", action="append", required=True, help="a server; repeatable")
    parser.add_argument("--name", action="append", default=[], help="its name, one for each --url")
    parser.add_argument("--api", action="append", default=[], choices=DIALECTS, help="one for all, or for each --url")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="the neighbour's core")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-requests", type=int, default=8, help="requests of a round, one after the other")
    parser.add_argument("--prompt-tokens", type=int, default=108)
    parser.add_argument("--output-tokens", type=int, default=64)
    arguments = parser.parse_args(argv)
    arguments.api = arguments.api or ["openai-chat"]
    if arguments.name and len(arguments.name) != len(arguments.url):
        parser.error(f"--name must be given for each of {len(arguments.url)} --url, given {len(arguments.name)} times")
    if len(set(arguments.name or arguments.url)) < len(arguments.url):
        parser.error("two servers have the same name: give each a --name")
    if len(arguments.api) not in (1, len(arguments.url)):
        parser.error(f"--api must be given once or for each --url, given {len(arguments.api)} times")
    if arguments.core not in os.sched_getaffinity(0):
        parser.error(f"--core must be one this process may use, given {arguments.core}")
    for name in ("rounds", "num_requests", "prompt_tokens", "output_tokens"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be >= 1, given {getattr(arguments, name)}")
    return arguments


def main() -> None:
    """Measure, print a line for each server and measure, and the JSON."""
    arguments = parse()
    measurement = Measurement(arguments)
    try:
        asyncio.run(measurement.run())
    except FunitelError as error:
        raise SystemExit(f"error: {error.message}") from error
    results = results_of(measurement)
    for server, measures in results.items():
        for name, values in measures.items():
            print(f"{server:<24} {name:<12} {values['alone']:8.2f} {values['beside']:8.2f} {values['ratio']:6.2f}x")
    options = {name: value for name, value in vars(arguments).items() if name not in ("url", "name", "api")}
    print(json.dumps({"benchmark": "neighbour", **options, "results": results}))


if __name__ == "__main__":
    main()
