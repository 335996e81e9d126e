"""What a transformers model keeps of its sequences, in blocks: keys and values by layer, and a state of fixed size.

Knows no transformers. Sizes are those one rank holds.
"""

from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch

from funitel.model_server.kv_cache.pool import KVCache

_ALIGNMENT = 64  # bytes: a cache line, and a multiple of every element


@dataclass(frozen=True, slots=True)
class AttentionSize:
    """What an attention layer keeps of a token: a key [num_kv_heads, key_dim], a value [num_kv_heads, value_dim]."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class StateSize:
    """One tensor of the state of a sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Memory of one sequence's."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """All that a model keeps of a sequence: by attention layer for each token, and a state of as many tensors."""

    layers: tuple[AttentionSize, ...]
    states: tuple[StateSize, ...] = ()

    def fit_block(self, block_size: int, context: int, dtype: torch.dtype) -> int:
        """Tokens of a block: as asked for without a state, else so many that a state takes no more than their keys.

        Each block has room for a state, and a sequence uses that of its first. Where a state is all, a block is a whole
        sequence.
        """
        state_bytes = sum(state.num_bytes for state in self.states)
        token_bytes = sum(size.num_kv_heads * (size.key_dim + size.value_dim) for size in self.layers) * dtype.itemsize
        if not state_bytes:
            return block_size
        if not token_bytes:
            return context
        return min(context, max(block_size, 1 << (state_bytes // token_bytes).bit_length()))


@dataclass(frozen=True, slots=True)
class FallbackPools:
    """See `Pools`. Parts of a block lie one after the other, so that all of it is touched and freed together."""

    kept: CacheLayout
    block_size: int
    dtype: torch.dtype
    device: torch.device
    num_ranks: int = 1
    state_layout: None = None  # states lie in blocks
    bytes_per_block: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes_per_block", sum(_aligned(num_bytes) for num_bytes in self._sizes()))

    @property
    def has_parted_blocks(self) -> bool:
        """See Pools."""
        return not self.kept.states

    @property
    def total_bytes_per_block(self) -> int:
        """Memory of a block on all ranks together."""
        return self.bytes_per_block * self.num_ranks

    def _sizes(self) -> list[int]:
        """Bytes of the parts of a block: key and value of each layer, then the states."""
        return [prod(shape) * dtype.itemsize for shape, dtype in self.shapes()]

    def make(self, num_blocks: int) -> "FallbackPool":
        """A pool of zeros; block 0 is never a sequence's."""
        return FallbackPool(self, num_blocks)

    def shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of the parts of a block, in the order of `_sizes`."""
        tokens = [
            ((self.block_size, size.num_kv_heads, dim), self.dtype)
            for size in self.kept.layers
            for dim in (size.key_dim, size.value_dim)
        ]
        return tokens + [(state.shape, state.dtype) for state in self.kept.states]


class FallbackPool(KVCache):
    """Views of one memory: `keys` and `values` [num_blocks, block_size, num_kv_heads, dim] by layer, and `states`.

    `states[j]` is [num_blocks, *shape]: that of a sequence lies at its first block.
    """

    def __init__(self, pools: FallbackPools, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = pools.block_size
        num_bytes = num_blocks * pools.bytes_per_block
        # On a CPU calloc's zeros, so that pages cost nothing until a block is used.
        memory = torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)) if pools.device.type == "cpu" else None
        if memory is None:
            memory = torch.zeros(num_bytes, dtype=torch.uint8, device=pools.device)
        self.pool = memory.view(num_blocks, pools.bytes_per_block)
        parts, at = [], 0
        for shape, dtype in pools.shapes():
            num_bytes = prod(shape) * dtype.itemsize
            parts.append(self.pool[:, at : at + num_bytes].view(dtype).view(num_blocks, *shape))
            at += _aligned(num_bytes)
        num_kv = 2 * len(pools.kept.layers)
        self.keys, self.values = dict(enumerate(parts[0:num_kv:2])), dict(enumerate(parts[1:num_kv:2]))
        self.states = tuple(parts[num_kv:])

    def free(self) -> None:
        """See KVCache."""
        super().free()
        self.states = ()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
