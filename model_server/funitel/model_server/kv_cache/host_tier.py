"""Blocks of the KV pool kept in the host's memory, and copied as the router says."""

from collections.abc import Iterable

import torch

from funitel.model_server.kv_cache.pool import KVCache
from funitel.proto.errors import InvalidRequest
from funitel.proto.step import BlockCopy


class HostBlocks:
    """Slots for blocks of one pool, all layers of a block together as they lie there.

    Args:
        memory: [num_bytes] uint8, page-locked beside a GPU.
        num_slots: that have room in it.
        cache: the pool.
    """

    def __init__(self, memory: torch.Tensor, num_slots: int, cache: KVCache) -> None:
        block = cache.pool[0]
        num_bytes = num_slots * block.numel() * block.element_size()
        self._slots = memory[:num_bytes].view(block.dtype).view(num_slots, *block.shape)
        self._cache = cache

    def check(self, copies: Iterable[BlockCopy]) -> None:
        """Raise InvalidRequest for a block or slot that is not there."""
        num_blocks, num_slots = self._cache.num_blocks, len(self._slots)
        for copy in copies:
            if not 0 < copy.block < num_blocks or copy.slot >= num_slots:
                raise InvalidRequest(
                    f"block {copy.block} or slot {copy.slot} of a copy is outside the {num_blocks} blocks of the pool "
                    f"and {num_slots} slots of the host"
                )

    def carry_out(self, copies: Iterable[BlockCopy]) -> None:
        """Enqueue the copies, in their order, behind what computes and before what is launched next."""
        for copy in copies:
            there, here = self._slots[copy.slot], self._cache.pool[copy.block]
            if copy.is_load:
                here.copy_(there, non_blocking=True)
            else:
                there.copy_(here, non_blocking=True)
