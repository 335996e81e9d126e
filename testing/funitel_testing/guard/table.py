"""The table of counts and their bounds, `bounds.toml`: read, checked, written again."""

import platform
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from funitel.model_server.cpu.compiler import CannotBuild, find_compiler

PATH = Path(__file__).parent / "bounds.toml"
COMMAND = "make guard ARGS=--write"
HEAD = f"""\
# What a request, a token, a step and a start may cost, in counts that other work on the machine does not change.
# Written by `{COMMAND}`: each bound is the measured count and a tolerance. docs/bench.md says how they are counted.
"""

# What a count of each kind may be more than it was measured: a share of it, and at least so much.
TOLERANCES: tuple[tuple[str, float, float], ...] = (
    ("system calls a request", 0.0, 4.0),
    ("streams", 0.0, 4.0),
    ("calls a token", 0.0, 0.6),
    ("calls a step", 0.0, 0.6),
    ("calls a further sequence", 0.0, 0.6),
    ("calls a request", 0.03, 0.0),
    ("allocations", 0.0, 3.0),
    ("blocks kept", 0.0, 0.7),
    ("modules", 0.0, 4.0),
    ("KiB read", 0.12, 64.0),
    ("KiB written", 0.0, 32.0),
    ("instructions", 0.02, 0.0),
)

Rows = Mapping[str, float | str]
"""A count of each row, or why it cannot be had here."""


@dataclass(frozen=True)
class Finding:
    """What became of a row: over its bound, not to be had, or within it."""

    name: str
    line: str
    is_over: bool = False
    is_skipped: bool = False


def tolerance(name: str, measured: float) -> float:
    """How much more a row may count than was measured."""
    share, least = next((share, least) for kind, share, least in TOLERANCES if kind in name)
    return max(share * measured, least)


def tools() -> dict[str, str]:
    """What counts depend on, beside the code and the locked libraries."""
    version = ".".join(platform.python_version_tuple()[:2])
    try:
        command = [find_compiler(), "-dumpfullversion", "-dumpversion"]
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        compiler = f"{Path(command[0]).name} {found.split('.')[0]}"
    except CannotBuild as error:
        compiler = str(error)
    return {"python": version, "compiler": compiler}


def read() -> dict[str, dict[str, dict[str, float]]]:
    """Rows of the table by group, with what was measured and its bound; under `tools` what it was measured with."""
    return tomllib.loads(PATH.read_text()) if PATH.exists() else {}


def check(group: str, rows: Rows, bounds: Mapping[str, Mapping[str, float]]) -> list[Finding]:
    """Hold the rows of a group against their bounds; a bound without a row, or a row without a bound, is over it."""
    found = []
    for name in sorted({*rows, *bounds}):
        value, bound = rows.get(name), bounds.get(name, {}).get("bound")
        row = f"{group}: {name}"
        if isinstance(value, str):
            found.append(Finding(name, f"{row}: not counted: {value}", is_skipped=True))
        elif value is None or bound is None:
            missing = "is no longer counted" if value is None else f"is {value:,.2f}, and has no bound"
            found.append(Finding(name, f"{row} {missing}: {COMMAND}", is_over=True))
        else:
            is_over = value > bound
            advice = f"; if it must be so: {COMMAND}" if is_over else ""
            found.append(Finding(name, f"{row}: {value:,.2f}, bound {bound:,.2f}{advice}", is_over))
    return found


def write(groups: Mapping[str, Sequence[Rows]]) -> None:
    """Write the medians of several measurements of some groups, with bounds; other groups stay as they are."""
    table = {name: rows for name, rows in read().items() if name != "tools"}
    for group, rounds in groups.items():
        table[group] = {
            name: {"measured": measured, "bound": measured + tolerance(f"{group} {name}", measured)}
            for name in rounds[0]
            if (measured := _median([each[name] for each in rounds])) is not None
        }
    lines = [HEAD, "[tools]", *(f'{name} = "{value}"' for name, value in tools().items())]
    for group, rows in sorted(table.items()):
        lines += ["", f'["{group}"]']
        lines += [
            f'"{name}" = {{ measured = {row["measured"]:.2f}, bound = {row["bound"]:.2f} }}'
            for name, row in rows.items()
        ]
    PATH.write_text("\n".join(lines) + "\n")


def _median(values: Sequence[float | str]) -> float | None:
    numbers = [value for value in values if not isinstance(value, str)]
    return median(numbers) if numbers else None
