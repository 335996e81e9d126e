"""Pack small integers into 32-bit words, the first in the lowest bits; matrices of them, and rounding to them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from funitel.model_server.quantized.config import Q4_GROUP

WORD_BITS = 32
# Largest part of a matrix that is turned to floating point at once: intermediates take twelve bytes an element.
_CHUNK_ELEMENTS = 1 << 22


def pack(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Pack uint8 codes below 2**bits along `dim` of a matrix into int32; a last word that is not full ends in zeros."""
    values = codes.numpy() if dim == 0 else codes.numpy().T
    count = WORD_BITS // bits
    words = np.zeros((-(-values.shape[0] // count), values.shape[1]), dtype=np.uint32)
    for i in range(count):
        some = values[i::count].astype(np.uint32)
        words[: some.shape[0]] |= some << (bits * i)
    return torch.from_numpy(np.ascontiguousarray(words if dim == 0 else words.T).view(np.int32))


def unpack(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Codes of int32 words packed along `dim` of a matrix, as uint8; those that fill up the last word come along."""
    count = WORD_BITS // bits
    codes = torch.empty((*words.shape[: dim + 1], count, *words.shape[dim + 1 :]), dtype=torch.uint8)
    for i in range(count):
        codes.select(dim + 1, i).copy_((words >> (bits * i)) & (2**bits - 1))
    return codes.flatten(dim, dim + 1)


@dataclass(frozen=True, slots=True)
class Codes:
    """Part of a quantised matrix: a weight is (code - zero) * scale, zero and scale those of its row and its group.

    Codes that are floating point themselves have zeros that are 0, and as codes of a byte are as they are. Where there
    are bases, zeros are 0 too, and a weight is code * scale + base.
    """

    codes: torch.Tensor  # [rows, columns] uint8, or float8
    scales: torch.Tensor  # [rows, num_groups] floating point
    zeros: torch.Tensor  # [rows, num_groups] uint8
    groups: torch.Tensor  # [columns] int64: the group of a column
    bases: torch.Tensor | None = None  # [rows, num_groups] floating point

    def rows(self, start: int, end: int) -> "Codes":
        """Some of the rows."""
        bases = None if self.bases is None else self.bases[start:end]
        return Codes(self.codes[start:end], self.scales[start:end], self.zeros[start:end], self.groups, bases)

    def to(self, device: torch.device) -> "Codes":
        """The same on another device."""
        codes, scales, zeros, groups = (part.to(device) for part in (self.codes, self.scales, self.zeros, self.groups))
        return Codes(codes, scales, zeros, groups, None if self.bases is None else self.bases.to(device))

    @classmethod
    def stacked(cls, parts: Sequence["Codes"]) -> "Codes":
        """The rows of several matrices over the same columns and groups, all or none with bases, in this order."""
        each = [(part.codes, part.scales, part.zeros) for part in parts]
        codes, scales, zeros = (torch.cat(some) for some in zip(*each, strict=True))
        bases = [part.bases for part in parts if part.bases is not None]
        return cls(codes, scales, zeros, parts[0].groups, torch.cat(bases) if bases else None)

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The weights [rows, columns], computed in float32 a few columns at a time."""
        num_rows, num_columns = self.codes.shape
        weights = torch.empty((num_rows, num_columns), dtype=dtype, device=self.codes.device)
        scales, zeros = self.scales.float(), self.zeros.float()
        step = max(1, _CHUNK_ELEMENTS // max(num_rows, 1))
        for start in range(0, num_columns, step):
            columns = slice(start, start + step)
            groups = self.groups[columns]
            part = (self.codes[:, columns].float() - zeros[:, groups]) * scales[:, groups]
            weights[:, columns] = part if self.bases is None else part + self.bases.float()[:, groups]
        return weights


def round_int8(weight: torch.Tensor, scale_dtype: torch.dtype) -> Codes:
    """One scale for each output, its largest weight at +-127. `weight` is [outputs, inputs]."""
    scales = _usable(weight.abs().amax(dim=1, keepdim=True) / 127, scale_dtype)
    codes = (weight / scales.float()).round_().clamp_(-127, 127).add_(128).to(torch.uint8)
    return Codes(codes, scales, torch.full_like(scales, 128, dtype=torch.uint8), _in_order(weight, weight.shape[1]))


def round_q4(weight: torch.Tensor, scale_dtype: torch.dtype) -> Codes:
    """Blocks of 32 inputs as GGUF's Q4_0: the weight furthest from zero is exactly at -8, so a scale has its sign."""
    blocks = weight.reshape(weight.shape[0], -1, Q4_GROUP)  # [outputs, blocks, 32]
    furthest = blocks.gather(2, blocks.abs().argmax(dim=2, keepdim=True))
    scales = _usable(furthest.squeeze(2) / -8, scale_dtype)
    codes = (blocks / scales.float()[:, :, None]).round_().clamp_(-8, 7).add_(8).flatten(1).to(torch.uint8)
    return Codes(codes, scales, torch.full_like(scales, 8, dtype=torch.uint8), _in_order(weight, Q4_GROUP))


def _usable(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales as they will be stored; 1 where they would be 0, for weights that are all zero."""
    stored = scales.to(dtype)
    return torch.where(stored == 0, torch.ones_like(stored), stored)


def _in_order(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    return torch.arange(weight.shape[1], device=weight.device) // group_size
