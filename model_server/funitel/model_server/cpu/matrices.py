"""Pack this rank's share of a model's matrices into an engine, in the kinds of a precision tier."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from funitel.model_server.checkpoint.storage import Range
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu.footprint import matrix_bytes
from funitel.model_server.cpu.native import NativeEngine
from funitel.model_server.cpu.precision import MatrixKind, Tier
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.layers.linear import Part
from funitel.model_server.spec.model_spec import ModelSpec


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
            kind = kind if found is None else MatrixKind[found.name]
        self.kinds[tuple(dict.fromkeys(piece.layer for piece in pieces))] = kind
        return kind

    def _read(self, piece: _Piece, kind: MatrixKind, is_transposed: bool) -> torch.Tensor:
        """Weights as `NativeEngine.add_matrix` takes them."""
        sizes = piece.layer, piece.num_outputs, piece.num_inputs
        if kind.has_blocks:
            return self._weights.read_blocks(*sizes, rows=piece.rows, columns=piece.columns)
        return self._weights.read_linear(*sizes, rows=piece.rows, columns=piece.columns, is_transposed=is_transposed)
