"""The limit on processes and threads: a deployment that is refused one while it starts would hang or end somewhere."""

from pathlib import Path

from funitel.proto.errors import SettingsError
from funitel.proto.process.control_groups import control_groups, lines_of

FIXED_TASKS = 24  # of launcher, router and its sandbox
SHARD_TASKS = 12  # of a shard, beside its compute threads


def check_task_limit(num_shards: int, num_threads: int, root: Path = Path("/")) -> None:
    """Refuse to start where a control group has no room for the processes and threads of a deployment.

    Args:
        num_shards: of all replicas.
        num_threads: that each of them computes on.
        root: where /proc and /sys lie.

    Raises:
        SettingsError: with the group's file, and the numbers.
    """
    needed = FIXED_TASKS + (SHARD_TASKS + num_threads) * num_shards
    for group in control_groups("pids", root):
        limit = next(iter(lines_of(group.folder / "pids.max")), "max")
        used = next(iter(lines_of(group.folder / "pids.current")), "0")
        if limit.isdigit() and int(limit) - int(used) < needed:
            raise SettingsError(
                f"{group.folder / 'pids.max'} allows {limit} processes and threads, {used} are there: "
                f"a deployment of {num_shards} shard{'s' if num_shards > 1 else ''} needs {needed} more"
            )
