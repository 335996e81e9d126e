"""Count the cores that this process may use: those of its affinity, at most as many as its CPU quota allows."""

import os
from collections.abc import Iterator
from pathlib import Path

from funitel.proto.process.control_groups import ControlGroup, control_groups, lines_of


def count_usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores, at least 1; a fraction of a core of the quota is not counted.

    Threads beyond a quota are stopped in the middle of a step until the next period begins.

    Args:
        root: where /proc and /sys lie.
    """
    return max(1, min([len(os.sched_getaffinity(0)), *map(int, _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Cores that the quota of each control group allows."""
    for group in control_groups("cpu", root):
        quota, period = _quota_and_period(group)
        if quota.isdigit() and period.isdigit() and int(period) > 0:  # else it is "max" or -1, without a limit
            yield int(quota) / int(period)


def _quota_and_period(group: ControlGroup) -> tuple[str, str]:
    """Microseconds of processor time in each period, and those of the period."""
    files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if group.is_v1 else ("cpu.max",)
    words = [word for name in files for line in lines_of(group.folder / name) for word in line.split()]
    return (words[0], words[1]) if len(words) == 2 else ("max", "")
