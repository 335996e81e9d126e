"""The NUMA nodes and cores of this machine that this process may use, as the kernel tells in /sys and /proc."""

import os
from dataclasses import dataclass
from pathlib import Path

from funitel.proto.cores import Cores

SYSTEM, STATUS = Path("/sys/devices/system"), Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class Node:
    """A node with its cores, for each the logical processors it has, and whether it has memory for this process."""

    number: int
    cores: tuple[Cores, ...]
    has_memory: bool = True


def usable_nodes(system: Path = SYSTEM, status: Path = STATUS, allowed: Cores | None = None) -> tuple[Node, ...]:
    """Every node on which this process may run, by number; where the kernel tells of none, one with every core."""
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
    """A list of numbers; empty where there is no such file, and when it is."""
    try:
        text = path.read_text().strip()
    except OSError:
        return frozenset()
    return Cores(text) if text else frozenset()
