"""Read the NUMA topology from /sys and /proc, and assign cores and memory nodes to shards for `--numa`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from funitel.proto.process.cores import Cores

SYSTEM, STATUS = Path("/sys/devices/system"), Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node: the logical processors of each of its cores, and whether it has memory for this process."""

    number: int
    cores: tuple[Cores, ...]
    has_memory: bool = True


def usable_nodes(system: Path = SYSTEM, status: Path = STATUS, allowed: Cores | None = None) -> tuple[Node, ...]:
    """Every node on which this process may run, by number; one node with every core where the kernel lists none."""
    allowed = Cores(os.sched_getaffinity(0)) if allowed is None else allowed
    with_memory = _read(system / "node" / "has_memory") & _allowed_memory(status)
    nodes = []
    for folder in (system / "node").glob("node[0-9]*"):
        number, processors = int(folder.name.removeprefix("node")), _read(folder / "cpulist") & allowed
        if processors:
            nodes.append(Node(number, _by_core(processors, system), number in with_memory))
    return tuple(sorted(nodes, key=lambda node: node.number)) or (Node(0, _by_core(allowed, system)),)


def _by_core(processors: frozenset[int], system: Path) -> tuple[Cores, ...]:
    cores = set()
    for processor in processors:
        siblings = _read(system / "cpu" / f"cpu{processor}" / "topology" / "thread_siblings_list")
        cores.add(Cores((siblings & processors) or {processor}))
    return tuple(sorted(cores, key=lambda core: min(core)))


def _allowed_memory(status: Path) -> frozenset[int]:
    lines = status.read_text().splitlines()
    return next((Cores(line.split()[1]) for line in lines if line.startswith("Mems_allowed_list:")), frozenset())


def _read(path: Path) -> frozenset[int]:
    """A list of numbers; empty where the file is empty or missing."""
    try:
        text = path.read_text().strip()
    except OSError:
        return frozenset()
    return Cores(text) if text else frozenset()


@dataclass(frozen=True, slots=True)
class ShardPlacement:
    """Cores and memory node of one shard; `memory_node` is None where there is only one."""

    cores: Cores
    memory_node: int | None


def assign_cores(nodes: Sequence[Node], num_shards: int) -> tuple[ShardPlacement, ...]:
    """Placement of every shard; consecutive ranks share a node.

    With fewer shards than nodes, the nodes with the most cores get one shard each. A core belongs to one shard while
    there are enough cores, and both threads of a core belong to the same shard.
    """
    has_choice = sum(node.has_memory for node in nodes) > 1
    if num_shards < len(nodes):
        largest = sorted(nodes, key=lambda node: -len(node.cores))[:num_shards]
        nodes = sorted(largest, key=lambda node: node.number)
    found: list[ShardPlacement] = []
    for node, count in zip(nodes, _shares(num_shards, len(nodes)), strict=True):
        memory_node = node.number if has_choice and node.has_memory else None
        found += [ShardPlacement(cores, memory_node) for cores in _divided(node.cores, count)]
    return tuple(found)


def _divided(cores: Sequence[Cores], parts: int) -> list[Cores]:
    """Whole cores for each part; with too few cores, threads; with too few threads, shared threads."""
    if len(cores) < parts:
        cores = [Cores([thread]) for core in cores for thread in sorted(core)]
    if len(cores) < parts:
        return [cores[i % len(cores)] for i in range(parts)]
    divided, start = [], 0
    for share in _shares(len(cores), parts):
        divided.append(Cores(thread for core in cores[start : start + share] for thread in core))
        start += share
    return divided


def _shares(total: int, parts: int) -> list[int]:
    size, extra = divmod(total, parts)
    return [size + (i < extra) for i in range(parts)]
