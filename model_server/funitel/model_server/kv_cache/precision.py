"""How the numbers of a KV pool are kept: as floats, or as integer codes, which only the fused CPU step has."""

from enum import Enum

import torch

from funitel.proto.errors import SettingsError

FLOAT8_KV = {"fp8": torch.float8_e4m3fn, "fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SCALE_BYTES = 4  # of a token and head: a scale and a zero in float16
_QUAD = 4  # tokens of which values lie together
_LANES = 16


class KvCodes(Enum):
    """Codes with a scale and a zero of each token and head, of so many bits.

    How they lie in a block is described in `kv_codes.h`.
    """

    INT8 = 8
    UINT4 = 4

    def __str__(self) -> str:
        return self.label

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


def torch_kv_dtype(asked: str | None, dtype: torch.dtype) -> torch.dtype:
    """The precision of the pool of a model that computes in `dtype`. Raises: `SettingsError`: torch has no such."""
    own = str(dtype).removeprefix("torch.")
    if asked is None or asked == own:
        return dtype
    if asked not in FLOAT8_KV:
        raise SettingsError(
            f"--kv-cache-dtype {asked} needs the fused CPU step, this model runs in torch, in {own}: "
            f"there it is {own} or {', '.join(FLOAT8_KV)}"
        )
    return FLOAT8_KV[asked]


def is_float8(dtype: torch.dtype) -> bool:
    """Whether numbers of this type are floats of a byte."""
    return dtype.is_floating_point and dtype.itemsize == 1
