"""Which cores and whose memory each shard gets with `--numa`. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from funitel.launcher.topology import Node
from funitel.proto.cores import Cores


@dataclass(frozen=True, slots=True)
class Place:
    """Where one shard runs; `memory_node` is None where there is no choice of memory."""

    cores: Cores
    memory_node: int | None


def places(nodes: Sequence[Node], num_shards: int) -> tuple[Place, ...]:
    """A place for every shard; neighbours in rank are neighbours on a node.

    With fewer shards than nodes the nodes with most cores get one each. Cores belong to one shard while there are
    enough of them, and both threads of a core to the same.
    """
    has_choice = sum(node.has_memory for node in nodes) > 1
    if num_shards < len(nodes):
        largest = sorted(nodes, key=lambda node: -len(node.cores))[:num_shards]
        nodes = sorted(largest, key=lambda node: node.number)
    found: list[Place] = []
    for node, count in zip(nodes, _shares(num_shards, len(nodes)), strict=True):
        memory_node = node.number if has_choice and node.has_memory else None
        found += [Place(cores, memory_node) for cores in _divided(node.cores, count)]
    return tuple(found)


def _divided(cores: Sequence[Cores], parts: int) -> list[Cores]:
    """Whole cores for each part; where there are too few of these their threads; and then some share one."""
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
