"""Fuzz the server with invalid inputs: each must be handled in bounded time and memory, without harm to the server.

Usage: python -m funitel_testing.fuzz [--count N] [--seed S] [--first N] [KIND ...]. Inputs are tried in processes that
may die of them. `--count 1 --first N KIND` tries one again and shows what became of it. A table of all kinds comes at
the end, and the last line is one JSON object.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from funitel_testing import fuzz_suites

# For each kind the module that tries its inputs, and how many there are in the long form.
KINDS: dict[str, tuple[str, int]] = {
    "safetensors": ("funitel_testing.fuzz_files", 700),
    "gguf": ("funitel_testing.fuzz_files", 2000),
    "spec": ("funitel_testing.fuzz_files", 2000),
    "pickle": ("funitel_testing.fuzz_files", 700),
    "bodies": ("funitel_testing.fuzz_requests", 16_000),
    "heads": ("funitel_testing.fuzz_requests", 4000),
    "messages": ("funitel_testing.fuzz_shard", 5000),
    "frames": ("funitel_testing.fuzz_shard", 3000),
    "chats": ("funitel_testing.fuzz_chats", 4000),
    "templates": ("funitel_testing.fuzz_chats", 400),
    "grammars": ("funitel_testing.fuzz_chats", 3000),
    "images": ("funitel_testing.fuzz_images", 20_000),
    "sounds": ("funitel_testing.fuzz_sounds", 20_000),
}
SOUND = ("loaded", "refused", "passed")
MAX_SECONDS = 40.0  # for an input
START_SECONDS = 120.0  # for a process to be ready
MAX_MIB = 256  # for an input
MAX_GROWTH_MIB = 128  # of a process from a fifth of its inputs on: caches have filled by then
COLUMNS = (
    "inputs",
    "crashes",
    "hangs",
    "leaks",
    "5xx without a logged cause",
    "other faults",
    "slowest s",
    "grown MiB",
)


@dataclass
class Report:
    """What became of the inputs of all kinds."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)  # by kind and outcome
    failures: list[dict[str, Any]] = field(default_factory=list)
    slowest: Counter[str] = field(default_factory=Counter)  # seconds, by kind
    growth: Counter[str] = field(default_factory=Counter)  # MiB, by kind

    def add(self, result: dict[str, Any]) -> None:
        """Count one result."""
        kind, outcome = result["kind"], result["outcome"]
        if outcome in SOUND and result["mib"] > MAX_MIB:
            outcome = "too much memory"
        self.outcomes[kind, outcome] += 1
        if outcome not in SOUND:
            self.failures.append(result | {"outcome": outcome})
        self.slowest[kind] = max(self.slowest[kind], result.get("seconds", 0.0))

    def add_growth(self, held: list[tuple[str, int]]) -> None:
        """Note by how much a process grew: the kind of each of its inputs, and MiB held after it."""
        for kind in {kind for kind, _ in held}:
            later = held[len(held) // 5 :]
            growth = later[-1][1] - later[0][1]
            self.growth[kind] = max(self.growth[kind], growth)
            if growth > MAX_GROWTH_MIB:
                self.failures.append({"kind": kind, "number": -1, "outcome": f"leak of {growth} MiB", "message": ""})

    def add_suite(self, suite: str, tried: fuzz_suites.Tried) -> None:
        """Count what a suite has tried."""
        self.outcomes[suite, "passed"] += tried.num_inputs
        if tried.problem:
            self.failures.append({"kind": suite, "number": -1, "outcome": "failed", "message": tried.problem})

    def row(self, kind: str) -> tuple[object, ...]:
        """A kind's line of the table."""
        outcomes = {outcome: count for (its, outcome), count in self.outcomes.items() if its == kind}
        failed = Counter(_column(failure["outcome"]) for failure in self.failures if failure["kind"] == kind)
        counts = (sum(outcomes.values()), *(failed[column] for column in COLUMNS[1:6]))
        return (*counts, round(self.slowest[kind], 1), self.growth[kind])


def _column(outcome: str) -> str:
    """Which column of the table a failure belongs to."""
    if outcome.startswith("process ended"):
        return "crashes"
    if outcome.startswith("no end"):
        return "hangs"
    if outcome.startswith(("leak", "too much memory", "MemoryError")):
        return "leaks"
    return "5xx without a logged cause" if outcome.endswith("without a logged cause") else "other faults"


def fuzz(
    kinds: list[str], count: int | None = None, *, seed: int = 0, first: int = 0, num_processes: int = 1
) -> Report:
    """Try `count` inputs of each kind, or as many as the long form has, from number `first` on."""
    report = Report()
    with ThreadPoolExecutor(num_processes) as pool:
        for worker in dict.fromkeys(KINDS[kind][0] for kind in kinds):
            counts = {kind: KINDS[kind][1] if count is None else count for kind in kinds if KINDS[kind][0] == worker}
            most = max(counts.values())
            inputs = [(kind, n) for n in range(first, first + most) for kind in counts if n < first + counts[kind]]
            step = -(-len(inputs) // num_processes)
            spans = [inputs[start : start + step] for start in range(0, len(inputs), step)]
            for runs in pool.map(lambda span, worker=worker: _try_all(worker, span, seed), spans):
                for results in runs:
                    report.add_growth([(result["kind"], result["held"]) for result in results if "held" in result])
                    for result in results:
                        report.add(result)
    return report


def _try_all(worker: str, inputs: list[tuple[str, int]], seed: int) -> list[list[dict[str, Any]]]:
    """Try some inputs, in as many processes as it takes: one that dies or hangs is followed by another."""
    runs = []
    while inputs:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            found, ending = _run(worker, inputs, seed, Path(folder))
        inputs = inputs[len(found) :]
        if ending:
            kind, number = inputs.pop(0) if inputs else (found[-1]["kind"], -1)
            found.append({"kind": kind, "number": number, "outcome": ending, "message": "", "mib": 0})
        runs.append(found)
    return runs


def _run(worker: str, inputs: list[tuple[str, int]], seed: int, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Results of one process, and how it ended if not well."""
    (folder / "files.json").write_text(json.dumps({"seed": seed, "files": inputs}))
    process = subprocess.Popen(
        [sys.executable, "-m", worker, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    lines: queue.Queue[str] = queue.Queue()
    reader = threading.Thread(target=_pump, args=(process.stdout, lines))
    reader.start()
    results = []
    patience = START_SECONDS
    ending = ""
    with process:
        try:
            while line := lines.get(timeout=patience):
                result = json.loads(line)
                if "outcome" in result:
                    results.append(result)
                patience = MAX_SECONDS if len(results) < len(inputs) else START_SECONDS  # to end, too
        except queue.Empty:
            ending = f"no end within {patience:g} seconds"
            process.kill()
        reader.join()
    if not ending and process.returncode:
        ending = f"process ended with {process.returncode}"
    return results, ending


def _pump(stdout: Any, lines: "queue.Queue[str]") -> None:
    for line in stdout:
        lines.put(line)
    lines.put("")


def table(report: Report, kinds: list[str]) -> str:
    """What became of each kind, and of all."""
    rows = [(kind, *report.row(kind)) for kind in kinds]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [("kind", *COLUMNS), ("---",) * 9, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [*KINDS, *fuzz_suites.SUITES]
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(every)}; all by default")
    parser.add_argument("--count", type=int, help="inputs of each kind, instead of the long form's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    kinds = given.kinds or every
    report = fuzz(
        [kind for kind in kinds if kind in KINDS],
        given.count,
        seed=given.seed,
        first=given.first,
        num_processes=given.processes,
    )
    for suite in [kind for kind in kinds if kind in fuzz_suites.SUITES]:
        report.add_suite(suite, fuzz_suites.run(suite, given.count))
    for failure in report.failures[:20]:
        print(f"{failure['kind']} {failure['number']}: {failure['outcome']}\n{failure['message']}")
    print(table(report, kinds))
    print(json.dumps({"inputs": sum(report.outcomes.values()), "failed": len(report.failures)}))
    sys.exit(1 if report.failures else 0)


if __name__ == "__main__":
    main()
