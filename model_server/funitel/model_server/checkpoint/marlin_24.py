"""The `marlin-24` layout of compressed-tensors: integers of 2:4 sparse matrices in the tiles of a GPU kernel."""

import torch

from funitel.model_server.checkpoint.quantized_storage import ACTIVATION_SCALES, QuantizedStorage, matrix_shape
from funitel.model_server.checkpoint.storage import Files, Range, cut
from funitel.model_server.quantized.bit_packing import WORD_BITS, Codes, unpack
from funitel.model_server.quantized.config import Quantization
from funitel.proto.errors import WeightsError

_TILE_OUTPUTS, _TILE_INPUTS = 64, 32  # of a dense matrix; a tile has codes for half of the inputs
_TILE_CODES = _TILE_OUTPUTS * _TILE_INPUTS // 2
_META_INPUTS = 16  # of a word of meta: two bits for each of two places in each four inputs
# Dimensions of the codes of a tile, as words of 4 bits have them: outputs by 16 and by 8, inputs by 2, outputs by 1,
# inputs by 1, outputs by 4, inputs by 8. Words of 8 bits have the last but two the other way round.
_DIMS = (4, 2, 4, 4, 2, 2, 2)
_ORDERS = {4: (0, 8, 4, 6, 1, 2, 3, 7, 5), 8: (0, 8, 4, 7, 1, 2, 3, 6, 5)}  # inputs, outputs; of rows and tiles too


class Marlin24Storage(QuantizedStorage):
    """Symmetric integers of 4 or 8 bits, two of each four inputs, offset by half their range.

    weight_packed [inputs / 32, outputs * bits / 2] has the codes that are stored, a tile of 64 outputs and 32 inputs
    after the other; meta [inputs / 32, outputs * 2] has their places, in CUTLASS' order; scale_packed is [groups,
    outputs], of groups in another order of outputs. Sources: compressed-tensors 0.12 (`marlin_24`,
    `permutations_24`, `semi_structured_conversions`), which writes this layout and does not read it.
    """

    parts = ("weight_packed", "scale_packed", "meta", *ACTIVATION_SCALES)
    marks = ("weight_packed", "scale_packed")

    def __init__(self, files: Files, stem: str, quantization: Quantization) -> None:
        super().__init__(files, stem, quantization)
        tiles, words = matrix_shape(self._slice("weight_packed"), f"{stem}.weight_packed")
        num_outputs = words * 2 // self.bits
        if not num_outputs or num_outputs % _TILE_OUTPUTS or num_outputs * self.bits != words * 2:
            raise WeightsError(f"tensor {stem}.weight_packed has rows of {words} words, no tiles of 64 outputs")
        self.shape = (num_outputs, tiles * _TILE_INPUTS)
        self._expect("scale_packed", self._num_groups, num_outputs)
        self._expect("meta", tiles, 2 * num_outputs)
        for part, dtype in (("weight_packed", "I32"), ("meta", "I16")):
            if (found := self._slice(part).get_dtype()) != dtype:
                raise WeightsError(f"tensor {stem}.{part} is {found}, expected {dtype}")

    def read_codes(self, rows: Range, columns: Range) -> Codes:
        """See QuantizedStorage: whole tiles are read, and of meta, which is an eighth as large as floats, all."""
        tops, lefts = _tiles(rows, _TILE_OUTPUTS), _tiles(columns, _TILE_INPUTS)
        kept, places = self._kept(tops, lefts), self._places(tops, lefts)
        zero = 2 ** (self.bits - 1)
        codes = torch.full((*kept.shape[:2], 4), zero, dtype=torch.uint8).scatter_(2, places, kept).flatten(1)
        top, left = tops[0] * _TILE_OUTPUTS, lefts[0] * _TILE_INPUTS
        codes = codes[rows[0] - top : rows[1] - top, columns[0] - left : columns[1] - left].contiguous()
        groups, group_of = self._groups("g_idx", columns)
        scales = self._scales("scale_packed", groups, (top, tops[1] * _TILE_OUTPUTS))
        if self.quantization.group_size != -1 and self.quantization.group_size < self.shape[1] // 2:
            scales = scales.reshape(len(scales), -1, 4, 2).transpose(2, 3).flatten(1)
        scales = scales[:, rows[0] - top : rows[1] - top].t().contiguous()
        return Codes(codes, scales, torch.full(scales.shape, zero, dtype=torch.uint8), group_of)

    def _kept(self, tops: Range, lefts: Range) -> torch.Tensor:
        """The codes that are stored of some tiles: [outputs, fours of inputs, 2]."""
        num_words = _TILE_CODES * self.bits // WORD_BITS  # of a tile
        words = cut(self._slice("weight_packed"), lefts, (tops[0] * num_words, tops[1] * num_words))
        codes = unpack(words, self.bits, 1)
        shape = len(codes), tops[1] - tops[0], *_DIMS
        by_input = codes.view(shape).permute(_ORDERS[self.bits])
        return by_input.reshape(len(codes) * _TILE_INPUTS // 4, 2, -1).permute(2, 0, 1).contiguous()

    def _places(self, tops: Range, lefts: Range) -> torch.Tensor:
        """Where among its four inputs each code is: [outputs, fours of inputs, 2]."""
        rows = torch.arange(tops[0] * _TILE_OUTPUTS, tops[1] * _TILE_OUTPUTS)[:, None]
        per_tile = _TILE_INPUTS // _META_INPUTS
        columns = torch.arange(lefts[0] * per_tile, lefts[1] * per_tile)[None]
        words = self._whole("meta").flatten()[_meta_places(rows, columns, self.shape[0])].int()
        places: torch.Tensor = (words[..., None] >> torch.arange(0, _META_INPUTS, 2) & 3).long()
        places = places.view(len(words), words.shape[1] * _META_INPUTS // 4, 2)
        if bool((places[..., 0] >= places[..., 1]).any()):
            raise WeightsError(f"tensor {self.stem}.meta is not 2:4: four inputs have their two places out of order")
        return places


def _tiles(span: Range, size: int) -> Range:
    return span[0] // size, -(-span[1] // size)


def _meta_places(rows: torch.Tensor, columns: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Where CUTLASS keeps the word of meta of each row and column: rows reordered, then blocks of two swizzled."""
    to = rows // 64 * 64 + rows % 2 * 2 + rows % 8 // 4 + rows % 4 // 2 * 32 + rows % 64 // 8 * 4
    shift = ((to % 2 == 0) & (columns % 2 == 1)).long() - ((to % 2 == 1) & (columns % 2 == 0)).long()
    to, at = to + shift, columns - shift
    return at // 2 * 2 * num_rows + to * 2 + at % 2
