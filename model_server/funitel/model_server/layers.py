"""Building blocks of the decoder. Each parallel layer owns its slicing, its loading and its collective."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from funitel.model_server.parallel import HeadSplit, TensorParallel
from funitel.model_server.spec import Activation, ModelSpec, Norm, RotaryScaling
from funitel.model_server.storage import Range
from funitel.model_server.weights import Weights

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.RELU: F.relu,
}


class Matmul:
    """x @ weight.T + bias. In float32 on a CPU the weight is repacked once for oneDNN.

    Measured 2026-11 on two AVX2 cores, 576 -> 3072: 17 rows 1.5x, 4 rows 2.3x faster than `F.linear`; logits of one
    row (576 -> 49152) 1.9x. A packed product's rows do not depend on one another, except that a row alone may be summed
    in another order (1536 -> 576 with AVX-512): there it is computed twice, so that company changes nothing.
    """

    # Rows the packing is tuned for: decode batches and prompt chunks; with 1 every shape above a row is slower.
    TUNED_ROWS = 16

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        self.is_packed = weight.device.type == "cpu" and weight.dtype is torch.float32
        if self.is_packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, self.TUNED_ROWS)
        self.weight = weight  # [outputs, inputs], opaque when packed
        self.is_alone_different = self.is_packed and self._sums_alone_differently(weight.shape[1])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_packed:
            return F.linear(x, self.weight, self.bias)
        if self.is_alone_different and x.shape[0] == 1:
            return self._product(x.expand(2, -1))[:1]
        return self._product(x)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y

    def _sums_alone_differently(self, num_inputs: int) -> bool:
        pair = torch.rand(1, num_inputs, generator=torch.Generator().manual_seed(0)).expand(2, -1).contiguous()
        return not torch.equal(self._product(pair[:1]), self._product(pair)[:1])


class NormLayer:
    """RMS or layer norm over the last dimension."""

    def __init__(self, spec: ModelSpec, weights: Weights, name: str, size: int) -> None:
        self.size = (size,)
        self.eps = spec.norm_eps
        self.weight = weights.read(f"{name}.weight", [size])
        self.bias = weights.read(f"{name}.bias", [size]) if spec.norm is Norm.LAYER else None
        self.is_rms = spec.norm is Norm.RMS

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_rms:
            return F.rms_norm(x, self.size, self.weight, self.eps)
        return F.layer_norm(x, self.size, self.weight, self.bias, self.eps)


class ColumnLinear:
    """Linear layers on the same input, split by output and packed into one matmul; every rank keeps its own outputs.

    `parts` are (checkpoint name, outputs of the whole layer, first row, this rank's rows): several parts may come from
    one packed tensor.
    """

    def __init__(
        self,
        weights: Weights,
        parts: Sequence[tuple[str, int, Range]],
        num_inputs: int,
        *,
        has_bias: bool,
        is_transposed: bool,
    ) -> None:
        matrices, biases = [], []
        for name, num_outputs, rows in parts:
            matrix = weights.read_linear(name, num_outputs, num_inputs, rows=rows, is_transposed=is_transposed)
            matrices.append(matrix)
            if has_bias:
                biases.append(weights.read(f"{name}.bias", [num_outputs], rows=rows))
        self.matmul = Matmul(torch.cat(matrices).contiguous(), torch.cat(biases) if has_bias else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.matmul(x)


class RowLinear:
    """A linear layer split by input: partial sums are added over all ranks; rank 0 adds the bias."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        num_outputs: int,
        num_inputs: int,
        columns: Range,
        parallel: TensorParallel,
        *,
        has_bias: bool,
        is_transposed: bool,
    ) -> None:
        self.parallel = parallel
        weight = weights.read_linear(name, num_outputs, num_inputs, columns=columns, is_transposed=is_transposed)
        bias = weights.read(f"{name}.bias", [num_outputs]) if has_bias else None
        self.matmul = Matmul(weight, bias if parallel.rank == 0 else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.parallel.all_reduce(self.matmul(x))


class VocabEmbedding:
    """Token embedding split by vocabulary: each rank looks its own rows up, the sum is the embedding."""

    def __init__(self, spec: ModelSpec, weights: Weights, name: str, parallel: TensorParallel) -> None:
        self.parallel = parallel
        self.start, self.end = parallel.split(spec.vocab_size)
        self.weight = weights.read(f"{name}.weight", [spec.vocab_size, spec.hidden_size], rows=(self.start, self.end))

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.parallel.size == 1:
            return F.embedding(input_ids, self.weight)
        is_foreign = (input_ids < self.start) | (input_ids >= self.end)
        local = F.embedding((input_ids - self.start).masked_fill_(is_foreign, 0), self.weight)
        return self.parallel.all_reduce(local.masked_fill_(is_foreign[:, None], 0))


class VocabHead:
    """Hidden states -> logits, split by vocabulary and gathered on rank 0."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        name: str,
        embedding: VocabEmbedding,
        parallel: TensorParallel,
    ) -> None:
        self.parallel = parallel
        self.vocab_size = spec.vocab_size
        shape, rows = [spec.vocab_size, spec.hidden_size], (embedding.start, embedding.end)
        weight = embedding.weight if spec.is_tied else weights.read(f"{name}.weight", shape, rows=rows)
        self.matmul = Matmul(weight)
        if spec.is_tied and self.matmul.is_packed:
            weights.count_copy(weight, spec.vocab_size * spec.hidden_size)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Logits [rows, vocab_size] in float32 on rank 0; None on the others."""
        return self.parallel.gather_columns(self.matmul(hidden).float(), self.vocab_size)


class Rotary:
    """Rotary position embedding in the half-split layout. Source: RoFormer, arXiv 2104.09864."""

    def __init__(self, head_dim: int, base: float, scaling: RotaryScaling, device: torch.device) -> None:
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        self.frequencies = _scaled(1.0 / base**exponents, scaling).to(device)  # [head_dim / 2]

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine, each [num_tokens, 1, head_dim / 2]."""
        angles = (positions.float()[:, None] * self.frequencies)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    @staticmethod
    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate heads [num_tokens, num_heads, head_dim]."""
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _scaled(frequencies: torch.Tensor, scaling: RotaryScaling) -> torch.Tensor:
    """Stretch rotary frequencies for a longer context. Source: the `rope_type` definitions of Llama 3.1."""
    if scaling.kind == "default":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_max_position * frequencies / (2 * torch.pi)  # full turns over the trained context
    span = scaling.high_freq_factor - scaling.low_freq_factor
    share = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)  # 1: fast frequencies stay as they are
    return frequencies * share + frequencies / scaling.factor * (1 - share)


def qkv_parts(spec: ModelSpec, heads: HeadSplit, name: Callable[[str], str]) -> list[tuple[str, int, Range]]:
    """Checkpoint rows of this rank's query, key and value heads, from one packed or three tensors."""
    dim = spec.head_dim
    num_q, num_kv = spec.num_heads * dim, spec.num_kv_heads * dim
    q = (heads.q_start * dim, heads.q_end * dim)
    kv = (heads.kv_start * dim, heads.kv_end * dim)
    if spec.names.qkv:
        packed, total = name(spec.names.qkv), num_q + 2 * num_kv
        starts = ((0, q), (num_q, kv), (num_q + num_kv, kv))
        return [(packed, total, (start + a, start + b)) for start, (a, b) in starts]
    return [
        (name(spec.names.q), num_q, q),
        (name(spec.names.k), num_kv, kv),
        (name(spec.names.v), num_kv, kv),
    ]
