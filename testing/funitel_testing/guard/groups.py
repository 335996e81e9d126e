"""The groups of rows: how each is measured, and why a machine can hold none of it against the table."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from funitel.model_server.cpu.build import cpu_flags
from funitel.model_server.cpu.compiler import INSTRUCTION_SETS
from funitel_testing.guard import deployment, shard, table
from funitel_testing.guard.table import Finding, Rows

MAX_SECONDS = 300.0


@dataclass(frozen=True)
class Group:
    """Rows that are measured together, and which of the tools that they depend on."""

    measure: Callable[[Path], Rows]
    depends_on: tuple[str, ...] = ()


def in_process(module: str, argument: str) -> Rows:
    """Rows that a module of this package prints, in a process of its own."""
    command = [sys.executable, "-m", f"funitel_testing.guard.{module}", argument]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=MAX_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{module} {argument} ended with {done.returncode}: {done.stderr[-2000:]}")
    rows: dict[str, float | str] = json.loads(done.stdout.splitlines()[-1])
    return rows


def instructions(instruction_set: str) -> Callable[[Path], Rows]:
    """Measure the instructions of the fused step on one of the sets."""
    return lambda _: in_process("instructions", instruction_set)


def _instruction_sets() -> list[str]:
    """Those of this CPU, the best first."""
    return [name for name, needs, _ in INSTRUCTION_SETS if needs <= cpu_flags()]


GROUPS: Mapping[str, Group] = {
    "router": Group(lambda _: in_process("router", "rows")),
    "shard": Group(lambda folder: asyncio.run(shard.measure(folder))),
    "start": Group(deployment.measure, ("python",)),
    **{f"instructions {name}": Group(instructions(name), ("compiler",)) for name, _, _ in INSTRUCTION_SETS},
}
BEST = next((f"instructions {name}" for name in _instruction_sets()), "")
COUNTED = [name for name in GROUPS if not name.startswith("instructions")] + ([BEST] if BEST else [])
"""What a check counts: of the instruction sets the one that serves here."""
WRITTEN = [*COUNTED, *(f"instructions {name}" for name in _instruction_sets()[1:])]


def measured(name: str) -> Rows:
    """Rows of a group."""
    with tempfile.TemporaryDirectory() as folder:
        return GROUPS[name].measure(Path(folder))


def reason_to_skip(name: str, found: Mapping[str, Any]) -> str:
    """Why the bounds of a table do not hold for a group on this machine; empty if they do."""
    here = table.tools()
    for tool in GROUPS[name].depends_on:
        if found["tools"][tool] != here[tool]:
            return f"bounds are for {tool} {found['tools'][tool]}, this is {here[tool]}"
    if name.startswith("instructions") and name not in found:
        return f"no bounds for {name} yet: {table.COMMAND} on a machine with them"
    return ""


def checked(name: str, found: Mapping[str, Any], measure: Callable[[str], Rows] = measured) -> list[Finding]:
    """Hold a group against its bounds. What is over is measured again: the lesser count of each row holds.

    The first start after a change compiles modules of Python, and a thread may be scheduled so that it asks once more.
    """
    rows = measure(name)
    findings = table.check(name, rows, found.get(name, {}))
    if not any(finding.is_over for finding in findings):
        return findings
    again = measure(name)
    least = {row: _lesser(value, again.get(row, value)) for row, value in rows.items()}
    return table.check(name, least, found.get(name, {}))


def _lesser(one: float | str, other: float | str) -> float | str:
    return one if isinstance(one, str) or isinstance(other, str) else min(one, other)
