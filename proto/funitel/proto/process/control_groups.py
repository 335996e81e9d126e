"""Find the control groups of this process, from its own up to the root: a limit holds for all below a group."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A group by its folder; `is_v1` is whether its files are those of version 1 of the kernel's interface."""

    folder: Path
    is_v1: bool


def control_groups(controller: str, root: Path = _ROOT) -> Iterator[ControlGroup]:
    """The groups of this process that a controller, such as "memory", may limit; `root` is where /proc and /sys lie.

    In a container the groups above its own are visible only if it has the host's namespace of groups.
    """
    paths = dict(_own_paths(root))
    for line in lines_of(root / "proc/self/mountinfo"):
        place, _, kind = line.partition(" - ")
        fields, (file_system, *_, options) = place.split(), kind.split()
        is_v1 = file_system == "cgroup" and controller in options.split(",")
        path = paths.get(controller if is_v1 else "") if is_v1 or file_system == "cgroup2" else None
        if path is None:
            continue
        below = _below(path, fields[3])
        for part in (below, *below.parents):
            yield ControlGroup(root / fields[4].lstrip("/") / part, is_v1)


def lines_of(path: Path) -> list[str]:
    """Lines of a file; none where it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _own_paths(root: Path) -> Iterator[tuple[str, str]]:
    """Controllers, of which version 2 names none, and the group of this process among theirs."""
    for line in lines_of(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _below(path: str, mounted: str) -> Path:
    """A group's path relative to the group that is `mounted`; the latter itself where the group is not visible."""
    group = Path(path)
    if ".." in group.parts or not group.is_relative_to(mounted):
        return Path()
    return group.relative_to(mounted)
