"""A control group without room for a deployment's processes and threads is one line before anything starts."""

from pathlib import Path

import pytest

from funitel.launcher.config.task_limit import check_task_limit
from funitel.proto.errors import SettingsError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """/proc and /sys of a process in the group /pod/box, whose limits are in the group above."""
    files = {
        "proc/self/cgroup": "0::/pod/box\n",
        "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "sys/fs/cgroup/pod/box/pids.max": "max\n",
        "sys/fs/cgroup/pod/box/pids.current": "1\n",
        "sys/fs/cgroup/pod/pids.max": "60\n",
        "sys/fs/cgroup/pod/pids.current": "8\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_group_with_room_is_none_of_our_business(root: Path) -> None:
    check_task_limit(1, 16, root)
    (root / "proc/self/cgroup").write_text("0::/\n")
    check_task_limit(100, 16, root)


def test_a_group_without_room_is_named_with_the_numbers(root: Path) -> None:
    found = r"pod/pids\.max allows 60 processes and threads, 8 are there: a deployment of 2 shards needs 56 more$"
    with pytest.raises(SettingsError, match=found):
        check_task_limit(2, 4, root)


def test_version_1_counts_as_well(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("8:pids:/box\n0::/\n")
    mounted = "40 31 0:37 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
    (root / "proc/self/mountinfo").write_text(mounted)
    folder = root / "sys/fs/cgroup/pids/box"
    folder.mkdir(parents=True)
    (folder / "pids.max").write_text("20\n")
    (folder / "pids.current").write_text("1\n")
    with pytest.raises(SettingsError, match="allows 20 processes and threads, 1 are there: a deployment of 1"):
        check_task_limit(1, 1, root)
