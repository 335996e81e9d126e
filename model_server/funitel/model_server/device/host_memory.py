"""Host memory that this process can still get: of the machine, its control groups and its resource limits.

Limits of control groups hold for all processes below a group, so each group from this process's own up to the root of
its hierarchy counts, in the interface of version 1 and of version 2.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from funitel.proto.process.control_groups import control_groups, lines_of

_ROOT = Path("/")
_MAX_LIMIT = 1 << 60  # bytes: version 1 writes a number beyond this where there is no limit


@dataclass(frozen=True, slots=True, order=True)
class AvailableMemory:
    """Bytes that can still be used, and what sets this limit, for messages."""

    num_bytes: int
    limit: str

    def __str__(self) -> str:
        return f"{self.num_bytes / 1e6:.0f} MB that {self.limit} leaves"


@dataclass(frozen=True, slots=True)
class _Interface:
    """The files of a memory group in one version of the kernel's interface."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: str  # field of memory.stat: pages of files just read count as used, and are given back on demand


_V1 = _Interface(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Interface(("memory.max", "memory.high"), "memory.current", "inactive_file")


def available_memory(root: Path = _ROOT) -> AvailableMemory:
    """The least of what every limit leaves, at least 0 bytes; `root` is where /proc and /sys lie."""
    found = min([_of_machine(root), *_of_groups(root), *_of_process(root)])
    return AvailableMemory(max(0, found.num_bytes), found.limit)


def _of_machine(root: Path) -> AvailableMemory:
    return AvailableMemory(_fields(root / "proc/meminfo")["MemAvailable"], "MemAvailable of /proc/meminfo")


def _of_process(root: Path) -> Iterator[AvailableMemory]:
    """What the resource limits of this process leave."""
    status = _fields(root / "proc/self/status")
    for line in lines_of(root / "proc/self/limits"):
        for title, used, name in (
            ("Max address space", "VmSize", "RLIMIT_AS (ulimit -v)"),
            ("Max data size", "VmData", "RLIMIT_DATA (ulimit -d)"),
        ):
            if line.startswith(title) and (soft := line.removeprefix(title).split()[0]).isdigit():
                yield AvailableMemory(int(soft) - status.get(used, 0), name)


def _of_groups(root: Path) -> Iterator[AvailableMemory]:
    """What the control groups of this process leave, from its own upwards."""
    for group in control_groups("memory", root):
        yield from _of_group(group.folder, _V1 if group.is_v1 else _V2, root)


def _of_group(group: Path, interface: _Interface, root: Path) -> Iterator[AvailableMemory]:
    for name in interface.limits:
        limit = next(iter(lines_of(group / name)), "max")
        if not limit.isdigit() or int(limit) >= _MAX_LIMIT:
            continue
        used = int(next(iter(lines_of(group / interface.usage)), "0"))
        statistics = dict(line.split() for line in lines_of(group / "memory.stat"))
        reclaimable = int(statistics.get(interface.reclaimable, 0))
        yield AvailableMemory(int(limit) - used + reclaimable, str(_ROOT / (group / name).relative_to(root)))


def _fields(path: Path) -> dict[str, int]:
    """Fields of a file of /proc with kibibytes, in bytes."""
    found = (line.split(":", 1) for line in lines_of(path))
    return {name: int(value.split()[0]) * 1024 for name, value in found if value.endswith(" kB")}
