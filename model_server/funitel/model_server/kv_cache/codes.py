"""Keys and values as integer codes, with a scale and a zero of each token and head, for the fused CPU step alone."""

from enum import Enum

import torch

SCALE_BYTES = 4  # of a token and head: a scale and a zero in float16
_QUAD = 4  # tokens of which values lie together
_LANES = 16


class KvCodes(Enum):
    """Bits of a code. How codes lie in a block is said in `kv_codes.h`."""

    INT8 = 8
    UINT4 = 4

    @property
    def label(self) -> str:
        """The name in flags and logs."""
        return self.name.lower()

    def head_bytes(self, block_size: int, dim: int) -> int:
        """Bytes of a head's keys and values in a block; heads are filled up to 16 elements, of 4 bits to 32."""
        unit = _LANES * 8 // self.value
        token = -(-dim // unit) * unit * self.value // 8
        quads = -(-block_size // _QUAD) * _QUAD
        return (block_size + quads) * token + 2 * SCALE_BYTES * block_size


KvDtype = torch.dtype | KvCodes
"""How the numbers of a pool are kept."""


def storage_dtype(dtype: KvDtype) -> torch.dtype:
    """The type of the elements of a pool: bytes for codes."""
    return torch.uint8 if isinstance(dtype, KvCodes) else dtype


def kv_label(dtype: KvDtype) -> str:
    """A precision as flags call it."""
    return dtype.label if isinstance(dtype, KvCodes) else str(dtype).removeprefix("torch.")
