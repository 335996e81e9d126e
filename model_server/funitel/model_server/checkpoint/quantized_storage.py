"""Read a quantised linear layer from a checkpoint's files: codes with scales, of which each format is a subclass.

A storage reads rows and columns of its own matrix in floating point; a kernel that computes on the codes themselves
asks for `read_codes`. `integer_storages` and `float_storages` hold the formats.
"""

from abc import abstractmethod
from typing import Any, ClassVar, NoReturn

import torch

from funitel.model_server.checkpoint.storage import Files, Range, Storage
from funitel.model_server.quantized.bit_packing import WORD_BITS, Codes
from funitel.model_server.quantized.config import Quantization
from funitel.proto.errors import WeightsError

ACTIVATION_SCALES = ("input_scale", "input_zero_point", "input_global_scale", "input_scale_ub")
"""Parts of layers that are not used: activations have the precision of --dtype."""


class QuantizedStorage(Storage):
    """A linear layer's weights [outputs, inputs] as codes; this way round also where a family stores [in, out].

    `parts` are what names of its tensors end with, `marks` those that no other layer has. A matrix called weight that
    has the type `dtype` in a file is such a layer too.

    Raises:
        WeightsError: a part is missing or misshapen, or holds scales that are not finite.
    """

    parts: ClassVar[tuple[str, ...]]
    marks: ClassVar[tuple[str, ...]]
    dtype: ClassVar[str | None] = None

    def __init__(self, files: Files, stem: str, quantization: Quantization) -> None:
        self.stem = stem
        self.bits = quantization.bits
        self.quantization = quantization
        self.names = tuple(name for part in self.parts if (name := f"{stem}.{part}") in files)
        self._files = files
        self._reordered: torch.Tensor | None = None

    @abstractmethod
    def read_codes(self, rows: Range, columns: Range) -> Codes:
        """Read a part as integers, scales and zero points. Cuts need not fall on words or groups."""

    def read(self, rows: Range | None, columns: Range | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See Storage."""
        codes = self.read_codes(rows or (0, self.shape[0]), columns or (0, self.shape[1]))
        return codes.to(device).dequantize(dtype)

    def _slice(self, part: str) -> Any:
        name = f"{self.stem}.{part}"
        if name not in self._files:
            raise WeightsError(f"the checkpoint lacks tensor {name}")
        return self._files[name].get_slice(name)

    def _shape_of_weight(self) -> tuple[int, int]:
        """Outputs and inputs of the matrix called weight, which must have the type `dtype`."""
        source, name = self._slice("weight"), f"{self.stem}.weight"
        shape = matrix_shape(source, name)
        if source.get_dtype() != self.dtype:
            raise WeightsError(f"tensor {name} is {source.get_dtype()}, expected {self.dtype} beside its scales")
        return shape

    def _whole(self, part: str) -> torch.Tensor:
        values: torch.Tensor = self._slice(part)[:]
        return values

    def _scales(self, part: str, rows: Range | None, columns: Range | None) -> torch.Tensor:
        """Some scales of a matrix of them, which must be numbers."""
        source = self._slice(part)
        found: torch.Tensor = source[slice(*(rows or (None, None))), slice(*(columns or (None, None)))]
        return self._finite(part, found)

    def _finite(self, part: str, scales: torch.Tensor) -> torch.Tensor:
        wide = scales.float()
        if not bool(torch.isfinite(wide).all()):
            raise_not_finite(f"{self.stem}.{part}", wide)
        return scales

    def _expect(self, part: str, *shape: int) -> None:
        found = tuple(self._slice(part).get_shape())
        if found != shape:
            raise WeightsError(f"tensor {self.stem}.{part} has shape {list(found)}, expected {list(shape)}")

    @property
    def _num_groups(self) -> int:
        size = self.quantization.group_size
        return 1 if size == -1 else -(-self.shape[1] // size)

    def _groups(self, part: str, columns: Range) -> tuple[Range, torch.Tensor]:
        """The groups to read for some columns, and for each of these columns the place of its group among them."""
        start, end = columns
        size = self.quantization.group_size
        if f"{self.stem}.{part}" in self.names:
            if self._reordered is None:
                self._reordered = self._read_order(part)
            groups = self._reordered[start:end]
            if groups.numel() == 0:
                return (0, 0), groups
            first, last = int(groups.min()), int(groups.max())
            return (first, last + 1), groups - first
        if size == -1:
            return (0, 1), torch.zeros(end - start, dtype=torch.int64)
        first = start // size
        return (first, -(-end // size)), torch.arange(start, end) // size - first

    def _read_order(self, part: str) -> torch.Tensor:
        """The group of every input, for groups that do not lie one after the other."""
        self._expect(part, self.shape[1])
        groups = self._whole(part).long()
        if groups.numel() and not 0 <= int(groups.min()) <= int(groups.max()) < self._num_groups:
            message = f"tensor {self.stem}.{part} names groups {int(groups.min())} to {int(groups.max())}"
            raise WeightsError(f"{message}, there are {self._num_groups}")
        return groups


def raise_not_finite(name: str, scales: torch.Tensor) -> NoReturn:
    """Raise WeightsError for scales of which some are no finite numbers."""
    wrong = float(scales[~torch.isfinite(scales)][0])
    raise WeightsError(f"tensor {name} holds the scale {wrong}; scales must be finite")


def matrix_shape(source: Any, name: str) -> tuple[int, int]:
    """The shape of a tensor in a file that must be a matrix. Raises: `WeightsError`."""
    shape = source.get_shape()
    if len(shape) != 2:
        raise WeightsError(f"tensor {name} has shape {list(shape)}, expected a matrix")
    return shape[0], shape[1]


def words_of(span: Range, bits: int) -> tuple[Range, int]:
    """The words that hold a span of codes, and how many codes of the first word come before it."""
    count = WORD_BITS // bits
    return (span[0] // count, -(-span[1] // count)), span[0] % count
