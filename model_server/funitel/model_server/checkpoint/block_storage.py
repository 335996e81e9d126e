"""Linear layers as blocks with scales: as a checkpoint has them, or made of floating point as they are read."""

import math
from abc import abstractmethod
from typing import Protocol, runtime_checkable

import torch

from funitel.model_server.checkpoint.quantized_storage import QuantizedStorage, matrix_shape, raise_not_finite
from funitel.model_server.checkpoint.storage import Files, PlainStorage, Range, Storage
from funitel.model_server.quantized.bit_packing import Codes
from funitel.model_server.quantized.block_formats import FORMATS, BlockFormat
from funitel.model_server.quantized.config import Quantization
from funitel.model_server.quantized.outliers import MAX_INPUTS, Outliers
from funitel.proto.errors import WeightsError


@runtime_checkable
class BlockSource(Protocol):
    """A matrix that can be read as blocks of a format."""

    shape: tuple[int, ...]
    format: BlockFormat
    has_outliers: bool

    @abstractmethod
    def blocks(self, rows: Range, columns: Range) -> torch.Tensor:
        """Outputs `rows` and inputs `columns`, which cut no block, as [outputs, bytes] uint8."""

    @abstractmethod
    def outliers(self, rows: Range, columns: Range) -> Outliers | None:
        """What is to be added to the blocks of a part; None where there is no such tensor."""


OUTLIER_PARTS = ("outlier_rows", "outlier_columns", "outlier_deltas")
_OUTLIER_TYPES = ("I32", "U16", "F16")


class BlockStorage(QuantizedStorage):
    """The blocks of a layer as a checkpoint has them: `weight_blocks`, [outputs, bytes of an output] uint8.

    The inputs are said by `weight_inputs`, one int32, as the last block of an output may be filled up. Where there are
    outliers, `outlier_rows` [outputs + 1] int32 says where those of each output begin in `outlier_columns` uint16 and
    `outlier_deltas` float16, see `Outliers`.
    """

    parts = ("weight_blocks", "weight_inputs", *OUTLIER_PARTS)
    marks = ("weight_blocks",)

    def __init__(self, files: Files, stem: str, quantization: Quantization) -> None:
        super().__init__(files, stem, quantization)
        named = FORMATS[quantization.format_of(stem)]
        self._data = self._slice("weight_blocks")
        num_outputs, num_bytes = matrix_shape(self._data, f"{stem}.weight_blocks")
        self._expect("weight_inputs", 1)
        num_inputs = int(self._whole("weight_inputs"))
        self.format = named.stored(num_inputs)
        if self._data.get_dtype() != "U8" or num_inputs < 1 or self.format.row_bytes(num_inputs) != num_bytes:
            raise WeightsError(
                f"tensor {stem}.weight_blocks is {self._data.get_dtype()} with {num_bytes} bytes an output, expected "
                f"{self.format.row_bytes(num_inputs)} of {self.format.name} for {num_inputs} inputs"
            )
        self.shape = (num_outputs, num_inputs)
        self.has_outliers = any(f"{stem}.{part}" in self.names for part in OUTLIER_PARTS)
        if self.has_outliers:
            self._check_outliers()

    def _check_outliers(self) -> None:
        """Raise WeightsError unless types and sizes of the tensors of outliers fit together."""
        num_outputs, num_inputs = self.shape
        count = math.prod(self._slice("outlier_columns").get_shape())
        for part, dtype, size in zip(OUTLIER_PARTS, _OUTLIER_TYPES, (num_outputs + 1, count, count), strict=True):
            self._expect(part, size)
            found = self._slice(part).get_dtype()
            if found != dtype:
                raise WeightsError(f"tensor {self.stem}.{part} is {found}, expected {dtype}")
        if num_inputs > MAX_INPUTS:
            raise WeightsError(f"{self.stem} has outliers and {num_inputs} inputs, the limit is {MAX_INPUTS}")

    def outliers(self, rows: Range, columns: Range) -> Outliers | None:
        """See BlockSource. Raises: `WeightsError`: a place is not in the matrix or not in order, a delta not finite."""
        if not self.has_outliers:
            return None
        name, count = f"{self.stem}.outlier_rows", self._slice("outlier_columns").get_shape()[0]
        whole = self._whole("outlier_rows").to(torch.int64)
        if int(whole[0]) != 0 or int(whole[-1]) != count or bool((whole.diff() < 0).any()):
            raise WeightsError(f"tensor {name} must ascend from 0 to {count}, the number of outliers")
        starts = whole[rows[0] : rows[1] + 1]
        part = slice(int(starts[0]), int(starts[-1]))
        found = Outliers(
            starts - starts[0], self._slice("outlier_columns")[part], self._slice("outlier_deltas")[part].contiguous()
        )
        places = found.columns.to(torch.int64)
        if found.count and int(places.max()) >= self.shape[1]:
            message = f"tensor {self.stem}.outlier_columns names input {int(places.max())}"
            raise WeightsError(f"{message}, the layer has {self.shape[1]}")
        is_next = torch.ones(found.count + 1, dtype=torch.bool)
        is_next[found.starts] = False  # the first of an output follows none
        if bool((is_next[1:-1] & (places.diff() <= 0)).any()):
            raise WeightsError(f"tensor {self.stem}.outlier_columns must ascend within an output")
        if not bool(torch.isfinite(found.deltas).all()):
            wrong = float(found.deltas[~torch.isfinite(found.deltas)][0])
            raise WeightsError(f"tensor {self.stem}.outlier_deltas holds {wrong}; differences must be finite")
        return found if columns == (0, self.shape[1]) else found.within(*columns)

    def blocks(self, rows: Range, columns: Range) -> torch.Tensor:
        """See BlockSource. Raises: `WeightsError`: a scale is no finite number."""
        size, num_bytes = self.format.num_inputs, self.format.num_bytes
        first, last = columns[0] // size * num_bytes, -(-columns[1] // size) * num_bytes
        found: torch.Tensor = self._data[slice(*rows), slice(first, last)]
        self._finite("weight_blocks", torch.stack(self.format.scales(found)))
        return found.contiguous()

    def read_codes(self, rows: Range, columns: Range) -> Codes:
        """See QuantizedStorage."""
        return _codes_of(self, f"{self.stem}.weight_blocks", rows, columns)

    def read(self, rows: Range | None, columns: Range | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See Storage."""
        rows, columns, size = rows or (0, self.shape[0]), columns or (0, self.shape[1]), self.format.num_inputs
        start = columns[0] // size * size
        weights = self.format.decode(self.blocks(rows, (start, columns[1])), columns[1] - start)
        outliers = self.outliers(rows, (start, columns[1]))
        if outliers is not None:
            outliers.add_to(weights)
        return weights[:, columns[0] - start :].to(device=device, dtype=dtype, copy=True).contiguous()


class RoundedStorage(Storage):
    """A layer in floating point, of which blocks are made; as numbers it is what it was.

    `is_transposed` says that the file has it as [inputs, outputs].
    """

    has_outliers = False

    def __init__(self, files: Files, name: str, block_format: BlockFormat, *, is_transposed: bool = False) -> None:
        self._plain, self._is_transposed = PlainStorage(files, name), is_transposed
        self.names, self.format = self._plain.names, block_format
        self.shape = self._plain.shape[::-1] if is_transposed else self._plain.shape

    def blocks(self, rows: Range, columns: Range) -> torch.Tensor:
        """See BlockSource. All inputs that share a scale are read, whatever part of them is asked for."""
        shared = self.format.shared_inputs(self.shape[1])
        first, last = columns[0] // shared * shared, min(-(-columns[1] // shared) * shared, self.shape[1])
        found = self.format.encode(self.read(rows, (first, last), torch.float32, torch.device("cpu")))
        start = self.format.row_bytes(columns[0] - first)
        return found[:, start : start + self.format.row_bytes(columns[1] - columns[0])].contiguous()

    def outliers(self, rows: Range, columns: Range) -> Outliers | None:
        """See BlockSource: none."""
        return None

    def read_codes(self, rows: Range, columns: Range) -> Codes:
        """The blocks of a part as integers, see QuantizedStorage. Raises: `WeightsError`: float16 has no such scale."""
        return _codes_of(self, self.names[0], rows, columns)

    def read(self, rows: Range | None, columns: Range | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See Storage."""
        if self._is_transposed:
            return self._plain.read(columns, rows, dtype, device).t().contiguous()
        return self._plain.read(rows, columns, dtype, device)


def blocks_between(source: BlockSource, rows: Range, columns: Range, num_inputs: int) -> torch.Tensor:
    """Outputs `rows` and inputs `columns`, which may cut blocks where a format `fitted` to that: its blocks."""
    fitted, size = source.format.fitted(num_inputs, *columns), source.format.num_inputs
    assert fitted is not None
    first = columns[0] // size * size
    blocks = source.blocks(rows, (first, min(-(-columns[1] // size) * size, num_inputs)))
    found = source.format.divided(blocks, fitted)
    start = fitted.row_bytes(columns[0] - first)
    return found[:, start : start + fitted.row_bytes(columns[1] - columns[0])].contiguous()


def _codes_of(source: BlockSource, name: str, rows: Range, columns: Range) -> Codes:
    """A part of a matrix as codes with scales and bases; `columns` may cut blocks, which are read whole."""
    block_format, size = source.format, source.format.num_inputs
    first = columns[0] // size * size
    blocks = source.blocks(rows, (first, min(-(-columns[1] // size) * size, source.shape[1])))
    codes, scales, bases = block_format.parts(blocks)
    for values in (scales, bases):
        if not bool(torch.isfinite(values).all()):
            raise_not_finite(name, values)
    offset = 128 if block_format.is_symmetric else 0
    part = slice(columns[0] - first, columns[1] - first)
    groups = torch.arange(codes.shape[1]).repeat_interleave(size)[part]
    zeros = torch.full_like(scales, offset, dtype=torch.uint8)
    kept = None if block_format.is_symmetric else bases if block_format.has_zero else bases.half()
    return Codes((codes + offset).to(torch.uint8).flatten(1)[:, part].contiguous(), scales.half(), zeros, groups, kept)
