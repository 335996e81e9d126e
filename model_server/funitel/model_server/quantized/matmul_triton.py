"""The quantised matmul of a GPU: the Triton kernels behind `QuantizedMatmul`."""

from collections.abc import Sequence

import torch

from funitel.model_server.quantized.bit_packing import Codes
from funitel.model_server.quantized.config import Quantization
from funitel.model_server.quantized.matmul import Product
from funitel.model_server.quantized.matmul_kernels import multiply, unpack
from funitel.model_server.quantized.packed_matrix import CodeKind, PackedMatrix

_MAX_PACKED_ROWS = 256  # beyond, unpacking the matrix once costs less than unpacking it for each tile of rows


class PackedProduct:
    """Product with matrices on the same input that stay packed.

    Args:
        matrices: one's outputs come after the other's.
        bias: of all outputs.
        num_processors: streaming multiprocessors that programs are to fill.
    """

    def __init__(self, matrices: Sequence[PackedMatrix], bias: torch.Tensor | None, num_processors: int) -> None:
        self.bias = bias
        self.matrices = matrices
        sizes = [matrix.num_outputs for matrix in matrices]
        self._biases = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
        self._num_processors = num_processors

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        parts = [self._product(x, *each) for each in zip(self.matrices, self._biases, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _product(self, x: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[0] <= _MAX_PACKED_ROWS:
            return multiply(x, matrix, bias, self._num_processors)
        weights = unpack(matrix, x.dtype)
        return x @ weights if bias is None else torch.addmm(bias, x, weights)


class TritonProducts:
    """See Products."""

    name = "triton"

    def __init__(self, num_processors: int, made: Quantization | None = None) -> None:
        self.made = made
        self._num_processors = num_processors

    def of(self, parts: Sequence[Codes], bias: torch.Tensor | None) -> Product:
        """See QuantizedMatmul. Matrices with inputs grouped alike become one."""
        if all(torch.equal(part.groups, parts[0].groups) for part in parts):
            parts = [Codes.stacked(parts)]
        return PackedProduct([PackedMatrix.of(part, _kind_of(part)) for part in parts], bias, self._num_processors)


def _kind_of(codes: Codes) -> CodeKind:
    if codes.codes.dtype is not torch.uint8:
        return CodeKind.FLOAT8
    most = max(int(part.max()) if part.numel() else 0 for part in (codes.codes, codes.zeros))
    return CodeKind.INT4 if most < 1 << CodeKind.INT4.bits else CodeKind.INT8
