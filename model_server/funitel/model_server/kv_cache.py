"""The KV pool: keys and values of every layer in blocks of `block_size` tokens."""

import numpy as np
import torch

from funitel.model_server.parallel import HeadSplit
from funitel.model_server.spec import ModelSpec


class KVCache:
    """Keys and values, each [num_layers, num_blocks, block_size, num_kv_heads, head_dim].

    Block 0 is never a sequence's. Pools are zeroed: padding reads blocks that were never written, and 0 x NaN would
    poison the attention sum.
    """

    def __init__(
        self,
        spec: ModelSpec,
        heads: HeadSplit,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (spec.num_layers, num_blocks, block_size, heads.num_kv_heads, spec.head_dim)
        self.keys = _zeros(shape, dtype, device)
        self.values = _zeros(shape, dtype, device)

    @property
    def num_bytes(self) -> int:
        """Memory of the pool on this rank."""
        return 2 * self.keys.numel() * self.keys.element_size()

    @staticmethod
    def bytes_per_block(spec: ModelSpec, num_kv_heads: int, block_size: int, dtype: torch.dtype) -> int:
        """Memory one block takes on a rank with `num_kv_heads`."""
        return 2 * spec.num_layers * block_size * num_kv_heads * spec.head_dim * dtype.itemsize

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [num_tokens, num_kv_heads, head_dim] at their slots."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeroed memory; on a CPU calloc's, so that pages cost nothing until a block is used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
