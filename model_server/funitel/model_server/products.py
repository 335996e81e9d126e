"""Products with the weights of linear layers: what computes them, and how weights are rounded as they are loaded."""

from collections.abc import Sequence
from typing import Protocol

import torch

from funitel.model_server.packing import Codes
from funitel.model_server.quantization import Quantization
from funitel.model_server.quantizer.rounding import round_int8


class Product(Protocol):
    """x @ weight.T + bias of one linear layer, or of several on the same input."""

    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, inputs] -> [num_rows, outputs]."""


class Products(Protocol):
    """Multiplies by quantised matrices as they are.

    `made` is what matrices become that the checkpoint has in floating point; None leaves them.
    """

    name: str
    made: Quantization | None

    def of(self, parts: Sequence[Codes], bias: torch.Tensor | None) -> Product:
        """The product with matrices on the same input, one's outputs after the other's."""


INT8 = Quantization(method="int8", bits=8, group_size=-1)


def rounded(weight: torch.Tensor, kept: Quantization) -> Codes:
    """Weights [outputs, inputs] with a scale for each output, where they are."""
    assert kept == INT8
    return round_int8(weight.float(), torch.float32)
