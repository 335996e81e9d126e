"""Damaged checkpoints and specs: each must load, or be refused in one line, soon and in little memory.

Usage: python -m funitel_testing.fuzz_files [--count N] [--seed S] [--first N] [KIND ...]. Files are tried in processes
that may die of them; the last line is one JSON object. `--count 1 --first N KIND` tries one file again and shows what
became of it.
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

from funitel_testing.fuzz_mutants import KINDS

COUNT = 700  # files of each kind
WORKER = "funitel_testing.fuzz_worker"
MOST_SECONDS = 20.0  # for a file
START_SECONDS = 120.0  # for a process to have its libraries
MOST_MIB = 256


@dataclass
class Report:
    """What became of the files of all kinds."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    worst_seconds: float = 0.0
    worst_mib: int = 0

    def add(self, kind: str, result: dict[str, Any]) -> None:
        """Count one result."""
        outcome = result["outcome"]
        if outcome in ("loaded", "refused"):
            outcome = "too much memory" if result["mib"] > MOST_MIB else outcome
        if outcome not in ("loaded", "refused"):
            self.failures.append({"kind": kind, **result, "outcome": outcome})
        self.outcomes[f"{kind} {outcome}"] += 1
        self.worst_seconds = max(self.worst_seconds, result.get("seconds", 0.0))
        self.worst_mib = max(self.worst_mib, result.get("mib", 0))


def fuzz(kinds: list[str], count: int, *, seed: int = 0, first: int = 0, num_processes: int = 1) -> Report:
    """Try `count` files of each kind, from number `first` on."""
    report = Report()
    step = -(-count // num_processes)
    spans = [range(start, min(start + step, first + count)) for start in range(first, first + count, step)]
    with ThreadPoolExecutor(num_processes) as pool:
        for results in pool.map(lambda span: _try_all(kinds, span, seed), spans):
            for result in results:
                report.add(result["kind"], result)
    return report


def _try_all(kinds: list[str], span: range, seed: int) -> list[dict[str, Any]]:
    """Try some files of each kind, in as many processes as it takes: one that dies or hangs is followed by another."""
    results: list[dict[str, Any]] = []
    files = [(kind, number) for number in span for kind in kinds]
    while files:
        with tempfile.TemporaryDirectory() as folder:
            found, ending = _run(files, seed, Path(folder))
        results += found
        files = files[len(found) :]
        if files:
            kind, number = files.pop(0)
            results.append({"kind": kind, "number": number, "outcome": ending, "message": ""})
    return results


def _run(files: list[tuple[str, int]], seed: int, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Results of one process, and how it ended."""
    (folder / "files.json").write_text(json.dumps({"seed": seed, "files": files}))
    process = subprocess.Popen(
        [sys.executable, "-m", WORKER, str(folder)],
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
                patience = MOST_SECONDS
                result = json.loads(line)
                if "outcome" in result:
                    results.append(result)
        except queue.Empty:
            ending = f"no end within {patience:g} seconds"
            process.kill()
        reader.join()
    return results, ending or f"process ended with {process.returncode}"


def _pump(stdout: Any, lines: "queue.Queue[str]") -> None:
    for line in stdout:
        lines.put(line)
    lines.put("")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; all by default")
    parser.add_argument("--count", type=int, default=COUNT, help=f"files of each kind; {COUNT} by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    kinds = given.kinds or list(KINDS)
    report = fuzz(kinds, given.count, seed=given.seed, first=given.first, num_processes=given.processes)
    for failure in report.failures[:20]:
        print(f"{failure['kind']} {failure['number']}: {failure['outcome']}\n{failure['message']}")
    for outcome, count in sorted(report.outcomes.items()):
        print(f"{outcome:<40}{count:>6}")
    print(
        json.dumps(
            {
                "files": sum(report.outcomes.values()),
                "failed": len(report.failures),
                "worst_seconds": report.worst_seconds,
                "worst_mib": report.worst_mib,
            }
        )
    )
    sys.exit(1 if report.failures else 0)


if __name__ == "__main__":
    main()
