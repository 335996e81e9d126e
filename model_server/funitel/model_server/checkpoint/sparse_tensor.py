"""Read sparse tensors of compressed-tensors by rows and columns, as dense ones: `sparse-24-bitmask`, `sparse-bitmask`.

Files hold the values at the set bits of a mask. `dense_files` gives such a tensor the name and the face that it would
have dense, so every storage reads it: of floating point, float8 and int8. Source: compressed-tensors 0.5 to 0.12.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from funitel.model_server.checkpoint.storage import Files, Range, TensorFile
from funitel.proto.errors import WeightsError

MASK, VALUES = ".bitmask", ".compressed"
_SHAPE, _OFFSETS = ".shape", ".row_offsets"
_GROUP, _KEPT = 4, 2  # inputs of a group of 2:4, and how many of them have a value
_BYTE = 8
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def dense_files(files: Files) -> dict[str, TensorFile]:
    """The same tensors, with one that reads as dense in place of the parts of each sparse one.

    Raises:
        WeightsError: a part is missing or misshapen, or a tensor is there dense too.
    """
    stems = dict.fromkeys(name.rpartition(".")[0] for name in files if name.endswith((MASK, VALUES)))
    sparse = {_dense_name(stem): SparseTensor(files, stem) for stem in stems}
    twice = next((name for name in sparse if name in files), None)
    if twice is not None:
        raise WeightsError(f"the checkpoint holds tensor {twice} both dense and sparse")
    parts = {name for tensor in sparse.values() for name in tensor.parts}
    return {name: file for name, file in files.items() if name not in parts} | sparse


def _dense_name(stem: str) -> str:
    """compressed-tensors before 0.9 names parts behind the whole name of a tensor."""
    return stem if stem.endswith((".weight", ".bias")) else f"{stem}.weight"


class SparseTensor:
    """One sparse tensor, with the faces of a file and of a slice: what is read of it is dense.

    bitmask [rows, columns / 8] has a bit for each place, the lowest first; shape has the sizes of the dense tensor.
    2:4: compressed [rows, columns / 2] has two values of each four columns. Else, with row_offsets [rows], compressed
    has one row after the other; such a tensor may be of one dimension.

    Raises:
        WeightsError: a part is missing or misshapen.
    """

    def __init__(self, files: Files, stem: str) -> None:
        self._files, self._stem = files, stem
        parts = (MASK, VALUES, _SHAPE, _OFFSETS)
        self.parts = tuple(name for part in parts if (name := stem + part) in files)
        self._is_24 = stem + _OFFSETS not in files
        self._shape = [int(size) for size in self._whole(_SHAPE).flatten()]
        self._mask, self._values = self._slice(MASK), self._slice(VALUES)
        if len(self._shape) not in ((2,) if self._is_24 else (1, 2)) or min(self._shape) < 0:
            raise WeightsError(f"tensor {stem}{_SHAPE} says {self._shape}, not the two sizes of a matrix")
        self._columns = self._shape[-1]
        if self._is_24 and self._columns % _GROUP:
            raise WeightsError(f"tensor {stem}{_SHAPE} says {self._shape}, but 2:4 needs a multiple of 4 columns")
        self._expect(MASK, *self._shape[:-1], -(-self._columns // _BYTE))
        if self._mask.get_dtype() != "U8":
            raise WeightsError(f"tensor {stem}{MASK} is {self._mask.get_dtype()}, expected U8: eight places a byte")
        if self._is_24:
            self._expect(VALUES, self._shape[0], self._columns // _GROUP * _KEPT)
        else:
            self._expect(_OFFSETS, *self._shape[:-1])
            self._expect(VALUES, prod(self._values.get_shape()))

    def get_slice(self, name: str) -> "SparseTensor":
        """See TensorFile."""
        return self

    def get_tensor(self, name: str) -> torch.Tensor:
        """See TensorFile."""
        return self[:]

    def get_shape(self) -> Sequence[int]:
        """See TensorSlice."""
        return self._shape

    def get_dtype(self) -> str:
        """See TensorSlice."""
        found: str = self._values.get_dtype()
        return found

    def __getitem__(self, part: Any) -> torch.Tensor:
        """See TensorSlice. Raises: `WeightsError`: the bits and the values do not fit together."""
        parts = part if isinstance(part, tuple) else (part,)
        if len(parts) > len(self._shape) or not all(isinstance(p, slice) and p.step in (None, 1) for p in parts):
            whole: torch.Tensor = self[:][part]
            return whole
        parts += (slice(None),) * (len(self._shape) - len(parts))
        spans = [each.indices(size)[:2] for each, size in zip(parts, self._shape, strict=True)]
        spans = [(first, max(first, end)) for first, end in spans]
        rows, columns = spans if len(spans) == 2 else ((0, 1), spans[0])
        dense = self._read_24(rows, columns) if self._is_24 else self._read_rows(rows, columns)
        return dense.reshape([end - first for first, end in spans])

    def _read_24(self, rows: Range, columns: Range) -> torch.Tensor:
        """Whole bytes of the mask, and the values of their groups."""
        first, end = columns[0] // _BYTE * _BYTE, min(-(-columns[1] // _BYTE) * _BYTE, self._columns)
        mask = self._bits(rows, (first, end))
        if bool((mask.view(len(mask), (end - first) // _GROUP, _GROUP).sum(-1) != _KEPT).any()):
            raise WeightsError(f"tensor {self._stem}{MASK} is not 2:4: four columns have other than two bits set")
        places = slice(first // _GROUP * _KEPT, end // _GROUP * _KEPT)
        return _spread(mask, self._values[slice(*rows), places])[:, columns[0] - first : columns[1] - first]

    def _read_rows(self, rows: Range, columns: Range) -> torch.Tensor:
        """Whole rows: what lies in a part of one cannot be found without the bits before it."""
        mask = self._bits(rows, (0, self._columns))
        num_values = self._values.get_shape()[0]
        offsets = torch.cat((self._whole(_OFFSETS).reshape(-1).long(), torch.tensor([num_values])))
        first, end = int(offsets[rows[0]]), int(offsets[rows[1]])
        is_found = offsets[rows[0] : rows[1] + 1].diff().equal(mask.sum(1)) and 0 <= first <= end <= num_values
        if not is_found or offsets[0] != 0:
            raise WeightsError(f"tensor {self._stem}{_OFFSETS} does not fit the bits of {self._stem}{MASK}")
        return _spread(mask, self._values[first:end])[:, slice(*columns)]

    def _bits(self, rows: Range, columns: Range) -> torch.Tensor:
        """A truth for each place; the first column is the first of a byte."""
        span = slice(columns[0] // _BYTE, -(-columns[1] // _BYTE))
        words = self._mask[span][None] if len(self._shape) == 1 else self._mask[slice(*rows), span]
        bits = (words[..., None] >> torch.arange(_BYTE, dtype=torch.uint8) & 1).flatten(1).bool()
        if bool(bits[:, columns[1] - columns[0] :].any()):
            raise WeightsError(f"tensor {self._stem}{MASK} has bits set beyond the {self._columns} columns")
        found: torch.Tensor = bits[:, : columns[1] - columns[0]]
        return found

    def _slice(self, part: str) -> Any:
        name = self._stem + part
        if name not in self._files:
            raise WeightsError(f"the checkpoint lacks tensor {name}")
        return self._files[name].get_slice(name)

    def _whole(self, part: str) -> torch.Tensor:
        self._slice(part)
        return self._files[self._stem + part].get_tensor(self._stem + part)

    def _expect(self, part: str, *shape: int) -> None:
        found = tuple(self._slice(part).get_shape())
        if found != shape:
            raise WeightsError(f"tensor {self._stem}{part} has shape {list(found)}, expected {list(shape)}")


def _spread(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values at the places of a mask, one row after the other, among zeros: bits are moved, not numbers."""
    word = _WORDS[values.itemsize]
    dense = torch.zeros(mask.shape, dtype=word)
    return dense.masked_scatter_(mask, values.contiguous().view(word)).view(values.dtype)
