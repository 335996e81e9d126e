"""Read quantised linear layers from a checkpoint's files: integers or float8 with scales, in each project's format.

A storage reads rows and columns of its own matrix in floating point; a kernel that computes on the codes themselves
asks for `read_codes`.
"""

from abc import abstractmethod
from typing import Any

import torch

from funitel.model_server.checkpoint.storage import Files, PlainStorage, Range, Storage, cut
from funitel.model_server.quantized.bit_packing import WORD_BITS, Codes, unpack
from funitel.model_server.quantized.config import AWQ, COMPRESSED, FP8, GPTQ, Quantization
from funitel.proto.errors import WeightsError

_PARTS = {
    GPTQ: ("qweight", "qzeros", "scales", "g_idx"),
    AWQ: ("qweight", "qzeros", "scales"),
    COMPRESSED: ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    FP8: ("weight", "weight_scale", "weight_scale_inv", "input_scale", "input_scale_ub"),
}


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
        codes = unpack(cut(self._slice("qweight"), words, rows), self.bits, 0)
        codes = codes[skipped : skipped + columns[1] - columns[0]].t().contiguous()  # [rows, columns]
        words, skipped = _words(rows, self.bits)
        zeros = unpack(cut(self._slice("qzeros"), groups, words), self.bits, 1)
        zeros = zeros[:, skipped : skipped + rows[1] - rows[0]].t()
        if not self.quantization.is_zero_exact:
            zeros = (zeros + 1) & (2**self.bits - 1)
        return Codes(codes, cut(self._slice("scales"), groups, rows).t(), zeros, group_of)


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
        codes = unpack(cut(self._slice("weight_packed"), rows, words), self.bits, 1)
        codes = codes[:, skipped : skipped + columns[1] - columns[0]].contiguous()
        scales = cut(self._slice("weight_scale"), rows, groups)
        if self._is_symmetric:
            zeros = torch.full(scales.shape, 2 ** (self.bits - 1), dtype=torch.uint8)
        else:
            words, skipped = _words(rows, self.bits)
            zeros = unpack(cut(self._slice("weight_zero_point"), words, groups), self.bits, 0)
            zeros = zeros[skipped : skipped + rows[1] - rows[0]]
        return Codes(codes, scales, zeros, group_of)


class AwqStorage(QuantizedStorage):
    """The `gemm` layout of AutoAWQ.

    qweight [inputs, outputs / 8] and qzeros [groups, outputs / 8] packed along the outputs, where the codes of a word
    belong to its outputs 0, 2, 4, 6, 1, 3, 5, 7; scales [groups, outputs].
    """

    _PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of the outputs of a word

    def __init__(self, files: Files, stem: str, quantization: Quantization) -> None:
        super().__init__(files, stem, quantization)
        num_inputs, num_words = _matrix(self._slice("qweight"), f"{stem}.qweight")
        self.shape = (num_words * len(self._PLACES), num_inputs)
        self._expect("scales", self._num_groups, self.shape[0])
        self._expect("qzeros", self._num_groups, num_words)

    def read_codes(self, rows: Range, columns: Range) -> Codes:
        """See QuantizedStorage."""
        groups, group_of = self._groups("g_idx", columns)
        codes = self._unpacked("qweight", columns, rows).contiguous()
        return Codes(
            codes, cut(self._slice("scales"), groups, rows).t(), self._unpacked("qzeros", groups, rows), group_of
        )

    def _unpacked(self, part: str, lines: Range, outputs: Range) -> torch.Tensor:
        """The codes of some lines, [outputs, lines]."""
        words, skipped = _words(outputs, self.bits)
        codes = unpack(cut(self._slice(part), lines, words), self.bits, 1)
        codes = codes.view(len(codes), -1, len(self._PLACES))[:, :, list(self._PLACES)].flatten(1)
        return codes[:, skipped : skipped + outputs[1] - outputs[0]].t()


class Float8Storage(QuantizedStorage):
    """Weights [outputs, inputs] in float8, and what they are multiplied by.

    weight_scale has one number, or one for each output; of blocks it is [blocks of outputs, blocks of inputs], and is
    called weight_scale_inv where the configuration is not compressed-tensors'.
    """

    def __init__(self, files: Files, stem: str, quantization: Quantization) -> None:
        super().__init__(files, stem, quantization)
        source = self._slice("weight")
        self.shape = _matrix(source, f"{stem}.weight")
        if source.get_dtype() != "F8_E4M3":
            raise WeightsError(f"tensor {stem}.weight is {source.get_dtype()}, expected F8_E4M3 beside its scales")
        self._scales = "weight_scale_inv" if f"{stem}.weight_scale_inv" in self.names else "weight_scale"
        self._scale_outputs = quantization.group_outputs
        if quantization.group_size != -1:
            self._expect(self._scales, -(-self.shape[0] // self._scale_outputs), self._num_groups)
            return
        found = tuple(self._slice(self._scales).get_shape())
        if found in ((), (1,), (1, 1)):
            self._scale_outputs = max(1, self.shape[0])
        elif found not in ((self.shape[0],), (self.shape[0], 1)):
            raise WeightsError(
                f"tensor {stem}.{self._scales} has shape {list(found)}, expected one number or {self.shape[0]}"
            )

    def read_codes(self, rows: Range, columns: Range) -> Codes:
        """See QuantizedStorage."""
        (first, end), group_of = self._groups("g_idx", columns)
        name = f"{self.stem}.{self._scales}"
        scales = self._files[name].get_tensor(name).float().reshape(-1, self._num_groups)[:, first:end]
        places = torch.arange(*rows) // self._scale_outputs
        return Codes(
            codes=cut(self._slice("weight"), rows, columns).contiguous(),
            scales=scales[places],
            zeros=torch.zeros((len(places), end - first), dtype=torch.uint8),
            groups=group_of,
        )


_STORAGES: dict[str, type[QuantizedStorage]] = {
    GPTQ: GptqStorage,
    AWQ: AwqStorage,
    COMPRESSED: CompressedStorage,
    FP8: Float8Storage,
}
# Parts that only a quantised layer has, one of each.
_MARKS = {GPTQ: ("qweight",), AWQ: ("qweight",), COMPRESSED: ("weight_packed",), FP8: _PARTS[FP8][1:3]}


def open_storages(files: Files, quantization: Quantization | None) -> dict[str, Storage]:
    """One storage for each tensor of the model, by the name it has, or would have, unquantised.

    Raises:
        WeightsError: the parts of a quantised layer do not fit together.
    """
    storages: dict[str, Storage] = {}
    if quantization is not None:
        kind = _STORAGES[quantization.method]
        stems = [name.rpartition(".")[0] for name in files if name.rpartition(".")[2] in _MARKS[quantization.method]]
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


def _words(span: Range, bits: int) -> tuple[Range, int]:
    """The words that hold a span of codes, and how many codes of the first word come before it."""
    count = WORD_BITS // bits
    return (span[0] // count, -(-span[1] // count)), span[0] % count
