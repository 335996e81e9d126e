"""What a rank's weights will take in torch, from the spec alone: its decoder, built of tensors without values."""

from collections.abc import Callable, Sequence

import torch

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.storage import HollowStorage, Range, Storage, part_shape
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.layers.linear import Matmul
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.quantized.bit_packing import Codes
from funitel.model_server.quantized.config import Quantization
from funitel.model_server.quantized.matmul import Product
from funitel.model_server.spec.model_spec import ModelSpec

_META = torch.device("meta")


Build = Callable[[Weights, TensorParallel], ModelSpec]


def torch_weight_bytes(
    spec: ModelSpec,
    rank: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    build: Build | None = None,
    checkpoint: Weights | None = None,
    *,
    spreads_experts: bool = False,
) -> int:
    """Bytes of the weights of one of `size` ranks, as `Weights.held_bytes` will count them.

    `build` makes the model where it is more than a decoder, and returns the spec of the stack with the head;
    `spreads_experts` is that of `TensorParallel`; `checkpoint` says which tensors there are, and what they are kept as,
    where that decides what is read.
    """
    weights = _Sizes(dtype, checkpoint)
    parallel = TensorParallel(rank, size, _META)
    parallel.spreads_experts = spreads_experts
    if build is None:
        Decoder(spec, weights, parallel, TorchAttention(1, _META))
    else:
        spec = build(weights, parallel)
    start, end = parallel.split(spec.vocab_size)
    is_packed = device.type == "cpu" and dtype is torch.float32
    # A head that is the embedding table is a second copy where products are packed; one of unit rows has counted it.
    if spec.is_last and spec.is_tied and is_packed and not spec.is_head_normalized:
        weights.held_bytes += (end - start) * spec.table_size * dtype.itemsize
    return weights.held_bytes


class SizedProducts:
    """See QuantizedMatmul: computes nothing."""

    name = "sizes"

    def __init__(self, made: Quantization | None = None) -> None:
        self.made = made

    def of(self, parts: Sequence[Codes], bias: torch.Tensor | None) -> Product:
        """A product with nothing."""
        return Matmul(torch.empty(0, device=_META), bias)


class _Sizes(Weights):
    """A checkpoint that has every tensor that is asked for, and counts them."""

    def __init__(self, dtype: torch.dtype, checkpoint: Weights | None) -> None:
        self.dtype, self.device = dtype, _META
        self.prefix = "" if checkpoint is None else checkpoint.prefix
        self._checkpoint = checkpoint
        self.held_bytes = self.sharded_bytes = self.total_sharded_bytes = 0
        self._storages, self._used, self._progress, self._is_shown = {}, set(), None, False
        kept = None if checkpoint is None else checkpoint.products
        self.products = None if kept is None else SizedProducts(kept.made)

    def has(self, name: str) -> bool:
        """Any, where no checkpoint says otherwise."""
        return self._checkpoint is None or self._checkpoint.has(name)

    def _lies_by_outputs(self, name: str, shape: tuple[int, int]) -> bool:
        """It takes as much memory either way."""
        return False

    def _shaped(self, name: str, shape: Sequence[int]) -> Storage:
        return HollowStorage(name, shape)

    def kept(self, stem: str) -> Quantization | None:
        """As in the checkpoint."""
        return None if self._checkpoint is None else self._checkpoint.kept(stem)

    def read_kv_scales(self, stem: str) -> tuple[float, float]:
        """They take no memory."""
        return 1.0, 1.0

    def read_codes(
        self,
        stem: str,
        num_outputs: int,
        num_inputs: int,
        *,
        rows: Range | None = None,
        columns: Range | None = None,
        is_transposed: bool = False,
    ) -> Codes | None:
        """Nothing, of the size that the part has."""
        kept = self.kept(stem)
        assert kept is not None
        self.held_bytes += kept.num_bytes(*part_shape((num_outputs, num_inputs), rows, columns))
        return None

    def finish(self, ignored: Sequence[str]) -> None:
        """No tensor is unexpected."""
