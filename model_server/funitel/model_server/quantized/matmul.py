"""The interface of a quantised matmul, and how weights are rounded for it while they are loaded."""

from collections.abc import Sequence
from typing import Protocol

import torch

from funitel.model_server.quantized.bit_packing import Codes, round_int8
from funitel.model_server.quantized.config import FP8, Quantization


class Product(Protocol):
    """x @ weight.T + bias of one linear layer, or of several on the same input."""

    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, inputs] -> [num_rows, outputs]."""


class QuantizedMatmul(Protocol):
    """Multiplies by quantised matrices as they are.

    `made` is what matrices become that the checkpoint has in floating point; None leaves them.
    """

    name: str
    made: Quantization | None

    def of(self, parts: Sequence[Codes], bias: torch.Tensor | None) -> Product:
        """The product with matrices on the same input, one's outputs after the other's."""


INT8 = Quantization(method="int8", bits=8, group_size=-1)
FLOAT8 = Quantization(method=FP8, bits=8, group_size=-1)
_MAX_FLOAT8 = 448.0


def rounded(weight: torch.Tensor, kept: Quantization) -> Codes:
    """Weights [outputs, inputs] as `INT8` or `FLOAT8`, with a scale for each output, where they are."""
    return round_float8(weight.float()) if kept == FLOAT8 else round_int8(weight.float(), torch.float32)


def round_float8(weight: torch.Tensor) -> Codes:
    """One scale for each output, its largest weight at the largest number of e4m3. `weight` is [outputs, inputs]."""
    scales = weight.abs().amax(dim=1, keepdim=True) / _MAX_FLOAT8
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    codes = (weight / scales).clamp_(-_MAX_FLOAT8, _MAX_FLOAT8).to(torch.float8_e4m3fn)
    groups = torch.zeros(weight.shape[1], dtype=torch.int64, device=weight.device)
    return Codes(codes, scales, torch.zeros_like(scales, dtype=torch.uint8), groups)
