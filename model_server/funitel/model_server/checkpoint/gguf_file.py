"""Read tensors straight from a memory-mapped GGUF: blocks as they lie there, or the float values they stand for.

A folder's pointer says where each tensor lies; rows are put into the checkpoint's order as they are read, and only
those that are asked for. What is asked for whole and in the file's order is a view of the mapping.
"""

import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from funitel.model_server.files.gguf_pointer import GROUPED, HALVES, GgufEntry, check_pointer, part_paths
from funitel.model_server.quantized.block_types import BlockType
from funitel.proto.errors import UnsupportedModel, WeightsError
from funitel.proto.process.deferred_module import deferred
from funitel.proto.process.usable_cores import count_usable_cores

if TYPE_CHECKING:
    import gguf
else:
    gguf = deferred("gguf")  # a fifth of a second to import; the engine computes on most types of blocks as they are

Range = tuple[int, int]
Bytes = npt.NDArray[np.uint8]

_NUMBERS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "F64": np.dtype("<f8")}
_CHUNK_ELEMENTS = 1 << 20  # that one thread makes at a time: what it works in stays in its caches
_SAFETENSORS_NAMES = {"F16": "F16", "BF16": "BF16"}  # other values are float32


class GgufTensorFile:
    """The tensors of a GGUF by their names in the checkpoint, in place of a file of safetensors.

    Raises:
        WeightsError: the pointer cannot be read, or the file is gone, cut short or another one.
        UnsupportedModel: a tensor has a type that cannot be read.
    """

    def __init__(self, path: Path) -> None:
        pointer = check_pointer(path)
        self._parts = [_MappedFile(file) for file in part_paths(path, pointer)]
        self._tensors: dict[str, GgufTensor] = {}
        for name, entry in pointer.tensors.items():
            part = self._parts[entry.part]
            if "{j}" not in name:
                self._tensors[name] = GgufTensor(part, entry)
                continue
            for j in range(entry.shape[0]):
                self._tensors[name.format(j=j)] = GgufTensor(part, entry, j)

    def keys(self) -> list[str]:
        """Names of the tensors."""
        return list(self._tensors)

    def get_slice(self, name: str) -> "GgufTensor":
        """A tensor of which parts can be read."""
        return self._tensors[name]

    def get_tensor(self, name: str) -> torch.Tensor:
        """A whole tensor. Raises: `WeightsError` where some values are not numbers."""
        tensor = self._tensors[name]
        values = tensor[:]
        if bool(values.isnan().any()):
            raise WeightsError(tensor.damage)
        return values

    def type_of(self, name: str, columns: Range | None = None) -> BlockType | None:
        """The type of a matrix; None for one of another type or name, and where `columns` would cut a block."""
        kind = self._tensors[name].block_type if name in self._tensors else None
        return None if kind is None or kind.cuts(columns) else kind

    @property
    def has_blocks(self) -> bool:
        """Whether some matrix has a type of blocks."""
        return any(tensor.block_type is not None for tensor in self._tensors.values())

    def num_bytes(self, name: str) -> int:
        """Bytes of a tensor in the file."""
        return self._tensors[name].num_bytes

    def read_blocks(
        self, name: str, shape: tuple[int, int], rows: Range | None = None, columns: Range | None = None
    ) -> torch.Tensor:
        """Read outputs `rows` and inputs `columns` of a matrix of `shape`: [outputs, bytes] uint8, maybe a view.

        Raises:
            WeightsError: the matrix is of another shape, its scales are not numbers, or the file was changed.
        """
        tensor = self._tensors[name]
        if tensor.file_shape != shape:
            raise WeightsError(f"{tensor.place} has shape {list(tensor.file_shape)}, expected {list(shape)}")
        return torch.from_numpy(tensor.blocks(rows or (0, shape[0]), columns or (0, shape[1])))


class GgufTensor:
    """One tensor of a GGUF, or one matrix of a stack there."""

    def __init__(self, file: "_MappedFile", entry: GgufEntry, place: int | None = None) -> None:
        self._file, self._entry = file, entry
        self.place = f"{file.path}: tensor {entry.name}"
        shape = entry.shape if place is None else entry.shape[1:]
        self.file_shape = shape
        self._block_inputs, self._block_bytes = _block_sizes(entry.kind)
        if shape[-1] % self._block_inputs:
            raise WeightsError(f"{self.place} has rows of {shape[-1]}, no multiple of {self._block_inputs}")
        self.num_bytes = prod(shape) // self._block_inputs * self._block_bytes
        self._is_list = len(shape) == 1 and self._block_inputs == 1  # its numbers are rows of one
        self._num_rows = shape[0] if self._is_list else prod(shape[:-1])
        self._offset = entry.offset + (place or 0) * self.num_bytes
        file.check_end(self._offset + self.num_bytes, self.place)

    @property
    def damage(self) -> str:
        """What to say of values that are not numbers."""
        return f"{self._file.path} is damaged: tensor {self._entry.name} holds values that are not numbers"

    @property
    def block_type(self) -> BlockType | None:
        """The type of a matrix's blocks."""
        return BlockType.__members__.get(self._entry.kind) if len(self.file_shape) == 2 else None

    def get_shape(self) -> list[int]:
        """Its sizes in the checkpoint."""
        return list(self.file_shape[::-1] if self._entry.is_turned else self.file_shape)

    def get_dtype(self) -> str:
        """The type of its values by safetensors' name."""
        return "F32" if self._entry.minus else _SAFETENSORS_NAMES.get(self._entry.kind, "F32")

    def __getitem__(self, part: slice | tuple[slice, ...]) -> torch.Tensor:
        """Values of some rows, or of rows and columns, in the checkpoint's order: float32, or its own 16 bits."""
        parts = part if isinstance(part, tuple) else (part,)
        sizes = self.get_shape()
        ranges = [each.indices(size)[:2] for each, size in zip(parts, sizes, strict=False)]
        ranges += [(0, size) for size in sizes[len(ranges) :]]
        if self._entry.is_turned:
            return self._values(ranges[1], ranges[0]).t()
        if len(sizes) > 1:
            return self._values(*ranges)
        return self._values(ranges[0], (0, 1))[:, 0] if self._is_list else self._values((0, 1), ranges[0])[0]

    def blocks(self, rows: Range, columns: Range) -> Bytes:
        """Outputs `rows` and inputs `columns` as their bytes lie in the file: [outputs, bytes]."""
        first, last = (column // self._block_inputs * self._block_bytes for column in columns)
        data = self._rows(rows)[:, first:last]
        kind = self.block_type
        assert kind is not None
        if has_nan_scale(kind, data):
            raise WeightsError(self.damage)
        return data

    def _rows(self, rows: Range) -> Bytes:
        """Rows in the checkpoint's order: [rows, bytes of a row]."""
        count = self._num_rows
        data = self._file.view(self._offset, self.num_bytes).reshape(count, -1)
        entry = self._entry
        if not entry.order:
            return data[slice(*rows)]
        return data[_order(entry.order, count, entry.num_heads, entry.head_dim)[slice(*rows)]]

    def _values(self, rows: Range, columns: Range) -> torch.Tensor:
        """Values of rows and columns as the file lays them out."""
        first, last = columns[0] // self._block_inputs, -(-columns[1] // self._block_inputs)
        data = self._rows(rows)[:, first * self._block_bytes : last * self._block_bytes]
        start = first * self._block_inputs
        values = self._numbers(data)[:, columns[0] - start : columns[1] - start]
        return values - self._entry.minus if self._entry.minus else values

    def _numbers(self, data: Bytes) -> torch.Tensor:
        kind = self._entry.kind
        if kind == "BF16":
            return torch.from_numpy(np.ascontiguousarray(data)).view(torch.bfloat16)
        if kind in _NUMBERS:
            numbers = torch.from_numpy(np.ascontiguousarray(data).view(_NUMBERS[kind]))
            return numbers.float() if kind == "F64" else numbers
        return torch.from_numpy(dequantise(kind, data, self.place))


class _MappedFile:
    """A file mapped privately, and what it was when it was opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)
            self._stamp = self._now()
            self._mapping = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise WeightsError(f"cannot read {path}: {error}") from error
        self._bytes: Bytes = np.frombuffer(self._mapping, np.uint8)

    def view(self, offset: int, num_bytes: int) -> Bytes:
        """Some bytes of the mapping, which the kernel begins to fetch. Raises: `WeightsError`: the file was changed."""
        if self._now() != self._stamp:  # what was cut off could not be read without a signal that ends the process
            raise WeightsError(f"{self.path} was changed while it was being read")
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._mapping.madvise(mmap.MADV_WILLNEED, start, offset + num_bytes - start)
        return self._bytes[offset : offset + num_bytes]

    def check_end(self, end: int, place: str) -> None:
        """Refuse a tensor beyond the end of the file."""
        if end > len(self._bytes):
            raise WeightsError(f"{place} reaches byte {end}, the file has {len(self._bytes)}")

    def _now(self) -> tuple[int, int]:
        state = os.fstat(self._descriptor)
        return state.st_size, state.st_mtime_ns


@lru_cache(maxsize=8)
def _order(order: str, count: int, num_heads: int, head_dim: int) -> npt.NDArray[np.intp]:
    """For each row in the checkpoint's order the row of the file; `count` rows in all."""
    rows = np.arange(count)
    if order == HALVES:
        return rows.reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
    assert order == GROUPED
    size = num_heads * head_dim
    parts = np.split(rows, [count - 2 * size, count - size])
    return np.concatenate([part.reshape(num_heads, -1) for part in parts], axis=1).reshape(-1)


def has_nan_scale(kind: BlockType, rows: Bytes) -> bool:
    """Whether some 16-bit scale in rows of blocks, or some number of 16 bits, is infinite or not a number."""
    blocks = rows.reshape(len(rows), -1, kind.num_bytes)
    exponent = 0x7F80 if kind is BlockType.BF16 else 0x7C00
    for at in kind.scales:
        high = blocks[:, :, at + 1].astype(np.uint16) << 8 | blocks[:, :, at]
        if bool(((high & exponent) == exponent).any()):
            return True
    return False


def _block_sizes(kind: str) -> tuple[int, int]:
    """Inputs and bytes of a block of a type."""
    if kind in BlockType.__members__:
        return BlockType[kind].num_inputs, BlockType[kind].num_bytes
    if kind in _NUMBERS:
        return 1, _NUMBERS[kind].itemsize
    sizes: tuple[int, int] = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return sizes


def dequantise(kind: str, rows: Bytes, place: str = "a tensor") -> npt.NDArray[np.float32]:
    """The float32 values that rows of blocks stand for: [rows, inputs]; the work is shared by all usable cores.

    Raises:
        UnsupportedModel: the library cannot read the type.
    """
    number = gguf.GGMLQuantizationType[kind]
    block_inputs, block_bytes = _block_sizes(kind)
    num_inputs = rows.shape[1] // block_bytes * block_inputs
    values = np.empty((len(rows), num_inputs), np.float32)
    step = max(1, _CHUNK_ELEMENTS // max(num_inputs, 1))

    def make(start: int) -> None:
        with np.errstate(all="ignore"):  # scales that are no numbers
            values[start : start + step] = gguf.dequantize(np.ascontiguousarray(rows[start : start + step]), number)

    starts = range(0, len(rows), step)
    try:
        if len(starts) < 2:
            list(map(make, starts))
        else:
            with ThreadPoolExecutor(count_usable_cores()) as pool:
                list(pool.map(make, starts))
    except NotImplementedError as error:
        raise UnsupportedModel(f"{place} has type {kind}, which cannot be read") from error
    return values
