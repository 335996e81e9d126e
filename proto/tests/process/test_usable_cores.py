"""Cores are counted by affinity and by the CPU quotas of the control groups above a process."""

from pathlib import Path

import pytest

from funitel.proto.process.usable_cores import count_usable_cores


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("own", "above", "count"),
    [
        ("max 100000", "max 100000", 8),
        ("400000 100000", "max 100000", 4),
        ("400000 100000", "200000 100000", 2),
        ("250000 100000", "max 100000", 2),
        ("50000 100000", "max 100000", 1),
        ("1600000 100000", "max 100000", 8),
        ("30000 10000", "max 100000", 3),
        ("nonsense", "", 8),
    ],
)
def test_the_least_quota_of_the_groups_holds(tmp_path: Path, own: str, above: str, count: int) -> None:
    write(tmp_path, proc__self__cgroup="0::/pod/box\n")
    write(tmp_path, proc__self__mountinfo="30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    write(tmp_path, sys__fs__cgroup__pod__box__cpu_DOT_max=own, sys__fs__cgroup__pod__cpu_DOT_max=above)
    assert count_usable_cores(tmp_path) == count


@pytest.mark.parametrize(("quota", "count"), [("-1", 8), ("300000", 3)])
def test_version_1_of_the_kernels_interface(tmp_path: Path, quota: str, count: int) -> None:
    group = tmp_path / "sys/fs/cgroup/cpu/box"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text(quota)
    (group / "cpu.cfs_period_us").write_text("100000")
    write(tmp_path, proc__self__cgroup="4:cpu,cpuacct:/box\n")
    write(tmp_path, proc__self__mountinfo="30 23 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n")
    assert count_usable_cores(tmp_path) == count


def test_without_control_groups_affinity_alone_counts(tmp_path: Path) -> None:
    assert count_usable_cores(tmp_path) == 8
