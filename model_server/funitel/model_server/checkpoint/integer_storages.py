"""Formats of quantised linear layers with integers: GPTQ, AWQ, and those of compressed-tensors."""

from math import prod

import torch

from funitel.model_server.checkpoint.quantized_storage import (
    ACTIVATION_SCALES,
    QuantizedStorage,
    matrix_shape,
    words_of,
)
from funitel.model_server.checkpoint.storage import Files, Range, cut
from funitel.model_server.quantized.bit_packing import WORD_BITS, Codes, unpack
from funitel.model_server.quantized.config import Quantization
from funitel.proto.errors import WeightsError


class GptqStorage(QuantizedStorage):
    """The layout of AutoGPTQ and of TGI's quantiser.

    qweight [inputs / per_word, outputs] packed along the inputs; scales [groups, outputs];
    qzeros [groups, outputs / per_word] packed along the outputs; g_idx [inputs] the group of each input, one after the
    other when missing.
    """

    parts = ("qweight", "qzeros", "scales", "g_idx")
    marks = ("qweight",)

    def __init__(self, files: Files, stem: str, quantization: Quantization) -> None:
        super().__init__(files, stem, quantization)
        num_words, num_outputs = matrix_shape(self._slice("qweight"), f"{stem}.qweight")
        per_word = WORD_BITS // self.bits
        self.shape = (num_outputs, num_words * per_word)
        self._expect("scales", self._num_groups, num_outputs)
        self._expect("qzeros", self._num_groups, num_outputs // per_word)
        if num_outputs % per_word:
            raise WeightsError(f"tensor {stem}.qweight has {num_outputs} outputs, not a multiple of {per_word}")

    def read_codes(self, rows: Range, columns: Range) -> Codes:
        """See QuantizedStorage."""
        groups, group_of = self._groups("g_idx", columns)
        words, skipped = words_of(columns, self.bits)
        codes = unpack(cut(self._slice("qweight"), words, rows), self.bits, 0)
        codes = codes[skipped : skipped + columns[1] - columns[0]].t().contiguous()  # [rows, columns]
        words, skipped = words_of(rows, self.bits)
        zeros = unpack(cut(self._slice("qzeros"), groups, words), self.bits, 1)
        zeros = zeros[:, skipped : skipped + rows[1] - rows[0]].t()
        if not self.quantization.is_zero_exact:
            zeros = (zeros + 1) & (2**self.bits - 1)
        return Codes(codes, self._scales("scales", groups, rows).t(), zeros, group_of)


class CompressedStorage(QuantizedStorage):
    """The `pack-quantized` layout of compressed-tensors.

    weight_packed [outputs, inputs / per_word] of codes offset by half their range; weight_scale [outputs, groups];
    weight_zero_point [outputs / per_word, groups], offset likewise, where weights are not symmetric; weight_shape [2];
    weight_g_idx [inputs] where groups do not lie one after the other.
    """

    parts = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", *ACTIVATION_SCALES)
    marks = ("weight_packed",)

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
        words, skipped = words_of(columns, self.bits)
        codes = unpack(cut(self._slice("weight_packed"), rows, words), self.bits, 1)
        codes = codes[:, skipped : skipped + columns[1] - columns[0]].contiguous()
        scales = self._scales("weight_scale", rows, groups)
        if self._is_symmetric:
            zeros = torch.full(scales.shape, 2 ** (self.bits - 1), dtype=torch.uint8)
        else:
            words, skipped = words_of(rows, self.bits)
            zeros = unpack(cut(self._slice("weight_zero_point"), words, groups), self.bits, 0)
            zeros = zeros[skipped : skipped + rows[1] - rows[0]]
        return Codes(codes, scales, zeros, group_of)


class AwqStorage(QuantizedStorage):
    """The `gemm` layout of AutoAWQ.

    qweight [inputs, outputs / 8] and qzeros [groups, outputs / 8] packed along the outputs, where the codes of a word
    belong to its outputs 0, 2, 4, 6, 1, 3, 5, 7; scales [groups, outputs].
    """

    parts = ("qweight", "qzeros", "scales")
    marks = ("qweight",)
    _PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of the outputs of a word

    def __init__(self, files: Files, stem: str, quantization: Quantization) -> None:
        super().__init__(files, stem, quantization)
        num_inputs, num_words = matrix_shape(self._slice("qweight"), f"{stem}.qweight")
        self.shape = (num_words * len(self._PLACES), num_inputs)
        self._expect("scales", self._num_groups, self.shape[0])
        self._expect("qzeros", self._num_groups, num_words)

    def read_codes(self, rows: Range, columns: Range) -> Codes:
        """See QuantizedStorage."""
        groups, group_of = self._groups("g_idx", columns)
        codes = self._unpacked("qweight", columns, rows).contiguous()
        return Codes(codes, self._scales("scales", groups, rows).t(), self._unpacked("qzeros", groups, rows), group_of)

    def _unpacked(self, part: str, lines: Range, outputs: Range) -> torch.Tensor:
        """The codes of some lines, [outputs, lines]."""
        words, skipped = words_of(outputs, self.bits)
        codes = unpack(cut(self._slice(part), lines, words), self.bits, 1)
        codes = codes.view(len(codes), -1, len(self._PLACES))[:, :, list(self._PLACES)].flatten(1)
        return codes[:, skipped : skipped + outputs[1] - outputs[0]].t()


class IntegerStorage(QuantizedStorage):
    """The `int-quantized` layout of compressed-tensors: weights [outputs, inputs] in int8, a byte each.

    weight_scale is [outputs, groups], or one number; weight_zero_point, where weights are not symmetric, has its shape.
    """

    parts = ("weight", "weight_scale", "weight_zero_point", "weight_g_idx", *ACTIVATION_SCALES)
    marks = ("weight_scale",)
    dtype = "I8"

    def __init__(self, files: Files, stem: str, quantization: Quantization) -> None:
        super().__init__(files, stem, quantization)
        self.shape = self._shape_of_weight()
        self._is_symmetric = f"{stem}.weight_zero_point" not in self.names
        self._is_whole = quantization.group_size == -1 and prod(self._slice("weight_scale").get_shape()) == 1
        for part in ("weight_scale",) if self._is_symmetric else ("weight_scale", "weight_zero_point"):
            if not self._is_whole:
                self._expect(part, self.shape[0], self._num_groups)

    def read_codes(self, rows: Range, columns: Range) -> Codes:
        """See QuantizedStorage. Codes are offset by half their range."""
        groups, group_of = self._groups("weight_g_idx", columns)
        codes = cut(self._slice("weight"), rows, columns).contiguous().view(torch.uint8) ^ _SIGN
        scales = self._of_groups("weight_scale", rows, groups)
        zeros = torch.full(scales.shape, _SIGN, dtype=torch.uint8)
        if not self._is_symmetric:
            zeros = self._of_groups("weight_zero_point", rows, groups).to(torch.int8).view(torch.uint8) ^ _SIGN
        return Codes(codes, self._finite("weight_scale", scales), zeros, group_of)

    def _of_groups(self, part: str, rows: Range, groups: Range) -> torch.Tensor:
        if self._is_whole:
            return self._whole(part).reshape(1, 1).expand(rows[1] - rows[0], 1).contiguous()
        return cut(self._slice(part), rows, groups).contiguous()


_SIGN = 0x80  # turns what int8 says of -128 to 127 into a code of 0 to 255
