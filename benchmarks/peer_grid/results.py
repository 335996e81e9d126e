"""The file of results: what was measured, by round, so that a grid that was interrupted goes on where it was."""

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from funitel.proto.errors import FunitelError

from .measure import Round
from .tuning import Tuned

ROOT = Path(__file__).parents[2]
FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16", "asimddp", "i8mm", "sve")
OURS, PEER, BENCH = "ours", "peer", "llama-bench"


@dataclass(slots=True)
class Record:
    """A cell: rounds of each side in the order of measuring, what ran, and why it failed if it did."""

    commit: str = ""
    date: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    commands: dict[str, list[str]] = field(default_factory=dict)
    rounds: dict[str, list[Round]] = field(default_factory=dict)
    problem: str = ""

    def num_rounds(self) -> int:
        """Rounds that every side has finished."""
        return min((len(rounds) for rounds in self.rounds.values()), default=0)


class Results:
    """All cells of one machine, in a JSON file that is replaced after each round."""

    def __init__(self, path: Path) -> None:
        """Read the file, if there is one.

        Raises:
            FunitelError: it is no file of results.
        """
        self._path = path
        self.machine: dict[str, Any] = {}
        self.tuned: dict[str, Any] = {}
        self.cells: dict[str, Record] = {}
        self.neutral: dict[str, Any] = {}
        if not path.exists():
            return
        try:
            content = json.loads(path.read_text())
            self.machine, self.tuned, self.neutral = content["machine"], content["tuned"], content["neutral"]
            self.cells = {key: Record(**cell) for key, cell in content["cells"].items()}
        except (ValueError, LookupError, TypeError) as error:
            raise FunitelError(f"{path} is no file of results of this program: {error}") from error

    def save(self) -> None:
        """Replace the file."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "machine": self.machine,
            "tuned": self.tuned,
            "cells": {key: asdict(cell) for key, cell in self.cells.items()},
            "neutral": self.neutral,
        }
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=1))
        partial.replace(self._path)

    def cell(self, key: str, commit: str, rounds: int) -> Record:
        """The record of a cell to go on with: begun anew where it failed, or is incomplete and of another commit."""
        found = self.cells.get(key)
        if found is None or found.problem or (found.num_rounds() < rounds and found.commit != commit):
            found = self.cells[key] = Record(commit=commit, date=date.today().isoformat())
        return found

    def is_done(self, key: str, rounds: int) -> bool:
        """Whether a cell has all its rounds."""
        found = self.cells.get(key)
        return found is not None and not found.problem and found.num_rounds() >= rounds

    def keep_tuned(self, key: str, tuned: Tuned) -> None:
        """Record the options of a peer, and what was tried."""
        trials = [{"options": dict(t.options), "speed": t.speed, "problem": t.problem} for t in tuned.trials]
        self.tuned[key] = {"options": tuned.options, "trials": trials}
        self.save()


def describe_machine(label: str) -> dict[str, Any]:
    """What the table says of the machine.

    Args:
        label: its letter on the page of figures, and whether it was quiet.
    """
    lines = _cpu_lines()
    flags = lines.get("flags", lines.get("Features", "")).split()
    return {
        "label": label,
        "processor": lines.get("model name", platform.processor() or platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "flags": [flag for flag in FLAGS if flag in flags],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
    }


def _cpu_lines() -> Mapping[str, str]:
    path = Path("/proc/cpuinfo")
    pairs = (line.partition(":") for line in path.read_text().splitlines()) if path.exists() else ()
    return {name.strip(): value.strip() for name, _, value in pairs}


def commit() -> str:
    """The commit of this tree, with a `+` if files of it were changed."""
    try:
        name = _git("rev-parse", "--short=7", "HEAD")
        return name + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()
