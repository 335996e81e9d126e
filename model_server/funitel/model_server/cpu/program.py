"""Compile a ModelSpec and its weights to an engine with matrices, vectors and a program: one flat list of operations.

Says the same as `decoder.Decoder`, operation by operation; that one stays the oracle.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from funitel.model_server.checkpoint.storage import Range
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu.footprint import matrix_bytes, weight_bytes
from funitel.model_server.cpu.native import Buffer, Code, Mode, NativeEngine, NativeOperation, NormRecord, Shape
from funitel.model_server.cpu.precision import MatrixKind, Tier
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.layers.linear import Part, mlp_parts, qkv_parts, read_head_norm
from funitel.model_server.layers.rotary import Rotary, alibi_slopes, sinusoids
from funitel.model_server.spec.model_spec import (
    Activation,
    ModelSpec,
    Norm,
    NormPlacement,
    Position,
    QkNorm,
    RotarySpec,
)

NONE = -1  # in place of an index


class Vectors:
    """Puts the norms and positions of a model into an engine; `held_bytes` is what the engine keeps of them.

    Attributes:
        positions: index of the table that is added to embeddings, or `NONE`.
        slopes: index of this rank's slopes of ALiBi, or `NONE`.
    """

    def __init__(self, spec: ModelSpec, weights: Weights, heads: HeadSplit, engine: NativeEngine) -> None:
        self.held_bytes = 0
        self._spec, self._weights, self._heads, self._engine = spec, weights, heads, engine
        rotaries = dict.fromkeys(spec.rotary_of(i) for i in range(spec.num_layers))
        self._turns: dict[RotarySpec | None, int] = {None: NONE}
        for each in rotaries:
            if each is not None:
                rotary = Rotary(each, spec.head_dim, weights.device)
                self._turns[each] = engine.add_turn(
                    rotary.frequencies, each.scaling.amplitude, is_interleaved=each.is_interleaved
                )
        self.positions = self._positions()
        self.slopes = NONE
        if spec.position is Position.ALIBI:
            every = alibi_slopes(spec.num_heads, spec.alibi_bias_max) * spec.alibi_scale
            self.slopes = self._add(every[heads.q_start : heads.q_end])

    def turn(self, layer: int) -> int:
        """Index of the rotary positions of a layer, or `NONE`."""
        return self._turns[self._spec.rotary_of(layer)]

    def norm(self, name: str) -> int:
        """Index of the norm of hidden states that the checkpoint calls so."""
        spec, size = self._spec, [self._spec.hidden_size]
        weight = bias = NONE
        if spec.has_norm_weight:
            weight = self._add(self._weights.read(f"{name}.weight", size) + spec.norm_offset)
        if spec.has_norm_bias:
            bias = self._add(self._weights.read(f"{name}.bias", size))
        is_layer = spec.norm is Norm.LAYER
        return self._engine.add_norm(NormRecord(weight=weight, bias=bias, is_layer=is_layer, eps=spec.norm_eps))

    def head_norms(self, name: Callable[[str], str]) -> tuple[int, int]:
        """Indices of a layer's norms of queries and of keys, or `NONE`; `name` is that of a template in the layer."""
        spec, heads = self._spec, self._heads
        if spec.qk_norm is QkNorm.NONE:
            return NONE, NONE
        queries, keys = (heads.q_start, heads.q_end), (heads.kv_start, heads.kv_end)
        return (
            self._head_norm(name(spec.names.q_norm), spec.num_heads, queries),
            self._head_norm(name(spec.names.k_norm), spec.num_kv_heads, keys),
        )

    def _head_norm(self, name: str, num_heads: int, mine: Range) -> int:
        spec, weights = self._spec, self._weights
        bias = NONE
        weight = self._add(read_head_norm(spec, weights, f"{name}.weight", num_heads, mine) + spec.norm_offset)
        if spec.has_qk_norm_bias:
            bias = self._add(read_head_norm(spec, weights, f"{name}.bias", num_heads, mine))
        record = NormRecord(
            weight=weight,
            bias=bias,
            is_layer=spec.norm is Norm.LAYER,
            head_stride=0 if spec.qk_norm is QkNorm.HEAD else spec.head_dim,
            whole_size=num_heads * spec.head_dim if spec.qk_norm is QkNorm.WHOLE else 0,
            eps=spec.norm_eps,
        )
        return self._engine.add_norm(record)

    def _positions(self) -> int:
        spec, count = self._spec, self._spec.max_position_embeddings
        if spec.position is Position.SINUSOIDAL:
            return self._add(sinusoids(torch.arange(count) + spec.position_offset, spec.hidden_size))
        if spec.position is not Position.LEARNED:
            return NONE
        name = f"{self._weights.prefix}{spec.names.positions}.weight"
        table = self._weights.read(name, [count + spec.position_offset, spec.hidden_size])
        return self._add(table[spec.position_offset :])

    def _add(self, values: torch.Tensor) -> int:
        self.held_bytes += values.numel() * values.element_size()
        return self._engine.add_vector(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Some outputs of a matrix: a layer's, or of them this rank's share: `rows` are outputs, `columns` inputs."""

    layer: str
    num_outputs: int
    num_inputs: int
    rows: Range | None = None
    columns: Range | None = None
    bias: torch.Tensor | None = None


class Matrices:
    """Reads the layers of a checkpoint into an engine; what a method returns is the index of the matrix there.

    `held_bytes`, `sharded_bytes` and `total_sharded_bytes` are those of `Weights`, of what the engine keeps. `kinds`
    says how each matrix is kept, by the names of its layers.
    """

    def __init__(
        self, spec: ModelSpec, weights: Weights, parallel: TensorParallel, tier: Tier, engine: NativeEngine
    ) -> None:
        self.held_bytes = 0
        self.sharded_bytes = 0
        self.total_sharded_bytes = 0
        self.kinds: dict[tuple[str, ...], MatrixKind] = {}
        self._spec, self._weights, self._parallel = spec, weights, parallel
        self._tier, self._engine = tier, engine

    def vocabulary(self, name: str, bias_name: str | None = None) -> int:
        """An embedding table, or the head."""
        spec = self._spec
        rows = self._parallel.split(spec.vocab_size)
        bias = None
        if bias_name is not None:
            bias = self._weights.read(f"{bias_name}.bias", [spec.vocab_size], rows=rows)
        piece = _Piece(layer=name, num_outputs=spec.vocab_size, num_inputs=spec.hidden_size, rows=rows, bias=bias)
        return self._add([[piece]], spec.vocab_size, is_transposed=False)

    def columns(self, parts: Sequence[Sequence[Part]], all_outputs: int, *, has_bias: bool) -> int:
        """Layers on hidden states that are split by output: one part after the other of `all_outputs` unsplit each."""
        return self._add([[self._column(*each, has_bias=has_bias) for each in part] for part in parts], all_outputs)

    def rows(self, name: str, num_inputs: int, columns: Range, *, has_bias: bool) -> int:
        """A layer that makes hidden states and is split by input; rank 0 adds the bias."""
        num_outputs = self._spec.hidden_size
        bias = self._weights.read(f"{name}.bias", [num_outputs]) if has_bias else None
        bias = bias if self._parallel.rank == 0 else None
        piece = _Piece(layer=name, num_outputs=num_outputs, num_inputs=num_inputs, columns=columns, bias=bias)
        return self._add([[piece]], num_outputs)

    def _column(self, name: str, num_outputs: int, rows: Range, *, has_bias: bool) -> _Piece:
        bias = self._weights.read(f"{name}.bias", [num_outputs], rows=rows) if has_bias else None
        return _Piece(layer=name, num_outputs=num_outputs, num_inputs=self._spec.hidden_size, rows=rows, bias=bias)

    def _add(self, parts: list[list[_Piece]], all_outputs: int, *, is_transposed: bool | None = None) -> int:
        """Pack a matrix that is split between ranks; `all_outputs` are those of each part unsplit.

        `is_transposed`: how the checkpoint stores it, where that is not how the family stores its layers.
        """
        kind = self._kind([piece for part in parts for piece in part])
        if is_transposed is None:
            is_transposed = self._spec.names.is_transposed
        read = [[(self._read(piece, kind, is_transposed), piece.bias) for piece in part] for part in parts]
        num_outputs = sum(weight.shape[0] for weight, _ in read[0])
        first, last = parts[0][0].columns or (0, parts[0][0].num_inputs)
        index, num_bytes = self._engine.add_matrix(kind, num_outputs, last - first, read)
        self.held_bytes += num_bytes
        self.sharded_bytes += num_bytes
        self.total_sharded_bytes += matrix_bytes(kind, all_outputs, parts[0][0].num_inputs, len(parts))
        return index

    def _kind(self, pieces: list[_Piece]) -> MatrixKind:
        """How the matrix of these pieces is kept: as blocks where all have the same type and no block is cut."""
        kind = self._tier.kind
        if self._tier is Tier.GGUF:
            types = {self._weights.block_type(piece.layer, piece.columns) for piece in pieces}
            found = types.pop() if len(types) == 1 else None
            kind = MatrixKind.of_blocks(found) or kind
        self.kinds[tuple(dict.fromkeys(piece.layer for piece in pieces))] = kind
        return kind

    def _read(self, piece: _Piece, kind: MatrixKind, is_transposed: bool) -> torch.Tensor:
        """Weights as `NativeEngine.add_matrix` takes them."""
        sizes = piece.layer, piece.num_outputs, piece.num_inputs
        if kind.has_blocks:
            return self._weights.read_blocks(*sizes, rows=piece.rows, columns=piece.columns)
        return self._weights.read_linear(*sizes, rows=piece.rows, columns=piece.columns, is_transposed=is_transposed)


_ACTIVATIONS = tuple(Activation)  # as numbered in C++


@dataclass(frozen=True, slots=True)
class _Frame:
    """The norms around a block, by their indices, or `NONE`."""

    before: int
    after: int


class Program:
    """This rank's share of a model as an engine's program. Takes every tensor of `weights` and refuses leftovers.

    `held_bytes`, `sharded_bytes` and `total_sharded_bytes` are those of `Weights`, of what the engine keeps. `kinds`
    says how each matrix is kept, by the names of its layers.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        parallel: TensorParallel,
        library: ctypes.CDLL,
        *,
        tier: Tier,
        block_size: int,
        num_threads: int,
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._parallel = parallel
        self._tier = tier
        self._heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
        self._units = parallel.split(spec.intermediate_size)
        self._operations: list[NativeOperation] = []
        self._starts: list[int] = []  # of each layer's operations, and where the last one's end
        self.engine = NativeEngine(library, self._shape(block_size, num_threads))
        self._matrices = Matrices(spec, weights, parallel, tier, self.engine)
        weights.takes_blocks = tier is Tier.GGUF
        # Before memory is taken by what config.json says: that may be of another model.
        weights.check(f"{weights.prefix}{spec.names.embedding}.weight", [spec.vocab_size, spec.hidden_size])
        self.engine.reserve(weight_bytes(spec, parallel, tier, weights.block_type))
        self._vectors = Vectors(spec, weights, self._heads, self.engine)
        self._compile()
        self.held_bytes = self._matrices.held_bytes + self._vectors.held_bytes
        self.sharded_bytes = self._matrices.sharded_bytes
        self.total_sharded_bytes = self._matrices.total_sharded_bytes
        self.kinds = self._matrices.kinds
        self._current = self._operations
        self.engine.set_program(self._current)

    def reduced_at(self, at: int) -> tuple[Buffer, int]:
        """What is to be summed over the ranks before the program goes on at operation `at`: so much of each row."""
        operation = self._current[at - 1]
        return Buffer(operation.a), operation.b

    def limit_to(self, layers: range | None) -> None:
        """Compute nothing but some layers from the next step on, without logits; None for the whole model."""
        self._current = self._operations
        if layers is not None:
            first, last = self._starts[layers.start], self._starts[layers.stop]
            self._current = self._operations[: self._starts[0]] + self._operations[first:last]
        self.engine.set_program(self._current)

    def _shape(self, block_size: int, num_threads: int) -> Shape:
        spec = self._spec
        return Shape(
            hidden_size=spec.hidden_size,
            head_dim=spec.head_dim,
            num_heads=self._heads.num_heads,
            num_kv_heads=self._heads.num_kv_heads,
            intermediate_size=self._units[1] - self._units[0],
            num_layers=spec.num_layers,
            block_size=block_size,
            has_half_kv=self._tier.has_half_kv,
            num_threads=num_threads,
        )

    def _compile(self) -> None:
        spec, weights, names = self._spec, self._weights, self._spec.names
        head_bias = names.head if spec.has_head_bias else None
        embedding = self._matrices.vocabulary(weights.prefix + names.embedding, head_bias if spec.is_tied else None)
        self._embed(embedding)
        for index in range(spec.num_layers):
            self._starts.append(len(self._operations))
            self._layer(index)
        self._starts.append(len(self._operations))
        final = self._vectors.norm(weights.prefix + names.final_norm) if names.final_norm else NONE
        head = embedding if spec.is_tied else self._matrices.vocabulary(names.head, head_bias)
        self._do(Code.SELECT)
        self._enter(final, head)
        self._do(Code.LINEAR, head, Mode.STORE, Buffer.LOGITS)
        if spec.logit_scale != 1.0 or spec.logit_softcap is not None:
            self._do(Code.CAP, scale=spec.logit_scale, cap=spec.logit_softcap or 0.0)
        tied = (rf"^{names.head}\.weight$",) if spec.is_tied else ()
        weights.finish(names.ignored + tied)

    def _do(
        self, code: Code, a: int = 0, b: int = 0, c: int = 0, d: int = 0, *, scale: float = 1.0, cap: float = 0.0
    ) -> None:
        self._operations.append(NativeOperation(code, a, b, c, d, scale, cap))

    def _embed(self, table: int) -> None:
        spec = self._spec
        self._do(Code.EMBED, table, self._parallel.split(spec.vocab_size)[0], scale=spec.embedding_scale)
        self._reduce(Buffer.X, spec.hidden_size)
        if spec.names.embedding_norm:
            norm = self._vectors.norm(self._weights.prefix + spec.names.embedding_norm)
            self._do(Code.NORMALISE, norm, Buffer.X)
        if self._vectors.positions != NONE:
            self._do(Code.POSITIONS, self._vectors.positions)

    def _reduce(self, buffer: Buffer, width: int) -> None:
        """Sum so much of each row of a buffer over the ranks."""
        if self._parallel.size > 1:
            self._do(Code.REDUCE, buffer, width)

    def _layer(self, index: int) -> None:
        spec, names = self._spec, self._spec.names

        def name(template: str) -> str:
            return self._weights.prefix + template.format(i=index, j="{j}")

        attention = self._frame(names.attention_norm, names.attention_post_norm, name)
        if not spec.is_parallel:
            attended = self._attention(index, attention.before, name)
            self._leave([(Buffer.ATTENDED, attended)], attention.after)
        mlp = self._frame(names.mlp_norm, names.mlp_post_norm, name)
        before = attention.before if spec.is_parallel and mlp.before == NONE else mlp.before
        products = [(Buffer.HIDDEN, self._mlp(before, name))]
        if spec.is_parallel:  # the hidden units wait in their buffer while attention reads the same residual
            products.append((Buffer.ATTENDED, self._attention(index, attention.before, name)))
        self._leave(products, mlp.after)

    def _frame(self, before: str, after: str, name: Callable[[str], str]) -> _Frame:
        placement = self._spec.norm_placement
        has_before = placement in (NormPlacement.PRE, NormPlacement.BOTH) and before
        return _Frame(
            self._vectors.norm(name(before)) if has_before else NONE,
            self._vectors.norm(name(after)) if placement is not NormPlacement.PRE else NONE,
        )

    def _enter(self, norm: int, matrix: int) -> None:
        """Make the residual the operand of a matrix, normalised where there is a norm."""
        if norm == NONE:
            self._do(Code.PREPARE, Buffer.X, 0, matrix)
        else:
            self._do(Code.NORM, norm, 0, matrix)

    def _attention(self, index: int, norm: int, name: Callable[[str], str]) -> int:
        """Attend; the matrix that takes heads back is still to be multiplied by."""
        spec, heads, dim = self._spec, self._heads, self._spec.head_dim
        parts = qkv_parts(spec, heads, name)
        num_outputs = (spec.num_heads + 2 * spec.num_kv_heads) * dim
        qkv = self._matrices.columns([parts], num_outputs, has_bias=spec.has_qkv_bias)
        norms = self._vectors.head_norms(name)
        columns = heads.q_start * dim, heads.q_end * dim
        out = self._matrices.rows(name(spec.names.out), spec.num_heads * dim, columns, has_bias=spec.has_out_bias)
        self._enter(norm, qkv)
        self._do(Code.LINEAR, qkv, Mode.STORE, Buffer.QKV)
        if spec.qkv_clip is not None:
            self._do(Code.CLIP, cap=spec.qkv_clip)
        if spec.qk_norm is QkNorm.WHOLE:
            parallel = self._parallel
            holders = HeadSplit.num_holders(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
            self._do(Code.SQUARES, scale=1 / holders)
            self._reduce(Buffer.PARTIAL, 2)
        scale = spec.score_scale / (index + 1) if spec.is_scaled_by_layer else spec.score_scale
        self._do(Code.ROTATE, index, *norms, self._vectors.turn(index), scale=scale)
        window, cap = spec.window(index) or 0, spec.attention_softcap or 0.0
        self._do(Code.ATTEND, index, window, self._vectors.slopes, cap=cap)
        return out

    def _mlp(self, norm: int, name: Callable[[str], str]) -> int:
        """Compute hidden units; the matrix that takes them back is still to be multiplied by."""
        spec, units = self._spec, self._spec.intermediate_size
        parts = [[part] for part in mlp_parts(spec, self._units, name)]
        up = self._matrices.columns(parts, units, has_bias=spec.has_mlp_bias)
        down = self._matrices.rows(name(spec.names.down), units, self._units, has_bias=spec.has_mlp_bias)
        mode = Mode.GATE if spec.is_gated else Mode.ACTIVATE
        self._enter(norm, up)
        self._do(Code.LINEAR, up, mode, Buffer.HIDDEN, _ACTIVATIONS.index(spec.activation))
        return down

    def _leave(self, products: Sequence[tuple[Buffer, int]], after: int) -> None:
        """Add the products of buffers and matrices split by input to the residual: one sum over the ranks for all."""
        scale, is_last = self._spec.residual_scale, self._spec.norm_placement is NormPlacement.AFTER
        is_direct = self._parallel.size == 1 and (after == NONE or is_last)
        target, mode = (Buffer.X, Mode.ACCUMULATE) if is_direct else (Buffer.PARTIAL, Mode.STORE)
        for source, matrix in products:
            self._do(Code.PREPARE, source, 0, matrix)
            self._do(Code.LINEAR, matrix, mode, target, scale=scale if is_direct else 1.0)
            mode = Mode.ACCUMULATE
        if not is_direct:
            self._reduce(Buffer.PARTIAL, self._spec.hidden_size)
            if after != NONE and not is_last:
                self._do(Code.NORMALISE, after, Buffer.PARTIAL)
            self._do(Code.ADD, scale=scale)
        if after != NONE and is_last:
            self._do(Code.NORMALISE, after, Buffer.X)
