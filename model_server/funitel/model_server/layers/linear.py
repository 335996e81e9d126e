"""Building blocks of the decoder. Each parallel layer owns its slicing, its loading and its collective."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from funitel.model_server.adapters.sites import Site
from funitel.model_server.checkpoint.storage import Part, Range
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.device.torch_import import seeded_generator
from funitel.model_server.layers.single_row import SingleRowProducts, products_for
from funitel.model_server.quantized.matmul import Product
from funitel.model_server.spec.layer_spec import LayerSpec
from funitel.model_server.spec.model_spec import Activation, ModelSpec, Norm, QkNorm, QkvLayout

ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.RELU: F.relu,
    Activation.QUICK_GELU: lambda x: x * torch.sigmoid(1.702 * x),
    Activation.RELU_SQUARED: lambda x: F.relu(x).square(),
}
_XIELU_BETA, _XIELU_EPS = 0.5, -1e-6


class Matmul:
    """x @ weight.T + bias. In float32 on a CPU the weight is repacked once for oneDNN; a GPU may have kernels for rows.

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
        self.single_row: SingleRowProducts | None = products_for(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.single_row is not None and _is_row(x):
            return self.single_row.multiply(x, self.weight, self.bias)
        if not self.is_packed:
            return F.linear(x, self.weight, self.bias)
        if self.is_alone_different and x.shape[0] == 1:
            return self._product(x.expand(2, -1))[:1]
        return self._product(x)

    def gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor | None:
        """The activated first half of the outputs times the second half, where one kernel has it; else None."""
        if self.single_row is None or not _is_row(x):
            return None
        return self.single_row.multiply_gated(x, self.weight, self.bias, activation)

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """The product in float32; on a GPU it is not rounded before, and written once."""
        if self.single_row is not None and _is_row(x):
            return self.single_row.multiply(x, self.weight, self.bias, torch.float32)
        if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
            y = torch.mm(x, self.weight.t(), out_dtype=torch.float32)
            return y if self.bias is None else y + self.bias
        return self(x).float()

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y

    def _sums_alone_differently(self, num_inputs: int) -> bool:
        pair = torch.rand(1, num_inputs, generator=seeded_generator(0)).expand(2, -1).contiguous()
        return not torch.equal(self._product(pair[:1]), self._product(pair)[:1])


def _is_row(x: torch.Tensor) -> bool:
    return x.dim() == 2 and x.shape[0] == 1 and x.is_contiguous()


def read_product(
    weights: Weights,
    parts: Sequence[Part],
    num_inputs: int,
    *,
    bias: torch.Tensor | None,
    is_transposed: bool,
    columns: Range | None = None,
    dtype: torch.dtype | None = None,
) -> Product:
    """Read linear layers on the same input, one's outputs after the other's; quantised where all of them are.

    `columns` are this rank's inputs where these are split; the arguments from there on are those of `read_linear`.
    """
    if weights.products is not None and dtype is None and all(weights.kept(name) for name, _, _ in parts):
        codes = [
            weights.read_codes(name, size, num_inputs, rows=rows, columns=columns, is_transposed=is_transposed)
            for name, size, rows in parts
        ]
        return weights.products.of([each for each in codes if each is not None], bias)
    matrices = [
        weights.read_linear(
            name, size, num_inputs, rows=rows, columns=columns, is_transposed=is_transposed, dtype=dtype
        )
        for name, size, rows in parts
    ]
    return Matmul(matrices[0] if len(matrices) == 1 else torch.cat(matrices), bias)


class XieluActivation:
    """An activation with two slopes of a layer's own. Source: xIELU, arXiv 2411.13010, and its code in transformers."""

    def __init__(self, weights: Weights, name: str) -> None:
        self.positive, self.negative = (
            F.softplus(weights.read(f"{name}.{slope}", [1]).float()) for slope in ("alpha_p", "alpha_n")
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        below = (torch.expm1(wide.clamp(max=_XIELU_EPS)) - wide) * (_XIELU_BETA + self.negative)
        return (torch.where(wide > 0, self.positive * wide * wide, below) + _XIELU_BETA * wide).to(x.dtype)


class NormLayer:
    """RMS or layer norm over the last dimension; nothing at all where the spec has no norms.

    `dtype` is the precision of what it reads, where that is not the weights', which its result has.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        name: str,
        size: int,
        *,
        eps: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.kind = spec.norm
        self.size = (size,)
        self.eps = spec.norm_eps if eps is None else eps
        has_norm = spec.norm is not Norm.NONE
        self.weight: torch.Tensor | None = None
        if has_norm and spec.has_norm_weight:
            self.weight = weights.read(f"{name}.weight", [size], dtype=dtype) + spec.norm_offset
        self.bias = weights.read(f"{name}.bias", [size], dtype=dtype) if has_norm and spec.has_norm_bias else None
        self.dtype = None if dtype is None else weights.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = self._normalized(x)
        return x if self.dtype is None else x.to(self.dtype)

    def _normalized(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind is Norm.RMS:
            x = F.rms_norm(x, self.size, self.weight, self.eps)
            return x if self.bias is None else x + self.bias
        if self.kind is Norm.LAYER:
            return F.layer_norm(x, self.size, self.weight, self.bias, self.eps)
        return x


class HeadNorm:
    """Norm of this rank's query or key heads [num_tokens, heads, head_dim], `mine` of `num_heads` in all.

    `num_holders` is how many ranks hold each of these heads.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        name: str,
        num_heads: int,
        mine: Range,
        parallel: TensorParallel,
        num_holders: int,
    ) -> None:
        self.kind, self.norm, self.eps = spec.qk_norm, spec.norm, spec.norm_eps
        self.parallel = parallel
        self.num_holders = num_holders
        self.num_elements = num_heads * spec.head_dim

        self.weight: torch.Tensor | None = None
        if self.kind is not QkNorm.PLAIN:
            self.weight = read_head_norm(spec, weights, f"{name}.weight", num_heads, mine) + spec.norm_offset
        self.bias: torch.Tensor | None = None
        if spec.has_qk_norm_bias:
            self.bias = read_head_norm(spec, weights, f"{name}.bias", num_heads, mine)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1:]
        if self.kind in (QkNorm.HEAD, QkNorm.PLAIN) and self.norm is Norm.RMS:
            return self._with_bias(F.rms_norm(x, size, self.weight, self.eps))
        if self.kind is QkNorm.WHOLE:
            squares = x.float().square().sum(dim=(1, 2), keepdim=True) / self.num_holders
            mean = self.parallel.all_reduce(squares) / self.num_elements
            x = (x * torch.rsqrt(mean + self.eps)).to(x.dtype)
        else:
            plain = F.rms_norm if self.norm is Norm.RMS else F.layer_norm
            x = plain(x, size, eps=self.eps)
        return self._with_bias(x if self.weight is None else x * self.weight)

    def _with_bias(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.bias is None else x + self.bias


def read_head_norm(spec: ModelSpec, weights: Weights, name: str, num_heads: int, mine: Range) -> torch.Tensor:
    """Read one tensor of a norm of heads, of those of this rank: [head_dim] or [heads, head_dim]."""
    dim = spec.head_dim
    if spec.qk_norm is QkNorm.HEAD:
        return weights.read(name, [dim])
    if spec.qk_norm is QkNorm.WHOLE:
        return weights.read(name, [num_heads * dim], rows=(mine[0] * dim, mine[1] * dim)).view(-1, dim)
    if "{j}" in name:
        every = [weights.read(name.format(j=j), [dim]) for j in range(num_heads)]
        return torch.stack(every[mine[0] : mine[1]])
    return weights.read(name, [num_heads, dim], rows=mine)


class OutputDelta(Protocol):
    """The adapters of a layer."""

    @property
    def is_on(self) -> bool:
        """Whether a row of the step has an adapter."""

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Outputs `y` [rows, outputs] with what adapters add for inputs `x` [rows, inputs]; of a table ids [rows]."""


class ColumnLinear:
    """Linear layers on the same input, split by output and packed into one matmul; every rank keeps its own outputs.

    `parts` are (checkpoint name, outputs of the whole layer, first row, this rank's rows): several parts may come from
    one packed tensor. With `has_bias` all have one, but those that `unbiased` names.
    """

    delta: OutputDelta | None = None

    def __init__(
        self,
        weights: Weights,
        parts: Sequence[Part],
        num_inputs: int,
        *,
        has_bias: bool,
        is_transposed: bool,
        unbiased: Sequence[str] = (),
    ) -> None:
        bias: torch.Tensor | None = None
        if has_bias:
            bias = torch.cat(
                [
                    torch.zeros(rows[1] - rows[0], dtype=weights.dtype, device=weights.device)
                    if name in unbiased
                    else weights.read(f"{name}.bias", [size], rows=rows)
                    for name, size, rows in parts
                ]
            )
        self.site = Site(tuple(parts), num_inputs)
        self.matmul = read_product(weights, parts, num_inputs, bias=bias, is_transposed=is_transposed)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.matmul(x)
        return y if self.delta is None else self.delta(x, y)

    def gated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor | None:
        """The activated first half of the outputs times the second half, where one kernel has it; else None."""
        if (self.delta is not None and self.delta.is_on) or not isinstance(self.matmul, Matmul):
            return None
        return self.matmul.gated(x, activation)


class RowLinear:
    """A linear layer split by input: partial sums are added over all ranks; rank 0 adds the bias.

    `dtype` is the precision of the product, where that is not the weights'.
    """

    delta: OutputDelta | None = None

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
        dtype: torch.dtype | None = None,
    ) -> None:
        self.parallel = parallel
        self.dtype = dtype
        bias = weights.read(f"{name}.bias", [num_outputs], dtype=dtype) if has_bias else None
        self.site = Site(((name, num_outputs, (0, num_outputs)),), num_inputs, columns)
        self.matmul = read_product(
            weights,
            self.site.parts,
            num_inputs,
            bias=bias if parallel.rank == 0 else None,
            is_transposed=is_transposed,
            columns=columns,
            dtype=dtype,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.parallel.all_reduce(self.partial(x))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """What this rank's inputs add to the result."""
        x = x if self.dtype is None else x.to(self.dtype)
        y = self.matmul(x)
        return y if self.delta is None else self.delta(x, y)


def heads_out(
    spec: ModelSpec, weights: Weights, name: str, heads: HeadSplit, parallel: TensorParallel, dim: int
) -> RowLinear:
    """The way back of this rank's heads, of `dim` elements each, to hidden states."""
    columns = heads.q_start * dim, heads.q_end * dim
    layer = weights, name, spec.hidden_size, spec.num_heads * dim, columns, parallel
    return RowLinear(*layer, has_bias=spec.has_out_bias, is_transposed=spec.names.is_transposed)


class VocabEmbedding:
    """Token embedding split by vocabulary: each rank looks its own rows up, the sum is the embedding."""

    delta: OutputDelta | None = None

    def __init__(self, spec: ModelSpec, weights: Weights, name: str, parallel: TensorParallel) -> None:
        self.parallel = parallel
        self.start, self.end = parallel.split(spec.vocab_size)
        whole = (name, spec.table_size, (0, spec.table_size))
        self.site = Site((whole,), spec.vocab_size, (self.start, self.end), is_table=True)
        self.weight = weights.read(f"{name}.weight", [spec.vocab_size, spec.table_size], rows=(self.start, self.end))

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.parallel.size == 1:
            whole = F.embedding(input_ids, self.weight)
            return whole if self.delta is None else self.delta(input_ids, whole)
        is_foreign = (input_ids < self.start) | (input_ids >= self.end)
        places = (input_ids - self.start).masked_fill_(is_foreign, 0)
        local = F.embedding(places, self.weight)
        if self.delta is not None:
            local = self.delta(places, local)
        return self.parallel.all_reduce(local.masked_fill_(is_foreign[:, None], 0))


class VocabHead:
    """Hidden states -> logits, split by vocabulary and gathered on rank 0."""

    delta: OutputDelta | None = None

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        name: str,
        embedding: VocabEmbedding | None,
        parallel: TensorParallel,
    ) -> None:
        self.parallel = parallel
        self.vocab_size = spec.vocab_size
        self.scale, self.softcap = spec.logit_scale, spec.logit_softcap
        shape, rows = [spec.vocab_size, spec.table_size], parallel.split(spec.vocab_size)
        self.site = Site(((name, spec.vocab_size, rows),), spec.table_size, is_head=True)
        if spec.is_tied:
            assert embedding is not None, "a head that is the embedding table is where that is"
            weight = embedding.weight
        else:
            weight = weights.read(f"{name}.weight", shape, rows=rows)
        if spec.is_head_normalized:
            weight = F.normalize(weight)
        bias = weights.read(f"{name}.bias", [spec.vocab_size], rows=rows) if spec.has_head_bias else None
        self.matmul = Matmul(weight, bias)
        if spec.is_tied and (self.matmul.is_packed or spec.is_head_normalized):
            weights.count_copy(weight, spec.vocab_size * spec.table_size)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Logits [rows, vocab_size] in float32 on rank 0; None on the others."""
        logits = self.matmul.in_float32(hidden)
        if self.delta is not None:
            logits = self.delta(hidden, logits)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return self.parallel.gather_columns(logits, self.vocab_size)


def qkv_parts(
    spec: ModelSpec, heads: HeadSplit, name: Callable[[str], str], own: LayerSpec | None = None
) -> list[Part]:
    """Checkpoint rows of this rank's query, key and value heads, in this order, from one packed or three tensors.

    `own` says which of them the layer has; None: all.
    """
    dim = spec.head_dim
    num_q, num_kv = spec.num_heads * dim, spec.num_kv_heads * dim
    q = (heads.q_start * dim, heads.q_end * dim)
    kv = (heads.kv_start * dim, heads.kv_end * dim)
    if not spec.names.qkv and spec.names.is_gate_in_q:
        queries = gated_query_parts(spec, heads, name, 0)
        return [*queries, (name(spec.names.k), num_kv, kv), (name(spec.names.v), num_kv, kv)]
    if not spec.names.qkv:
        parts = [(name(spec.names.q), num_q, q), (name(spec.names.k), num_kv, kv), (name(spec.names.v), num_kv, kv)]
        if own is None:
            return parts
        return parts[: 1 if own.kv_source is not None else 2 if own.has_key_values else 3]
    packed, total = name(spec.names.qkv), num_q + 2 * num_kv
    if spec.qkv_layout is QkvLayout.GROUPED:
        return [(packed, total, rows) for rows in _grouped_rows(spec, heads)]
    starts = ((0, q), (num_q, kv), (num_q + num_kv, kv))
    return [(packed, total, (start + a, start + b)) for start, (a, b) in starts]


def gated_query_parts(spec: ModelSpec, heads: HeadSplit, name: Callable[[str], str], part: int) -> list[Part]:
    """Rows of the queries of this rank's heads, or with a `part` of 1 of their gates, where both lie in one tensor."""
    dim, whole = spec.head_dim, name(spec.names.q)
    starts = [(2 * head + part) * dim for head in range(heads.q_start, heads.q_end)]
    return [(whole, 2 * spec.num_heads * dim, (start, start + dim)) for start in starts]


def _grouped_rows(spec: ModelSpec, heads: HeadSplit) -> list[Range]:
    """Rows of a tensor in which each KV head's queries, key and value lie together: queries, then keys, then values."""
    dim, group = spec.head_dim, spec.num_heads // spec.num_kv_heads
    mine = range(heads.kv_start, heads.kv_end)

    def place(kv_head: int, start: int, end: int) -> Range:
        first = kv_head * (group + 2)
        return (first + start) * dim, (first + end) * dim

    queries = [place(kv, max(heads.q_start - kv * group, 0), min(heads.q_end - kv * group, group)) for kv in mine]
    keys, values = ([place(kv, group + i, group + i + 1) for kv in mine] for i in range(2))
    return queries + keys + values


def mlp_parts(spec: ModelSpec, mine: Range, name: Callable[[str], str]) -> list[Part]:
    """Checkpoint rows of this rank's hidden units of an MLP: the gate's first or in turns, where there is one."""
    units = spec.intermediate_size
    if spec.names.gate_up and spec.is_gated:
        packed = name(spec.names.gate_up)
        if spec.names.is_stack_interleaved:
            return [(packed, 2 * units, (2 * mine[0], 2 * mine[1]))]
        return [(packed, 2 * units, mine), (packed, 2 * units, (units + mine[0], units + mine[1]))]
    inputs = (spec.names.gate, spec.names.up) if spec.is_gated else (spec.names.up,)
    return [(name(template), units, mine) for template in inputs]
