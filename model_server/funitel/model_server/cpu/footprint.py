"""Compute the memory of a rank's weights and steps in the engine, from the spec alone, before anything is read.

Of weights it follows `program.Program` matrix by matrix; a test holds the two together for every family, tier and rank.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from funitel.model_server.checkpoint.storage import Part, Range
from funitel.model_server.cpu.precision import MatrixKind, Tier
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.layers.linear import mlp_parts, qkv_parts
from funitel.model_server.layers.mlp import any_expert_spec, held_experts, shared_spec
from funitel.model_server.quantized.block_types import BlockType
from funitel.model_server.spec.model_spec import ExpertsSpec, ModelSpec, NormPlacement, Position, QkNorm

_LANES, _FLOAT = 16, 4  # outputs of a panel, to which biases are filled up; bytes of a bias or norm weight
_CODE_INPUTS = 32  # inputs of a block of int8
# Of blocks that are packed in another size than they have in a file: small integers of 6 bits become bytes.
_PACKED_BYTES = {MatrixKind.Q3_K: 114, MatrixKind.Q4_K: 148, MatrixKind.Q5_K: 180, MatrixKind.IQ4_XS: 138}
# Of an activation as products read it; of 32 levels there are the low and the high bytes, and sums.
_OPERAND_BYTES = {"levels": 128 / 32, "pairs": 2, "floats": _FLOAT}

BlockTypeOf = Callable[[str, Range | None], BlockType | None]
OutliersOf = Callable[[str, Range | None, Range | None], int]
_OUTLIER, _START = 5, 4  # bytes of an outlier, and of where those of a pair of panels begin


def matrix_bytes(kind: MatrixKind, num_outputs: int, num_inputs: int, num_parts: int = 1) -> int:
    """Bytes a matrix takes in the engine, biases left out."""
    panels = -(-num_outputs // _LANES) * num_parts
    outputs = (panels + panels % 2) * _LANES  # panels lie in pairs
    return outputs * output_bytes(kind, num_inputs)


def outlier_bytes(count: int, num_outputs: int, num_parts: int = 1) -> int:
    """Bytes that so many outliers of a matrix take in the engine."""
    panels = -(-num_outputs // _LANES) * num_parts
    return count * _OUTLIER + (-(-panels // 2) + 1) * _START if count else 0


def output_bytes(kind: MatrixKind, num_inputs: int) -> int:
    """Bytes that one output of a matrix takes in the engine."""
    if kind in _PACKED_BYTES:
        return num_inputs // BlockType[kind.name].num_inputs * _PACKED_BYTES[kind]
    if kind.has_blocks:
        return BlockType[kind.name].row_bytes(num_inputs)
    if kind is MatrixKind.INT8:
        return -(-num_inputs // _CODE_INPUTS) * _CODE_INPUTS + 4  # and a scale
    if kind is MatrixKind.BFLOAT16:
        num_inputs += num_inputs % 2  # pairs lie together
    return num_inputs * (4 if kind is MatrixKind.FLOAT32 else 2)


def kind_of(tier: Tier, layers: Iterable[str], columns: Range | None, block_type: BlockTypeOf) -> MatrixKind:
    """How a matrix of these layers is kept: as in the GGUF where all have the same type and no block is cut."""
    if tier is not Tier.GGUF:
        return tier.kind
    types = {block_type(layer, columns) for layer in layers}
    return (MatrixKind.of_blocks(types.pop()) if len(types) == 1 else None) or tier.kind


def runs_of_one_kind(tier: Tier, parts: Iterable[Part], block_type: BlockTypeOf) -> list[list[Part]]:
    """Layers side by side, cut where the kind changes: each run is a matrix."""
    return [list(run) for _, run in groupby(parts, lambda part: kind_of(tier, [part[0]], None, block_type))]


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One matrix of a rank: the layers it is made of, `num_parts` times so many outputs, and the inputs it has."""

    layers: tuple[str, ...]
    num_outputs: int
    num_inputs: int
    columns: Range | None = None  # of the layers' inputs
    num_parts: int = 1
    has_bias: bool = False
    rows: tuple[Range, ...] = ()  # of each layer's outputs, where not all
    kind: MatrixKind | None = None  # where neither tier nor blocks decide
    count: int = 1  # of such matrices

    def num_outliers(self, outliers: OutliersOf) -> int:
        """Those of the layers' parts that it is made of."""
        rows = self.rows or (None,) * len(self.layers)
        return sum(outliers(layer, part, self.columns) for layer, part in zip(self.layers, rows, strict=True))


def weight_bytes(
    spec: ModelSpec,
    parallel: TensorParallel,
    tier: Tier,
    block_type: BlockTypeOf,
    outliers: OutliersOf = lambda layer, rows, columns: 0,
) -> int:
    """Bytes of this rank's weights in `tier`, as `Program.held_bytes` will count them.

    `block_type` says how a layer is stored, as `Weights.block_type` does, and `outliers` how many outliers there are
    beside blocks, as `Weights.num_outliers` does; they matter for `Tier.GGUF` only.
    """
    total = sum(_vectors(spec, parallel)) * _FLOAT
    for matrix in _matrices(spec, parallel, tier, block_type):
        kind = matrix.kind
        if kind is None:
            kind = kind_of(tier, matrix.layers, matrix.columns, block_type)
        total += matrix.count * matrix_bytes(kind, matrix.num_outputs, matrix.num_inputs, matrix.num_parts)
        if kind.has_blocks:
            total += outlier_bytes(matrix.num_outliers(outliers), matrix.num_outputs, matrix.num_parts)
        if matrix.has_bias:
            total += -(-matrix.num_outputs // _LANES) * matrix.num_parts * _LANES * _FLOAT
    return total


def step_bytes(
    spec: ModelSpec,
    parallel: TensorParallel,
    tier: Tier,
    *,
    num_tokens: int,
    num_logits: int,
    has_outliers: bool = False,
) -> int:
    """Bytes that a step takes beside weights and pool: what the engine keeps for the next, and the step's own tensors.

    With outliers of weights there are floats beside levels. Left out is what depends on contexts, some kilobytes for
    each row that computes one token.
    """
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
    start, end = parallel.split(spec.intermediate_size if has_plain_mlp(spec) else 0)
    units = end - start
    widths: list[float]
    operand_bytes = _OPERAND_BYTES[tier.kind.operand] + (_FLOAT if has_outliers else 0)
    if spec.latent is None:
        attended, query_rank = heads.num_heads * spec.head_dim, 0
        widths = [attended + 2 * heads.num_kv_heads * spec.head_dim]
    else:
        attended, query_rank = heads.num_heads * spec.latent.value_dim, spec.latent.query_rank or 0
        # Queries, and in the space of latents they and what they attend to; what these products read.
        widths = [heads.num_heads * (spec.head_dim + spec.cached_dim + spec.latent.rank), query_rank, spec.cached_dim]
        each = max(spec.head_dim - (spec.rotary.dims or 0), spec.latent.rank)
        widths.append(heads.num_heads * each * operand_bytes / _FLOAT)
    widths += [attended, units, spec.hidden_size, _mixture_width(spec, parallel, operand_bytes)]
    turns = {spec.rotary_of(i) for i in spec.held_layers} - {None}
    widths += [turn.dims or spec.head_dim for turn in turns if turn is not None]  # a cosine and a sine for each pair
    widths += [spec.hidden_size] if has_partial(spec, parallel) else []
    widest = max(spec.hidden_size, units, attended, query_rank)
    start, end = parallel.split(spec.vocab_size)
    logits = end - start
    if parallel.size > 1 and parallel.rank == 0:
        logits += spec.vocab_size  # of all ranks together
    operand = max(num_tokens, num_logits) * widest * operand_bytes
    return round(num_tokens * sum(widths) * _FLOAT + operand) + num_logits * logits * _FLOAT


def _mixture_width(spec: ModelSpec, parallel: TensorParallel, operand_bytes: float) -> float:
    """Elements that a token takes in a mixture of experts: what it reads, its scores, units and results."""
    experts = spec.experts
    if experts is None:
        return 0
    start, end = parallel.split(experts.intermediate_size)
    first, last = parallel.split(experts.shared_size)
    num_passed = experts.num_chosen + (experts.shared_size > 0)
    width = experts.intermediate_size if parallel.spreads_experts else end - start  # all of a token's may be here
    units = experts.num_chosen * width + last - first
    operand = max(num_passed * spec.hidden_size, units) * operand_bytes / _FLOAT
    return spec.hidden_size * (1 + num_passed) + 4 * experts.num_experts + units + operand


def has_plain_mlp(spec: ModelSpec) -> bool:
    """Whether some layer has one MLP, not a mixture of experts."""
    return any(spec.experts_of(index) is None for index in spec.held_layers)


def has_partial(spec: ModelSpec, parallel: TensorParallel) -> bool:
    """Whether what a block adds to the residual is held apart from it for a while: to be summed or normalised."""
    is_normed = spec.norm_placement in (NormPlacement.POST, NormPlacement.BOTH)
    return parallel.size > 1 or is_normed or spec.qk_norm is QkNorm.WHOLE


def _matrices(spec: ModelSpec, parallel: TensorParallel, tier: Tier, block_type: BlockTypeOf) -> Iterator[_Matrix]:
    names, prefix = spec.names, spec.names.prefix
    start, end = parallel.split(spec.vocab_size)
    if spec.holds_table:
        has_bias, rows = spec.has_head_bias and spec.is_tied, ((start, end),)
        yield _Matrix((prefix + names.embedding,), end - start, spec.hidden_size, has_bias=has_bias, rows=rows)
    if spec.is_last and not spec.is_tied:
        rows = ((start, end),)
        yield _Matrix((names.head,), end - start, spec.hidden_size, has_bias=spec.has_head_bias, rows=rows)
    for index in spec.held_layers:

        def name(template: str, index: int = index) -> str:
            return prefix + template.format(i=index, j="{j}")

        yield from _attention(spec, parallel, tier, block_type, name)
        experts = spec.experts_of(index)
        if experts is None:
            runs = runs_of_one_kind(tier, mlp_parts(spec, parallel.split(spec.intermediate_size), name), block_type)
            yield from _mlp(spec, parallel, name, runs)
        else:
            yield from _mixture(spec, experts, parallel, name)


def _attention(
    spec: ModelSpec, parallel: TensorParallel, tier: Tier, block_type: BlockTypeOf, name: Callable[[str], str]
) -> Iterator[_Matrix]:
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
    names, latent, dim = spec.names, spec.latent, spec.head_dim
    value_dim = dim if latent is None else latent.value_dim
    if latent is None:
        for run in runs_of_one_kind(tier, qkv_parts(spec, heads, name), block_type):
            yield _columns(run, spec.hidden_size, has_bias=spec.has_qkv_bias)
    else:
        num_inputs, still = latent.query_rank or spec.hidden_size, dim - (spec.rotary.dims or 0)
        source = names.q if latent.query_rank is None else names.q_up
        rows = ((heads.q_start * dim, heads.q_end * dim),)
        yield _Matrix((name(source),), heads.num_heads * dim, num_inputs, rows=rows)
        if latent.query_rank is not None:
            yield _Matrix((name(names.q_down),), latent.query_rank, spec.hidden_size, has_bias=spec.has_qkv_bias)
        yield _Matrix((name(names.kv_down),), spec.cached_dim, spec.hidden_size, has_bias=spec.has_qkv_bias)
        yield _Matrix((), latent.rank, still, count=heads.num_heads)
        yield _Matrix((), latent.value_dim, latent.rank, count=heads.num_heads)
    columns, has_bias = (heads.q_start * value_dim, heads.q_end * value_dim), spec.has_out_bias and parallel.rank == 0
    yield _Matrix((name(names.out),), spec.hidden_size, heads.num_heads * value_dim, columns, has_bias=has_bias)


def _columns(run: list[Part], num_inputs: int, *, has_bias: bool) -> _Matrix:
    num_outputs = sum(last - first for _, _, (first, last) in run)
    layers, rows = tuple(layer for layer, _, _ in run), tuple(rows for _, _, rows in run)
    return _Matrix(layers, num_outputs, num_inputs, has_bias=has_bias, rows=rows)


def _mlp(
    spec: ModelSpec, parallel: TensorParallel, name: Callable[[str], str], runs: Sequence[list[Part]] = ()
) -> Iterator[_Matrix]:
    """`runs`: gate and up by their kinds; they are one matrix where these do not differ."""
    mine = parallel.split(spec.intermediate_size)
    num_units = mine[1] - mine[0]
    if len(runs) > 1:
        yield from (_columns(run, spec.hidden_size, has_bias=spec.has_mlp_bias) for run in runs)
    else:
        parts = mlp_parts(spec, mine, name)
        up, rows = tuple(layer for layer, _, _ in parts), tuple(rows for _, _, rows in parts)
        yield _Matrix(up, num_units, spec.hidden_size, num_parts=len(up), has_bias=spec.has_mlp_bias, rows=rows)
    has_bias = spec.has_mlp_bias and parallel.rank == 0
    yield _Matrix((name(spec.names.down),), spec.hidden_size, num_units, mine, has_bias=has_bias)


def _mixture(
    spec: ModelSpec, experts: ExpertsSpec, parallel: TensorParallel, name: Callable[[str], str]
) -> Iterator[_Matrix]:
    has_share = bool(experts.shared_size and spec.names.shared_share)
    yield _Matrix((), experts.num_experts + has_share, spec.hidden_size, kind=MatrixKind.FLOAT32)
    alone = TensorParallel() if parallel.spreads_experts else parallel
    for expert in held_experts(parallel, experts.num_experts):

        def name_of(template: str, expert: int = expert) -> str:
            return name(template.partition("|")[0]).replace("{j}", str(expert))  # of alternatives the one by one

        yield from _mlp(any_expert_spec(spec, experts), alone, name_of)
    if experts.shared_size:
        yield from _mlp(shared_spec(spec, experts), parallel, name)


def _vectors(spec: ModelSpec, parallel: TensorParallel) -> Iterator[int]:
    """Values of norms, of a table of positions and of slopes; every rank has all but those of other ranks' heads."""
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
    placement = spec.norm_placement
    of_layer = 0  # norms of hidden states
    if placement in (NormPlacement.PRE, NormPlacement.BOTH):
        of_layer += 2 if spec.names.mlp_norm else 1
    if placement is not NormPlacement.PRE:
        of_layer += 2
    num_layers = len(spec.held_layers)
    num_norms = num_layers * of_layer
    num_norms += (spec.is_last and bool(spec.names.final_norm)) + (spec.is_first and bool(spec.names.embedding_norm))
    yield num_norms * (spec.has_norm_weight + spec.has_norm_bias) * spec.hidden_size
    if spec.qk_norm is not QkNorm.NONE:
        num_heads = 2 if spec.qk_norm is QkNorm.HEAD else heads.num_heads + heads.num_kv_heads
        yield num_layers * num_heads * (1 + spec.has_qk_norm_bias) * spec.head_dim
    if spec.latent is not None:
        size = spec.latent.rank + (spec.latent.query_rank or 0)
        yield num_layers * (spec.has_norm_weight + spec.has_norm_bias) * size
    if spec.experts is not None and spec.names.router_correction:
        yield sum(spec.experts_of(i) is not None for i in spec.held_layers) * spec.experts.num_experts
    if spec.is_first and spec.position in (Position.LEARNED, Position.SINUSOIDAL):
        yield spec.max_position_embeddings * spec.hidden_size
    if spec.position is Position.ALIBI:
        yield heads.num_heads
