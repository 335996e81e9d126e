"""Put the norms, positions and matrices of a checkpoint into an engine; what goes in is known by its index there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from funitel.model_server.adapters.sites import Site
from funitel.model_server.checkpoint.storage import Part, Range
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu.footprint import kind_of, matrix_bytes, outlier_bytes, runs_of_one_kind
from funitel.model_server.cpu.native import NativeEngine, NormRecord
from funitel.model_server.cpu.precision import MatrixKind, Tier
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.layers.linear import read_head_norm
from funitel.model_server.layers.rotary import Rotary, alibi_slopes, sinusoids
from funitel.model_server.quantized.outliers import Outliers
from funitel.model_server.spec.model_spec import ModelSpec, Norm, Position, QkNorm, RotarySpec

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
        rotaries = dict.fromkeys(spec.rotary_of(i) for i in spec.held_layers)
        self._turns: dict[RotarySpec | None, int] = {None: NONE}
        for each in rotaries:
            if each is not None:
                rotary = Rotary(each, spec.head_dim, weights.device)
                self._turns[each] = engine.add_turn(
                    rotary.frequencies, each.scaling.amplitude, is_interleaved=each.is_interleaved, axes=each.axes()
                )
        self.positions = self._positions()
        self.slopes = NONE
        if spec.position is Position.ALIBI:
            every = alibi_slopes(spec.num_heads, spec.alibi_bias_max) * spec.alibi_scale
            self.slopes = self._add(every[heads.q_start : heads.q_end])

    def turn(self, layer: int) -> int:
        """Index of the rotary positions of a layer, or `NONE`."""
        return self._turns[self._spec.rotary_of(layer)]

    def norm(self, name: str, num_elements: int | None = None, eps: float | None = None) -> int:
        """Index of the norm that the checkpoint calls so: of hidden states, or of so many elements with its own eps."""
        spec, size = self._spec, [num_elements or self._spec.hidden_size]
        weight = bias = NONE
        if spec.has_norm_weight:
            weight = self._add(self._weights.read(f"{name}.weight", size) + spec.norm_offset)
        if spec.has_norm_bias:
            bias = self._add(self._weights.read(f"{name}.bias", size))
        is_layer, eps = spec.norm is Norm.LAYER, spec.norm_eps if eps is None else eps
        return self._engine.add_norm(
            NormRecord(weight=weight, bias=bias, is_layer=is_layer, eps=spec.norm_eps if eps is None else eps)
        )

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

    def vector(self, name: str, num_elements: int) -> int:
        """Index of a tensor of one dimension."""
        return self._add(self._weights.read(name, [num_elements]))

    def _positions(self) -> int:
        spec, count = self._spec, self._spec.max_position_embeddings
        if not spec.is_first:
            return NONE
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


def _site(pieces: Sequence[_Piece]) -> Site:
    """A part of a matrix as adapters see it."""
    parts = tuple((piece.layer, piece.num_outputs, piece.rows or (0, piece.num_outputs)) for piece in pieces)
    return Site(parts, pieces[0].num_inputs, pieces[0].columns)


class Matrices:
    """Reads the layers of a checkpoint into an engine; what a method returns is the index of the matrix there.

    `held_bytes`, `sharded_bytes` and `total_sharded_bytes` are those of `Weights`, of what the engine keeps. `kinds`
    says how each matrix but routers is kept, by the names of its layers. `sites` are the parts of each matrix, by its
    index.
    """

    def __init__(
        self, spec: ModelSpec, weights: Weights, parallel: TensorParallel, tier: Tier, engine: NativeEngine
    ) -> None:
        self.held_bytes = 0
        self.sharded_bytes = 0
        self.total_sharded_bytes = 0
        self.kinds: dict[tuple[str, ...], MatrixKind] = {}
        self.sites: dict[int, tuple[Site, ...]] = {}
        self._kind_of: dict[int, MatrixKind] = {}  # by the index of the matrix
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

    def columns(
        self,
        parts: Sequence[Sequence[Part]],
        *,
        has_bias: bool,
        num_inputs: int | None = None,
        is_transposed: bool | None = None,
    ) -> int:
        """Layers split by output, on hidden states; parts, such as gate and up, have as many outputs each."""
        all_outputs = sum({layer: num_outputs for layer, num_outputs, _ in chain(*parts)}.values()) // len(parts)
        inputs = num_inputs or self._spec.hidden_size
        pieces = [[self._column(*each, inputs, has_bias=has_bias) for each in part] for part in parts]
        return self._add(pieces, all_outputs, is_transposed=is_transposed)

    def side_by_side(self, parts: Sequence[Part], *, has_bias: bool) -> list[tuple[int, int]]:
        """Layers on hidden states with outputs side by side: (matrix, its first output) for each kind among them."""
        found, first = [], 0
        for run in runs_of_one_kind(self._tier, parts, self._weights.block_type):
            found.append((self.columns([run], has_bias=has_bias), first))
            first += sum(end - start for _, _, (start, end) in run)
        return found

    def gate_and_up(self, parts: Sequence[Part], *, has_bias: bool) -> list[int]:
        """The matrix of both, of the one there is, or of either where their kinds differ."""
        runs = runs_of_one_kind(self._tier, parts, self._weights.block_type)
        if len(runs) == 1:
            return [self.columns([[part] for part in parts], has_bias=has_bias)]
        return [self.columns([run], has_bias=has_bias) for run in runs]

    def operand_of(self, index: int) -> str:
        """How a matrix reads activations, see `MatrixKind.operand`."""
        return self._kind_of[index].operand

    def whole(self, name: str, num_outputs: int, *, has_bias: bool) -> int:
        """A layer on hidden states that every rank has whole."""
        piece = self._column(name, num_outputs, None, self._spec.hidden_size, has_bias=has_bias)
        return self._add([[piece]], num_outputs, is_sharded=False)

    def router(self, layers: Sequence[tuple[str, int]]) -> int:
        """Layers (name, outputs) on hidden states, one after the other, in float32; every rank has them whole."""
        hidden_size, total = self._spec.hidden_size, sum(size for _, size in layers)
        read = [
            (self._weights.read_linear(name, size, hidden_size, dtype=torch.float32), None) for name, size in layers
        ]
        return self._take(MatrixKind.FLOAT32, total, hidden_size, [read], total_bytes=None)

    def per_head(self, name: str, heads: Sequence[torch.Tensor], all_heads: int) -> int:
        """A matrix [outputs, inputs] for each head, made of a layer of this name; they follow one another."""
        kind = self._tier.kind
        total = all_heads * matrix_bytes(kind, *heads[0].shape)
        num_outputs, num_inputs = heads[0].shape
        taken = [self._take(kind, num_outputs, num_inputs, [[(head, None)]], total_bytes=0) for head in heads]
        self.total_sharded_bytes += total
        self.kinds[name,] = kind
        return taken[0]

    def rows(
        self, name: str, num_inputs: int, columns: Range, *, has_bias: bool, is_transposed: bool | None = None
    ) -> int:
        """A layer that makes hidden states and is split by input; rank 0 adds the bias."""
        num_outputs = self._spec.hidden_size
        bias = self._weights.read(f"{name}.bias", [num_outputs]) if has_bias else None
        bias = bias if self._parallel.rank == 0 else None
        piece = _Piece(layer=name, num_outputs=num_outputs, num_inputs=num_inputs, columns=columns, bias=bias)
        return self._add([[piece]], num_outputs, is_transposed=is_transposed)

    def _column(self, name: str, num_outputs: int, rows: Range | None, num_inputs: int, *, has_bias: bool) -> _Piece:
        bias = self._weights.read(f"{name}.bias", [num_outputs], rows=rows) if has_bias else None
        return _Piece(layer=name, num_outputs=num_outputs, num_inputs=num_inputs, rows=rows, bias=bias)

    def _add(
        self,
        parts: list[list[_Piece]],
        all_outputs: int,
        *,
        is_transposed: bool | None = None,
        is_sharded: bool = True,
    ) -> int:
        """Pack a matrix; `all_outputs` are those of each part unsplit.

        `is_transposed`: how the checkpoint stores it, where that is not how the family stores its layers.
        """
        kind = self._kind([piece for part in parts for piece in part])
        if is_transposed is None:
            is_transposed = self._spec.names.is_transposed
        read = [[(self._read(piece, kind, is_transposed), piece.bias) for piece in part] for part in parts]
        num_outputs = sum(weight.shape[0] for weight, _ in read[0])
        first, last = parts[0][0].columns or (0, parts[0][0].num_inputs)
        total = matrix_bytes(kind, all_outputs, parts[0][0].num_inputs, len(parts)) if is_sharded else None
        index = self._take(kind, num_outputs, last - first, read, total_bytes=total)
        if kind.has_blocks:
            self._take_outliers(index, parts, all_outputs, is_sharded=is_sharded)
        self.sites[index] = tuple(map(_site, parts))
        return index

    def _take_outliers(self, index: int, parts: list[list[_Piece]], all_outputs: int, *, is_sharded: bool) -> None:
        """Read and count what is to be added to the blocks of a matrix, if there is something."""
        read = [list(map(self._outliers, part)) for part in parts]
        if not any(found is not None and found.count for part in read for found in part):
            return
        sizes = [[each.rows or (0, each.num_outputs) for each in part] for part in parts]
        taken = [
            [(last - first, found) for (first, last), found in zip(rows, part, strict=True)]
            for rows, part in zip(sizes, read, strict=True)
        ]
        num_bytes = self._engine.add_outliers(index, taken)
        self.held_bytes += num_bytes
        if is_sharded:
            count = sum(map(self._weights.num_outliers, dict.fromkeys(piece.layer for part in parts for piece in part)))
            self.sharded_bytes += num_bytes
            self.total_sharded_bytes += outlier_bytes(count, all_outputs, len(parts))

    def _take(
        self,
        kind: MatrixKind,
        num_outputs: int,
        num_inputs: int,
        parts: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor | None]]],
        *,
        total_bytes: int | None,
    ) -> int:
        """Pack what was read and count it; `total_bytes` are those of all ranks, None where each has it whole."""
        index, num_bytes = self._engine.add_matrix(kind, num_outputs, num_inputs, parts)
        self._kind_of[index] = kind
        self.held_bytes += num_bytes
        if total_bytes is not None:
            self.sharded_bytes += num_bytes
            self.total_sharded_bytes += total_bytes
        return index

    def _outliers(self, piece: _Piece) -> Outliers | None:
        source = self._weights.block_source(piece.layer)
        if source is None:
            return None
        return source.outliers(piece.rows or (0, piece.num_outputs), piece.columns or (0, piece.num_inputs))

    def _kind(self, pieces: list[_Piece]) -> MatrixKind:
        """How the matrix of these pieces is kept: as blocks where all have the same type and no block is cut."""
        layers = [piece.layer for piece in pieces]
        kind = kind_of(self._tier, layers, pieces[0].columns, self._weights.block_type)
        self.kinds[tuple(dict.fromkeys(piece.layer for piece in pieces))] = kind
        return kind

    def _read(self, piece: _Piece, kind: MatrixKind, is_transposed: bool) -> torch.Tensor:
        """Weights as `NativeEngine.add_matrix` takes them."""
        sizes = piece.layer, piece.num_outputs, piece.num_inputs
        if kind.has_blocks:
            return self._weights.read_blocks(*sizes, rows=piece.rows, columns=piece.columns)
        return self._weights.read_linear(*sizes, rows=piece.rows, columns=piece.columns, is_transposed=is_transposed)
