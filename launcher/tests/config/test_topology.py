"""Shards on nodes: told from /sys, shared out whole core by whole core, and handed to each as flags."""

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funitel.launcher.config import resolve as module
from funitel.launcher.config.child_commands import Commands
from funitel.launcher.config.replica_settings import settings_of_replica
from funitel.launcher.config.resolve import decide_num_shard, resolve
from funitel.launcher.config.topology import Node, ShardPlacement, assign_cores, usable_nodes
from funitel.launcher.settings import LauncherSettings
from funitel.proto.errors import SettingsError
from funitel.proto.process.cores import Cores


def node(number: int, *cores: str, has_memory: bool = True) -> Node:
    return Node(number, tuple(map(Cores, cores)), has_memory)


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """Two nodes of two cores with two threads each, numbered as a PC numbers them, and memory on a card of its own."""
    for number, cpulist in enumerate(("0-1,4-5", "2-3,6-7", "")):
        folder = tmp_path / "node" / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpulist}\n")
    (tmp_path / "node" / "has_memory").write_text("0-2\n")
    for processor in range(8):
        folder = tmp_path / "cpu" / f"cpu{processor}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{processor % 4},{processor % 4 + 4}\n")
    (tmp_path / "status").write_text("Name:\tpython\nMems_allowed:\t3\nMems_allowed_list:\t0-1\n")
    return tmp_path


def test_nodes_are_read_as_the_kernel_tells_of_them(system: Path) -> None:
    found = usable_nodes(system, system / "status", Cores(range(8)))
    assert found == (node(0, "0,4", "1,5"), node(1, "2,6", "3,7"))


def test_only_what_this_process_may_use_counts(system: Path) -> None:
    (system / "status").write_text("Mems_allowed_list:\t0\n")
    found = usable_nodes(system, system / "status", Cores("1-2,4-5"))
    assert found == (node(0, "1,5", "4"), node(1, "2", has_memory=False))


def test_a_kernel_that_tells_of_no_nodes_has_one(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython\n")
    assert usable_nodes(tmp_path, tmp_path / "status", Cores("0-2")) == (node(0, "0", "1", "2"),)


def test_this_machine_has_a_node() -> None:
    assert sum(len(one.cores) for one in usable_nodes()) >= 1


ONE = (node(0, "0,4", "1,5", "2,6", "3,7"),)
TWO = (node(0, "0", "1", "2"), node(1, "3", "4", "5"))


@pytest.mark.parametrize(
    ("nodes", "num_shards", "expected"),
    [
        (ONE, 1, [("0-7", None)]),
        (ONE, 2, [("0-1,4-5", None), ("2-3,6-7", None)]),  # never the two threads of a core apart
        (ONE, 3, [("0-1,4-5", None), ("2,6", None), ("3,7", None)]),
        (
            ONE,
            8,
            [("0", None), ("4", None), ("1", None), ("5", None), ("2", None), ("6", None), ("3", None), ("7", None)],
        ),
        ((node(0, "0", "1"),), 3, [("0", None), ("1", None), ("0", None)]),
        (TWO, 2, [("0-2", 0), ("3-5", 1)]),
        (TWO, 3, [("0-1", 0), ("2", 0), ("3-5", 1)]),
        (TWO, 1, [("0-2", 0)]),
        ((node(0, "0"), node(1, "1", "2")), 1, [("1-2", 1)]),  # the larger
        ((node(0, "0"), node(1, "1"), node(2, "2", has_memory=False)), 3, [("0", 0), ("1", 1), ("2", None)]),
        ((node(0, "0"), node(1, "1", has_memory=False)), 2, [("0", None), ("1", None)]),
    ],
)
def test_shards_get_their_places(
    nodes: tuple[Node, ...], num_shards: int, expected: list[tuple[str, int | None]]
) -> None:
    assert [(str(place.cores), place.memory_node) for place in assign_cores(nodes, num_shards)] == expected


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 12))
def test_every_shard_has_a_core_and_none_has_anothers_while_there_are_enough(sizes: list[int], num_shards: int) -> None:
    nodes = [Node(n, tuple(Cores([100 * n + i]) for i in range(size))) for n, size in enumerate(sizes)]
    found = assign_cores(nodes, num_shards)
    assert len(found) == num_shards
    assert all(place.cores for place in found)
    on_each = [sum(min(place.cores) // 100 == n for place in found) for n in range(len(sizes))]
    for n, size in enumerate(sizes):
        if on_each[n] <= size:
            mine = [core for place in found for core in place.cores if core // 100 == n]
            assert len(mine) == len(set(mine))
            assert len(mine) == size or on_each[n] == 0


@pytest.mark.parametrize(
    ("given", "num_devices", "decided"),
    [
        ({}, None, 2),
        ({}, 0, 2),
        ({}, 4, 4),
        ({"num_shard": 1}, None, 1),
        ({"sharded": False}, None, 1),
        ({"num_replicas": 2}, None, 1),
    ],
)
def test_there_is_a_shard_for_each_node(
    given: dict[str, int], num_devices: int | None, decided: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "usable_nodes", lambda: TWO)
    assert decide_num_shard(LauncherSettings(numa=True, **given), num_devices) == decided
    monkeypatch.setattr(module, "usable_nodes", lambda: ONE)
    with pytest.raises(SettingsError, match="needs more than one device, found 1"):
        decide_num_shard(LauncherSettings(numa=True, sharded=True), None)


def test_each_replicas_shards_are_told_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_nodes", lambda: TWO)
    settings = resolve(LauncherSettings(numa=True, num_replicas=2), 2, "/tmp/path")
    assert settings.core_assignments == (
        ShardPlacement(Cores("0-1"), 0),
        ShardPlacement(Cores("2"), 0),
        ShardPlacement(Cores("3-4"), 1),
        ShardPlacement(Cores("5"), 1),
    )
    assert settings.num_threads is settings.most_threads is None  # as many as a shard has cores
    argv = Commands().shard(settings_of_replica(settings, 1), Path("/model"), 0)
    assert argv[argv.index("--cores") + 1] == "3-4"
    assert argv[argv.index("--memory-node") + 1] == "1"
    plain = resolve(LauncherSettings(), 2, "/tmp/path")
    assert "--cores" not in Commands().shard(plain, Path("/model"), 0)


@pytest.mark.parametrize(
    ("nodes", "num_shard", "said"),
    [
        (ONE, 2, ["--numa: this machine has one NUMA node: each shard is pinned to a share of its cores"]),
        (TWO, 2, []),
        (TWO, 1, ["--numa: 1 shards use one NUMA node each, of 2"]),
        (TWO, 7, ["--numa: 7 shards share 6 cores, so some share a core"]),
    ],
)
def test_what_is_not_as_asked_is_one_line(
    nodes: tuple[Node, ...],
    num_shard: int,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "usable_nodes", lambda: nodes)
    caplog.set_level(logging.INFO)
    resolve(LauncherSettings(numa=True), num_shard, "/tmp/path")
    assert caplog.messages == said
