"""Memory of this machine and of processes on it, by the tables of Linux below /proc and /sys."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from funitel.proto.process.control_groups import control_groups, lines_of

DEFAULT_SHARE = 0.85
_MAX_LIMIT = 1 << 60  # bytes: version 1 of control groups writes a number beyond this where there is no limit
_KIB = 1024
_ROOT = Path("/")


def machine_memory(root: Path = _ROOT) -> int:
    """Bytes of memory of the machine, or of the control group of this process where that has fewer."""
    totals = [_field(root / "proc/meminfo", "MemTotal")]
    for group in control_groups("memory", root):
        name = "memory.limit_in_bytes" if group.is_v1 else "memory.max"
        limit = next(iter(lines_of(group.folder / name)), "max")
        if limit.isdigit() and int(limit) < _MAX_LIMIT:
            totals.append(int(limit))
    return min(totals)


def memory_of(pids: Iterable[int]) -> int:
    """Bytes of memory that processes of this machine have; what several share is divided among these."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += _field(Path(f"/proc/{pid}/smaps_rollup"), "Pss")
    return total


def _field(path: Path, name: str) -> int:
    """A line `NAME: NUMBER kB` in bytes."""
    for line in path.read_text().splitlines():
        label, _, rest = line.partition(":")
        if label == name:
            return int(rest.split()[0]) * _KIB
    return 0
