"""A ModelSpec and its weights -> an engine loaded with matrices and a program: one flat list of operations.

Says the same as `decoder.Decoder`, operation by operation; that one stays the oracle.
"""

import ctypes
from dataclasses import dataclass

import torch

from funitel.model_server.cpu.footprint import matrix_bytes, weight_bytes
from funitel.model_server.cpu.native import Buffer, Code, Engine, Mode, Shape
from funitel.model_server.cpu.tiers import Kind, Tier
from funitel.model_server.layers import mlp_parts, qkv_parts
from funitel.model_server.parallel import HeadSplit, TensorParallel
from funitel.model_server.positions import Rotary
from funitel.model_server.spec import Activation, ModelSpec, Norm, Position, QkNorm
from funitel.model_server.storage import Range
from funitel.model_server.weights import Weights

ACTIVATIONS = (Activation.SILU, Activation.GELU, Activation.GELU_TANH, Activation.RELU)  # as numbered in C++


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some outputs of a matrix: a layer's, or of them this rank's share: `rows` are outputs, `columns` inputs."""

    layer: str
    num_outputs: int
    num_inputs: int
    rows: Range | None = None
    columns: Range | None = None
    bias: torch.Tensor | None = None


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
        self.held_bytes = 0
        self.sharded_bytes = 0
        self.total_sharded_bytes = 0
        self.kinds: dict[tuple[str, ...], Kind] = {}
        self._spec = spec
        self._weights = weights
        self._parallel = parallel
        self._tier = tier
        self._heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
        self._units = parallel.split(spec.intermediate_size)
        self._operations: list[tuple[int, ...]] = []
        self._starts: list[int] = []  # of each layer's operations, and where the last one's end
        self.engine = Engine(library, self._shape(block_size, num_threads))
        weights.takes_blocks = tier is Tier.GGUF
        # Before memory is taken by what config.json says: that may be of another model.
        weights.check(f"{weights.prefix}{spec.names.embedding}.weight", [spec.vocab_size, spec.hidden_size])
        self.engine.reserve(weight_bytes(spec, parallel, tier, weights.block_type))
        self._compile()
        self._current = self._operations
        self.engine.set_program(self._current)

    def reduced_at(self, at: int) -> Buffer:
        """The buffer to be summed over the ranks before the program goes on at operation `at`."""
        return Buffer(self._current[at - 1][1])

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
            has_layer_norm=spec.norm is Norm.LAYER,
            num_threads=num_threads,
            norm_eps=spec.norm_eps,
        )

    def _compile(self) -> None:
        spec, weights, names = self._spec, self._weights, self._spec.names
        embedding = self._embedding(weights.prefix + names.embedding)
        if spec.position is Position.LEARNED:
            shape = [spec.max_position_embeddings, spec.hidden_size]
            table = self._vector(f"{weights.prefix}{names.positions}.weight", shape)
            self._operations.append((Code.POSITIONS, table))
        else:
            self.engine.set_frequencies(Rotary(spec.rotary, spec.head_dim, weights.device).frequencies)
        for index in range(spec.num_layers):
            self._starts.append(len(self._operations))
            self._attention(index)
            self._mlp(index)
        self._starts.append(len(self._operations))
        final = self._norm(weights.prefix + names.final_norm)
        head = embedding if spec.is_tied else self._vocabulary(names.head)
        self._operations += [
            (Code.SELECT,),
            (Code.NORM, *final, head),
            (Code.LINEAR, head, Mode.STORE, Buffer.LOGITS),
        ]
        tied = (rf"^{names.head}\.weight$",) if spec.is_tied else ()
        weights.finish(names.ignored + tied)

    def _embedding(self, name: str) -> int:
        table = self._vocabulary(name)
        self._operations.append((Code.EMBED, table, self._parallel.split(self._spec.vocab_size)[0]))
        if self._parallel.size > 1:
            self._operations.append((Code.REDUCE, Buffer.X))
        return table

    def _vocabulary(self, name: str) -> int:
        spec = self._spec
        rows = self._parallel.split(spec.vocab_size)
        piece = Piece(layer=name, num_outputs=spec.vocab_size, num_inputs=spec.hidden_size, rows=rows)
        return self._matrix([[piece]], spec.vocab_size, is_transposed=False)

    def _attention(self, index: int) -> None:
        spec, heads, dim = self._spec, self._heads, self._spec.head_dim

        def name(template: str) -> str:
            return self._weights.prefix + template.format(i=index)

        norm = self._norm(name(spec.names.attention_norm))
        parts = qkv_parts(spec, heads, name)
        pieces = [self._columns(*part, spec.hidden_size, has_bias=spec.has_qkv_bias) for part in parts]
        qkv = self._matrix([pieces], (spec.num_heads + 2 * spec.num_kv_heads) * dim)
        norms = [-1, -1]
        if spec.qk_norm is QkNorm.HEAD:
            norms = [self._norm(name(template), dim)[0] for template in (spec.names.q_norm, spec.names.k_norm)]
        columns = heads.q_start * dim, heads.q_end * dim
        out = self._rows(name(spec.names.out), spec.num_heads * dim, columns, has_bias=spec.has_out_bias)
        self._operations += [
            (Code.NORM, *norm, qkv),
            (Code.LINEAR, qkv, Mode.STORE, Buffer.QKV),
            (Code.ROTATE, index, *norms),
            (Code.ATTEND, index, spec.window(index) or 0),
        ]
        self._add_product(Buffer.ATTENDED, out)

    def _mlp(self, index: int) -> None:
        spec = self._spec

        def name(template: str) -> str:
            return self._weights.prefix + template.format(i=index)

        norm = self._norm(name(spec.names.mlp_norm))
        units = spec.intermediate_size
        parts = [
            [self._columns(*part, spec.hidden_size, has_bias=spec.has_mlp_bias)]
            for part in mlp_parts(spec, self._units, name)
        ]
        up = self._matrix(parts, units)
        down = self._rows(name(spec.names.down), units, self._units, has_bias=spec.has_mlp_bias)
        mode = Mode.GATE if spec.is_gated else Mode.ACTIVATE
        self._operations += [
            (Code.NORM, *norm, up),
            (Code.LINEAR, up, mode, Buffer.HIDDEN, ACTIVATIONS.index(spec.activation)),
        ]
        self._add_product(Buffer.HIDDEN, down)

    def _add_product(self, source: Buffer, matrix: int) -> None:
        """Add the product of a buffer and a matrix split by input to the residual, summed over the ranks."""
        self._operations.append((Code.PREPARE, source, 0, matrix))
        if self._parallel.size == 1:
            self._operations.append((Code.LINEAR, matrix, Mode.ACCUMULATE, Buffer.X))
            return
        self._operations += [
            (Code.LINEAR, matrix, Mode.STORE, Buffer.PARTIAL),
            (Code.REDUCE, Buffer.PARTIAL),
            (Code.ADD,),
        ]

    def _columns(self, name: str, num_outputs: int, rows: Range, num_inputs: int, *, has_bias: bool) -> Piece:
        """This rank's outputs of a layer split by output."""
        bias = self._weights.read(f"{name}.bias", [num_outputs], rows=rows) if has_bias else None
        return Piece(layer=name, num_outputs=num_outputs, num_inputs=num_inputs, rows=rows, bias=bias)

    def _rows(self, name: str, num_inputs: int, columns: Range, *, has_bias: bool) -> int:
        """This rank's inputs of a layer split by input, packed; rank 0 adds the bias."""
        num_outputs = self._spec.hidden_size
        bias = self._weights.read(f"{name}.bias", [num_outputs]) if has_bias else None
        bias = bias if self._parallel.rank == 0 else None
        piece = Piece(layer=name, num_outputs=num_outputs, num_inputs=num_inputs, columns=columns, bias=bias)
        return self._matrix([[piece]], num_outputs)

    def _matrix(self, parts: list[list[Piece]], all_outputs: int, *, is_transposed: bool | None = None) -> int:
        """Pack a matrix that is split between ranks; `all_outputs` are those of each part unsplit.

        `is_transposed`: how the checkpoint stores it, where that is not how the family stores its layers.
        """
        kind = self._kind([piece for part in parts for piece in part])
        if is_transposed is None:
            is_transposed = self._spec.names.is_transposed
        read = [[(self._read(piece, kind, is_transposed), piece.bias) for piece in part] for part in parts]
        num_outputs = sum(weight.shape[0] for weight, _ in read[0])
        first, last = parts[0][0].columns or (0, parts[0][0].num_inputs)
        index, num_bytes = self.engine.add_matrix(kind, num_outputs, last - first, read)
        self.held_bytes += num_bytes
        self.sharded_bytes += num_bytes
        self.total_sharded_bytes += matrix_bytes(kind, all_outputs, parts[0][0].num_inputs, len(parts))
        return index

    def _kind(self, pieces: list[Piece]) -> Kind:
        """How the matrix of these pieces is kept: as blocks where all have the same type and no block is cut."""
        kind = self._tier.kind
        if self._tier is Tier.GGUF:
            types = {self._weights.block_type(piece.layer, piece.columns) for piece in pieces}
            found = types.pop() if len(types) == 1 else None
            kind = kind if found is None else Kind[found.name]
        self.kinds[tuple(dict.fromkeys(piece.layer for piece in pieces))] = kind
        return kind

    def _read(self, piece: Piece, kind: Kind, is_transposed: bool) -> torch.Tensor:
        """Weights as `Engine.add_matrix` takes them."""
        sizes = piece.layer, piece.num_outputs, piece.num_inputs
        if kind.has_blocks:
            return self._weights.read_blocks(*sizes, rows=piece.rows, columns=piece.columns)
        return self._weights.read_linear(*sizes, rows=piece.rows, columns=piece.columns, is_transposed=is_transposed)

    def _norm(self, name: str, size: int | None = None) -> tuple[int, int]:
        """Indices of weight and bias, -1 for none."""
        shape = [size or self._spec.hidden_size]
        weight = self._vector(f"{name}.weight", shape)
        return weight, self._vector(f"{name}.bias", shape) if self._spec.norm is Norm.LAYER else -1

    def _vector(self, name: str, shape: list[int]) -> int:
        values = self._weights.read(name, shape)
        self.held_bytes += values.numel() * values.element_size()
        return self.engine.add_vector(values)
