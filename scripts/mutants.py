"""Mutate the pure core with mutmut and print, package by package, which mutants the tests miss.

A mutant is one changed operator, number, argument or name; lines that only raise or log, and decorated functions, are
left alone. mutmut runs the tests that reach it. A survivor is listed by its changed line, unless `mutants.toml` gives
the reason why no test can kill it. A mutant whose tests ran out of time is listed too, and does not count as killed:
it may loop for ever, or the machine was busy. The exit code is 1 where fewer than 90 % of the mutants of a package are
killed, or a survivor has no reason.

mutmut wants sources below `src` and one folder of tests; both are laid out in `build/mutants/PACKAGE`.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parent.parent
PARTS = ("proto", "router", "model_server", "launcher", "llm")
MIN_KILLED = 0.9
SURVIVED = ("survived", "no tests", "not checked", "check was interrupted by user")
TIMED_OUT = "timeout"


@dataclass(frozen=True)
class Target:
    """A package of the pure core: the files that are mutated, and the tests that must kill the mutants."""

    part: str
    sources: tuple[str, ...]  # below PART/funitel/PART
    tests: tuple[str, ...]  # below PART/tests
    left_out: tuple[str, ...] = ()  # tests that take longest, and kill no mutant that the others leave


TARGETS = {
    "scheduler": Target(
        "router",
        ("scheduler/*.py",),
        ("scheduler",),
        left_out=("test_backlogged_keys", "test_every_request_ends", "test_a_key_that_was_here", "TestScheduler"),
    ),
    "cost": Target("router", ("scheduler/cost/*.py",), ("scheduler/cost",)),
    "kv_cache": Target("router", ("kv_cache/*.py",), ("kv_cache",)),
    "stops": Target("router", ("text/stop_holdback.py",), ("text/test_stop_holdback.py",)),
    "quotas": Target("router", ("auth/*.py",), ("auth",)),
    "sampling": Target(
        "model_server",
        ("sampling/[!g]*.py", "sampling/gumbel_noise.py"),
        ("sampling/test_[!g]*.py", "sampling/test_gumbel_noise.py"),
    ),
    "grammar": Target("model_server", ("sampling/grammar.py",), ("sampling/test_grammar.py",)),
}

OPTIONS = ["-p", "no:cacheprovider", "-x", "-q", "--hypothesis-profile=short", "--ignore-glob=*_replay.py"]
CONFIG = """
[tool.mutmut]
source_paths = ["src"]
only_mutate = {sources}
do_not_mutate_patterns = ["^ *(raise|logger)\\\\b"]
also_copy = ["conftest.py", "testing", "benchmarks"]
pytest_add_cli_args = {options}
pytest_add_cli_args_test_selection = {tests}
timeout_multiplier = 8.0
timeout_constant = 6.0

[tool.pytest.ini_options]
addopts = ["--import-mode=importlib", "-m", "not slow"]
asyncio_mode = "auto"
asyncio_default_fixture_loop_scope = "function"
pythonpath = ["src", "testing", "tests"]
markers = ["gpu", "slow"]
"""


def lay_out(folder: Path, target: Target, module: str) -> None:
    """Write the folder that mutmut works in."""
    shutil.rmtree(folder, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    for name in PARTS:
        shutil.copytree(ROOT / name / "funitel", folder / "src/funitel", dirs_exist_ok=True, ignore=ignored)
    shutil.copytree(ROOT / target.part / "tests", folder / "tests", ignore=ignored)
    for name in ("testing", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "conftest.py", folder)

    def found(below: Path, patterns: tuple[str, ...]) -> list[Path]:
        return [path.relative_to(folder) for pattern in patterns for path in below.glob(pattern)]

    sources = [
        str(path) for path in found(folder / "src/funitel" / target.part, target.sources) if fnmatch(path.stem, module)
    ]
    tests = [str(path) for path in found(folder / "tests", target.tests)]
    left_out = ["-k", f"not ({' or '.join(target.left_out)})"] if target.left_out else []
    (folder / "pyproject.toml").write_text(CONFIG.format(sources=sources, tests=tests, options=OPTIONS + left_out))


def mutmut(folder: Path, *arguments: str) -> str:
    """Run mutmut in the folder and return its output.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, "-m", "mutmut", *arguments]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        raise SystemExit(f"error: mutmut failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def key_of(folder: Path, mutant: str) -> str:
    """Name a mutant by its function and changed line: those outlast the numbers that mutmut gives."""
    name, function = re.sub(r"__mutmut_\d+$", "", mutant).rsplit(".", 2)[1:]
    lines = re.findall(r"^[-+](?![-+]).*", mutmut(folder, "show", mutant), re.MULTILINE)
    changed = [line for line in lines if line.startswith("+")] or lines
    text = " ".join(line[1:].strip() if line.startswith("+") else f"- {line[1:].strip()}" for line in changed)
    return f"{name}.{re.sub('^x_|^xǁ', '', function).replace('ǁ', '.')}: {text}"


def run(name: str, module: str, max_children: int, reasons: dict[str, str]) -> bool:
    """Mutate a package, or one of its modules, and print the survivors; return whether the tests are good enough."""
    folder, began = ROOT / "build/mutants" / name, time.monotonic()
    lay_out(folder, TARGETS[name], module)
    mutmut(folder, "run", "--max-children", str(max_children))
    outcomes = dict(re.findall(r"^ *(\S+): (.+)$", mutmut(folder, "results", "--all", "true"), re.MULTILINE))
    survivors = [key_of(folder, mutant) for mutant, outcome in outcomes.items() if outcome in SURVIVED]
    timed_out = [key_of(folder, mutant) for mutant, outcome in outcomes.items() if outcome == TIMED_OUT]
    num_killed = sum(outcome not in (*SURVIVED, TIMED_OUT) for outcome in outcomes.values())
    unnamed = [survivor for survivor in survivors if not any(key in survivor for key in reasons)]
    share = num_killed / max(1, len(outcomes))
    num_named = len(survivors) - len(unnamed)
    print(f"{name}: {len(outcomes)} mutants, {num_killed} killed ({share:.1%}), {len(timed_out)} timed out;", end=" ")
    print(f"{num_named} survivors named, {len(unnamed)} not; {time.monotonic() - began:.0f} s")
    for key in sorted(timed_out):
        print(f"  timed out: {key}")
    for key in sorted(unnamed):
        print(f"  survived: {key}")
    for key in reasons:
        if module == "*" and not any(key in survivor for survivor in survivors):
            print(f"  named in mutants.toml, but killed or gone: {key}")
    return share >= MIN_KILLED and not unnamed


def main() -> int:
    """Mutate the packages that are named, or all."""
    parser = argparse.ArgumentParser(description="Mutate the pure core; print which mutants the tests miss.")
    parser.add_argument(
        "packages", nargs="*", default=list(TARGETS), help="PACKAGE or PACKAGE/MODULE, a pattern too; default: all"
    )
    parser.add_argument("--max-children", type=int, default=2, help="mutants that are tested at once")
    arguments = parser.parse_args()
    reasons = tomllib.loads((ROOT / "scripts/mutants.toml").read_text())
    asked = [package.partition("/") for package in arguments.packages]
    if unknown := {name for name, _, _ in asked} - TARGETS.keys():
        parser.error(f"no such package: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    good = [run(name, module or "*", arguments.max_children, reasons.get(name, {})) for name, _, module in asked]
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
