"""The pools of a model in parts: one for each part, on its device and in its precision, of the same blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from funitel.model_server.kv_cache.pool import KVCache, SpecPools


class JoinedCache(KVCache):
    """The pools of the parts of a model as one: a block of it is the block of that id in every part."""

    def __init__(self, parts: Sequence[KVCache]) -> None:
        self.parts = tuple(parts)
        self.num_blocks = parts[0].num_blocks
        self.block_size = parts[0].block_size

    @property
    def num_bytes(self) -> int:
        """See KVCache."""
        return sum(each.num_bytes for each in self.with_companion())

    def with_companion(self) -> list[KVCache]:
        """The pools of all parts, and the companion if there is one."""
        return [*self.parts, *([] if self.companion is None else [self.companion])]

    def wipe(self, blocks: Sequence[int]) -> None:
        """See KVCache."""
        for each in self.parts:
            each.wipe(blocks)


@dataclass(frozen=True, slots=True)
class JoinedPools:
    """See Pools; `parts` are those of the parts of a model in their order, none of which keeps states."""

    parts: tuple[SpecPools, ...]
    state_layout: None = None
    has_parted_blocks: bool = True

    @property
    def block_size(self) -> int:
        """See Pools."""
        return self.parts[0].block_size

    @property
    def bytes_per_block(self) -> int:
        """Memory of a block on all devices together."""
        return sum(each.bytes_per_block for each in self.parts)

    @property
    def total_bytes_per_block(self) -> int:
        """See Pools."""
        return sum(each.total_bytes_per_block for each in self.parts)

    @property
    def gpu_blocks(self) -> tuple[torch.device, int] | None:
        """The GPU, and bytes of a block on it; None where all parts are on the host."""
        on_gpu = [each for each in self.parts if each.device.type == "cuda"]
        return (on_gpu[0].device, sum(each.bytes_per_block for each in on_gpu)) if on_gpu else None

    def make(self, num_blocks: int) -> JoinedCache:
        """See Pools."""
        return JoinedCache([each.make(num_blocks) for each in self.parts])
