"""How one tensor lies in a checkpoint's files: as it is, or as a matrix of small integers with scales.

`Weights` keeps one storage for each tensor the model may ask for. A storage reads rows and columns of its own tensor
and knows neither ranks nor layers. A kernel that computes on the integers themselves asks for `read_codes`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from funitel.model_server.packing import WORD_BITS, Codes, unpack
from funitel.model_server.pickles import PickleFile
from funitel.model_server.quantization import COMPRESSED, GPTQ, Quantization
from funitel.proto.errors import WeightsError

Range = tuple[int, int]
_PARTS = {
    GPTQ: ("qweight", "qzeros", "scales", "g_idx"),
    COMPRESSED: ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
}


def part_shape(shape: Sequence[int], rows: Range | None, columns: Range | None) -> list[int]:
    """The shape of a tensor's rows and columns within these ranges; None is all of them."""
    sizes = list(shape)
    for place, part in enumerate((rows, columns)):
        if part is not None:
            sizes[place] = part[1] - part[0]
    return sizes


class TensorSlice(Protocol):
    """A tensor in a file, of which parts can be read."""

    def get_shape(self) -> Sequence[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, part: Any) -> torch.Tensor: ...


class TensorFile(Protocol):
    """An open file of tensors, with the face of safetensors' own."""

    def get_slice(self, name: str) -> TensorSlice: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...


Files = Mapping[str, TensorFile]  # by the names of the tensors


def open_file(path: Path) -> tuple[TensorFile, list[str]]:
    """Open a file of weights, safetensors or PyTorch's own; returns it and the names of its tensors.

    Raises:
        WeightsError: it is not whole, or holds more than tensors.
    """
    if path.suffix == ".safetensors":
        return open_safetensors(path)
    pickled = PickleFile(path)
    return pickled, pickled.keys()


def open_safetensors(path: Path) -> tuple[Any, list[str]]:
    """Open a safetensors file; returns it and the names of its tensors. Raises: `WeightsError`: it is not whole."""
    try:
        file = safe_open(path, framework="pt")
        return file, list(file.keys())  # type: ignore[no-untyped-call]
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is not a whole safetensors file: {error}") from error


class Storage(ABC):
    """One tensor of the model. `shape` is the tensor's, `names` are the tensors of the files that make it up."""

    shape: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def num_elements(self) -> int:
        """Values of everything that `names` stand for."""
        return prod(self.shape)

    @abstractmethod
    def read(self, rows: Range | None, columns: Range | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Read a part (None: all of that dimension) into memory of its own."""


class PlainStorage(Storage):
    """A tensor that is stored as it is."""

    def __init__(self, files: Files, name: str) -> None:
        self.names = (name,)
        self._slice = files[name].get_slice(name)
        self.shape = tuple(self._slice.get_shape())

    def read(self, rows: Range | None, columns: Range | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See Storage."""
        cut = self._slice[slice(*(rows or (None, None)))] if columns is None else _cut(self._slice, rows, columns)
        kept: torch.Tensor = cut.to(device=device, dtype=dtype, copy=True).contiguous()
        return kept


class StackedStorage(Storage):
    """One matrix of a stack [matrices, outputs, inputs].

    Raises:
        WeightsError: the tensor is no stack, or has fewer matrices.
    """

    def __init__(self, files: Files, name: str, place: int) -> None:
        self.names = (name,)
        self._slice = files[name].get_slice(name)
        self._stack: tuple[int, ...] = tuple(self._slice.get_shape())
        if len(self._stack) != 3 or place >= self._stack[0]:
            raise WeightsError(f"tensor {name} has shape {list(self._stack)}, expected a stack with a matrix {place}")
        self._place = place
        self.shape = self._stack[1:]

    @property
    def num_elements(self) -> int:
        """See Storage."""
        return prod(self._stack)

    def read(self, rows: Range | None, columns: Range | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See Storage."""
        every = (None, None)
        cut = self._slice[self._place : self._place + 1, slice(*(rows or every)), slice(*(columns or every))]
        kept: torch.Tensor = cut[0].to(device=device, dtype=dtype, copy=True).contiguous()
        return kept


class QuantizedStorage(Storage):
    """A linear layer's weights [outputs, inputs] as integers; this way round also where a family stores [in, out].

    Raises:
        WeightsError: a part is missing or misshapen.
    """

    def __init__(self, files: Files, stem: str, quantization: Quantization) -> None:
        self.stem = stem
        self.bits = quantization.bits
        self.quantization = quantization
        self.names = tuple(name for part in _PARTS[quantization.method] if (name := f"{stem}.{part}") in files)
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

    def _whole(self, part: str) -> torch.Tensor:
        values: torch.Tensor = self._slice(part)[:]
        return values

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


class GptqStorage(QuantizedStorage):
    """The layout of AutoGPTQ and of TGI's quantiser.

    qweight [inputs / per_word, outputs] packed along the inputs; scales [groups, outputs];
    qzeros [groups, outputs / per_word] packed along the outputs; g_idx [inputs] the group of each input, one after the
    other when missing.
    """

    def __init__(self, files: Files, stem: str, quantization: Quantization) -> None:
        super().__init__(files, stem, quantization)
        num_words, num_outputs = _matrix(self._slice("qweight"), f"{stem}.qweight")
        per_word = WORD_BITS // self.bits
        self.shape = (num_outputs, num_words * per_word)
        self._expect("scales", self._num_groups, num_outputs)
        self._expect("qzeros", self._num_groups, num_outputs // per_word)
        if num_outputs % per_word:
            raise WeightsError(f"tensor {stem}.qweight has {num_outputs} outputs, not a multiple of {per_word}")

    def read_codes(self, rows: Range, columns: Range) -> Codes:
        """See QuantizedStorage."""
        groups, group_of = self._groups("g_idx", columns)
        words, skipped = _words(columns, self.bits)
        codes = unpack(_cut(self._slice("qweight"), words, rows), self.bits, 0)
        codes = codes[skipped : skipped + columns[1] - columns[0]].t().contiguous()  # [rows, columns]
        words, skipped = _words(rows, self.bits)
        zeros = unpack(_cut(self._slice("qzeros"), groups, words), self.bits, 1)
        zeros = zeros[:, skipped : skipped + rows[1] - rows[0]].t()
        if not self.quantization.is_zero_exact:
            zeros = (zeros + 1) & (2**self.bits - 1)
        return Codes(codes, _cut(self._slice("scales"), groups, rows).t(), zeros, group_of)


class CompressedStorage(QuantizedStorage):
    """The `pack-quantized` layout of compressed-tensors.

    weight_packed [outputs, inputs / per_word] of codes offset by half their range; weight_scale [outputs, groups];
    weight_zero_point [outputs / per_word, groups], offset likewise, where weights are not symmetric; weight_shape [2];
    weight_g_idx [inputs] where groups do not lie one after the other.
    """

    def __init__(self, files: Files, stem: str, quantization: Quantization) -> None:
        super().__init__(files, stem, quantization)
        shape = self._whole("weight_shape").tolist()
        if len(shape) != 2:
            raise WeightsError(f"tensor {stem}.weight_shape says {shape}, not the two sizes of a matrix")
        self.shape = (shape[0], shape[1])
        self._expect("weight_packed", shape[0], self._num_words(shape[1]))
        self._expect("weight_scale", shape[0], self._num_groups)
        self._is_symmetric = f"{stem}.weight_zero_point" not in self.names
        if not self._is_symmetric:
            self._expect("weight_zero_point", self._num_words(shape[0]), self._num_groups)

    def _num_words(self, size: int) -> int:
        return -(-size * self.bits // WORD_BITS)

    def read_codes(self, rows: Range, columns: Range) -> Codes:
        """See QuantizedStorage."""
        groups, group_of = self._groups("weight_g_idx", columns)
        words, skipped = _words(columns, self.bits)
        codes = unpack(_cut(self._slice("weight_packed"), rows, words), self.bits, 1)
        codes = codes[:, skipped : skipped + columns[1] - columns[0]].contiguous()
        scales = _cut(self._slice("weight_scale"), rows, groups)
        if self._is_symmetric:
            zeros = torch.full(scales.shape, 2 ** (self.bits - 1), dtype=torch.uint8)
        else:
            words, skipped = _words(rows, self.bits)
            zeros = unpack(_cut(self._slice("weight_zero_point"), words, groups), self.bits, 0)
            zeros = zeros[skipped : skipped + rows[1] - rows[0]]
        return Codes(codes, scales, zeros, group_of)


def open_storages(files: Files, quantization: Quantization | None) -> dict[str, Storage]:
    """One storage for each tensor of the model, by the name it has, or would have, unquantised.

    Raises:
        WeightsError: the parts of a quantised layer do not fit together.
    """
    storages: dict[str, Storage] = {}
    if quantization is not None:
        kind = GptqStorage if quantization.method == GPTQ else CompressedStorage
        ending = f".{_PARTS[quantization.method][0]}"
        stems = [name.removesuffix(ending) for name in files if name.endswith(ending)]
        storages = {f"{stem}.weight": kind(files, stem, quantization) for stem in stems}
    taken = {name for storage in storages.values() for name in storage.names}
    return storages | {name: PlainStorage(files, name) for name in files if name not in taken}


def gptq_tensors(files: Files) -> Quantization | None:
    """What TGI's own quantiser stored as tensors beside the weights, when it did.

    Its checkpoints have no configuration; `gptq_sym` changes nothing, for zero points are stored either way.
    """
    if "gptq_bits" not in files or "gptq_groupsize" not in files:
        return None
    bits, group_size = (int(files[name].get_tensor(name)) for name in ("gptq_bits", "gptq_groupsize"))
    return Quantization.gptq(bits, group_size)


TGI_TENSORS = ("gptq_bits", "gptq_groupsize", "gptq_sym")


def _matrix(source: Any, name: str) -> tuple[int, int]:
    shape = source.get_shape()
    if len(shape) != 2:
        raise WeightsError(f"tensor {name} has shape {list(shape)}, expected a matrix")
    return shape[0], shape[1]


def _cut(source: Any, rows: Range | None, columns: Range) -> torch.Tensor:
    part: torch.Tensor = source[slice(*(rows or (None, None))), slice(*columns)]
    return part


def _words(span: Range, bits: int) -> tuple[Range, int]:
    """The words that hold a span of codes, and how many codes of the first word come before it."""
    count = WORD_BITS // bits
    return (span[0] // count, -(-span[1] // count)), span[0] % count
