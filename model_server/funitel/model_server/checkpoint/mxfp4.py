"""Read stacks of matrices in MXFP4, as gpt-oss is published: numbers of 4 bits, 32 in a row with one power of two.

Source: OCP Microscaling Formats, version 1.0; the order of the numbers in a byte is that of gpt-oss.
"""

from math import prod

import torch
import torch.nn.functional as F

from funitel.model_server.checkpoint.storage import Files, Range, Storage
from funitel.proto.errors import WeightsError

_BLOCK = 32  # numbers that share a scale
_NUM_BYTES = _BLOCK // 2
_BIAS = 127  # of the exponents
_MAX_EXPONENT = 252  # beyond, 6 times the scale is no float32; 255 stands for none at all
# Of a sign, two bits of exponent and one of mantissa.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_PAIRS = torch.tensor([(_VALUES[byte & 15], _VALUES[byte >> 4]) for byte in range(256)])  # what each byte says


class Mxfp4Storage(Storage):
    """One matrix [outputs, inputs] of a stack: `blocks` [matrices, outputs, inputs / 32, 16], `scales` less the last.

    A byte holds two numbers, the lower bits first. The matrix is exact in every precision with the range of bfloat16.

    Raises:
        WeightsError: a part is missing or misshapen, the stack has fewer matrices, or an exponent makes no number.
    """

    def __init__(self, files: Files, stem: str, place: int) -> None:
        self.names = (f"{stem}_blocks", f"{stem}_scales")
        missing = next((name for name in self.names if name not in files), None)
        if missing is not None:
            raise WeightsError(f"the checkpoint lacks tensor {missing}")
        self._blocks, self._scales = (files[name].get_slice(name) for name in self.names)
        shape, scales = tuple(self._blocks.get_shape()), list(self._scales.get_shape())
        if len(shape) != 4 or shape[3] != _NUM_BYTES or place >= shape[0]:
            expected = f"[matrices, outputs, inputs / {_BLOCK}, {_NUM_BYTES}] with a matrix {place}"
            raise WeightsError(f"tensor {self.names[0]} has shape {list(shape)}, expected {expected}")
        if scales != list(shape[:3]):
            raise WeightsError(f"tensor {self.names[1]} has shape {scales}, expected {list(shape[:3])}")
        self._place = place
        self._num_matrices = shape[0]
        self.shape = (shape[1], shape[2] * _BLOCK)

    @property
    def num_elements(self) -> int:
        """See Storage."""
        return self._num_matrices * prod(self.shape)

    def read(self, rows: Range | None, columns: Range | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See Storage. Cuts need not fall between blocks."""
        first, end = columns or (0, self.shape[1])
        start = first // _BLOCK
        part = (
            slice(self._place, self._place + 1),
            slice(*(rows or (None, None))),
            slice(start, -(-end // _BLOCK)),
        )
        codes, exponents = self._blocks[part][0].to(device), self._scales[part][0].to(device)
        most = int(exponents.max()) if exponents.numel() else 0
        if most > _MAX_EXPONENT:
            raise WeightsError(f"tensor {self.names[1]} holds the scale {most}; scales must be at most {_MAX_EXPONENT}")
        wide = dtype if dtype is torch.bfloat16 else torch.float32
        numbers = F.embedding(codes.int(), _PAIRS.to(device, wide)).flatten(-2)  # [rows, blocks, 32]
        scales = torch.ldexp(torch.ones(exponents.shape, device=device), exponents.int() - _BIAS).to(wide)
        scaled = (numbers * scales[..., None]).flatten(1)
        return scaled[:, first - start * _BLOCK : end - start * _BLOCK].to(dtype).contiguous()
