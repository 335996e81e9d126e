"""Inputs that other programs make: schemathesis of our document, hypothesis of strategies, atheris of what it covers.

Each suite is a process; how many inputs it has tried is in what it says at its end.
"""

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_SECONDS = 3600
STREAMS = ("core/test_stream_properties.py", "chat/test_tool_parsers.py", "text/test_stop_holdback.py")
COVERAGE_RUNS = 20_000


@dataclass(frozen=True, slots=True)
class Tried:
    """How many inputs a suite has tried, and what is wrong with what became of them, or ""."""

    num_inputs: int
    problem: str = ""


def run(suite: str, count: int | None) -> Tried:
    """Run one of `SUITES`; `count` inputs of each of its parts, where it takes a number, instead of the long form's."""
    with tempfile.TemporaryDirectory() as folder:
        return SUITES[suite](count, Path(folder))


def _endpoints(count: int | None, folder: Path) -> Tried:
    figures = folder / "figures.json"
    ended = _pytest("integration-tests/test_schemathesis.py", *(() if count else ("--full",)), f"--figures={figures}")
    found = json.loads(figures.read_text()) if figures.exists() else {}
    return Tried(sum(found.values()), "" if ended.returncode == 0 else ended.stdout[-3000:])


def _streams(count: int | None, folder: Path) -> Tried:
    profile = () if count else ("--hypothesis-profile=long",)
    ended = _pytest(*(f"router/tests/{name}" for name in STREAMS), *profile, "--hypothesis-show-statistics")
    tried = re.findall(r"(\d+) passing", ended.stdout)
    return Tried(sum(map(int, tried)), "" if ended.returncode == 0 else ended.stdout[-3000:])


def _pytest(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=MAX_SECONDS)


def _coverage(count: int | None, folder: Path) -> Tried:
    if importlib.util.find_spec("atheris") is None:
        return Tried(0, "atheris is not installed")
    tried = [_covered(target, count or COVERAGE_RUNS, folder) for target in ("gguf", "spec")]
    return Tried(sum(one.num_inputs for one in tried), "\n".join(filter(None, (one.problem for one in tried))))


def _covered(target: str, num_runs: int, folder: Path) -> Tried:
    command = [sys.executable, "-m", "funitel_testing.fuzz_coverage", target, str(folder), str(num_runs)]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=MAX_SECONDS)
    done = re.search(r"Done (\d+) runs|#(\d+)\s+DONE", ended.stderr)
    return Tried(int(done[1] or done[2]) if done else 0, "" if ended.returncode == 0 and done else ended.stderr[-3000:])


SUITES: dict[str, Callable[[int | None, Path], Tried]] = {
    "endpoints": _endpoints,
    "streams": _streams,
    "coverage": _coverage,
}
