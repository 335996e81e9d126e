"""Compile the blocks of a layer: attention over heads or latents, an MLP or a mixture of experts.

A block is compiled in two halves: the operations up to its last product, and a function that compiles that product,
which adds to the residual or to what is summed over the ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu.native import Buffer, Code, MixtureRecord, Mode, NativeEngine, NativeOperation
from funitel.model_server.cpu.tensors import NONE, Matrices, Vectors
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.layers.linear import mlp_parts, qkv_parts
from funitel.model_server.layers.mlp import expert_spec, held_experts, shared_spec
from funitel.model_server.spec.model_spec import Activation, ExpertScore, ExpertsSpec, LatentSpec, ModelSpec, QkNorm

_ACTIVATIONS = tuple(Activation)  # as numbered in C++
# Fields that a mixture's spec and record have alike.
_ALIKE = ("num_experts", "num_chosen", "num_groups", "num_chosen_groups", "group_depth", "is_normalized", "scale")

Name = Callable[[str], str]  # of a template of `TensorNames` in the layer
Leave = Callable[[Buffer, Mode, float], None]
"""Compile the last product: where it goes, `STORE` or `ACCUMULATE`, and the scale of what is accumulated."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """What the blocks of one rank are compiled of and to."""

    spec: ModelSpec
    weights: Weights
    parallel: TensorParallel
    heads: HeadSplit
    engine: NativeEngine
    matrices: Matrices
    vectors: Vectors
    operations: list[NativeOperation]

    def do(
        self,
        code: Code,
        a: int = 0,
        b: int = 0,
        c: int = 0,
        d: int = 0,
        *,
        column: int = 0,
        scale: float = 1.0,
        cap: float = 0.0,
    ) -> None:
        """Add an operation."""
        self.operations.append(NativeOperation(code, a, b, c, d, column, scale, cap))

    def reduce(self, buffer: Buffer, width: int) -> None:
        """Sum so much of each row of a buffer over the ranks."""
        if self.parallel.size > 1:
            self.do(Code.REDUCE, buffer, width)

    def enter(self, norm: int, matrix: int) -> None:
        """Make the residual the operand of a matrix, normalised where there is a norm."""
        if norm == NONE:
            self.do(Code.PREPARE, Buffer.X, 0, matrix)
        else:
            self.do(Code.NORM, norm, 0, matrix)

    def attention(self, index: int, norm: int, name: Name) -> Leave:
        """Attend to the tokens of a layer, from hidden states behind a norm."""
        if self.spec.latent is not None:
            return self._latent_attention(self.spec.latent, index, norm, name)
        spec, heads, dim = self.spec, self.heads, self.spec.head_dim
        parts = qkv_parts(spec, heads, name)
        qkv = self.matrices.side_by_side(parts, has_bias=spec.has_qkv_bias)
        norms = self.vectors.head_norms(name)
        out = self._heads_out(name, dim)
        operand = None
        for matrix, first in qkv:
            if operand != (operand := self.matrices.operand_of(matrix)):
                self.enter(norm, matrix)
            self.do(Code.LINEAR, matrix, Mode.STORE, Buffer.QKV, column=first)
        if spec.qkv_clip is not None:
            self.do(Code.CLIP, cap=spec.qkv_clip)
        if spec.qk_norm is QkNorm.WHOLE:
            parallel = self.parallel
            holders = HeadSplit.num_holders(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
            self.do(Code.SQUARES, scale=1 / holders)
            self.reduce(Buffer.PARTIAL, 2)
        place = index - spec.held_layers.start  # in the pool
        self.do(Code.ROTATE, place, *norms, self.vectors.turn(index), scale=self._score_scale(index))
        window, cap = spec.window(index) or 0, spec.attention_softcap or 0.0
        self.do(Code.ATTEND, place, window, self.vectors.slopes, spec.sees_spans(index), cap=cap)
        return self._product(Buffer.ATTENDED, out)

    def _score_scale(self, index: int) -> float:
        scale = self.spec.score_scale
        return scale / (index + 1) if self.spec.is_scaled_by_layer else scale

    def _heads_out(self, name: Name, dim: int) -> int:
        """The matrix that takes heads, of so many elements each, back to hidden states."""
        spec, heads = self.spec, self.heads
        columns = heads.q_start * dim, heads.q_end * dim
        return self.matrices.rows(name(spec.names.out), spec.num_heads * dim, columns, has_bias=spec.has_out_bias)

    def _latent_attention(self, latent: LatentSpec, index: int, norm: int, name: Name) -> Leave:
        spec, names = self.spec, self.spec.names
        self._latent_queries(latent, norm, name)
        kv = self.matrices.whole(name(names.kv_down), spec.cached_dim, has_bias=spec.has_qkv_bias)
        kv_norm = self.vectors.norm(name(names.kv_latent_norm), latent.rank, latent.norm_eps)
        first = self._heads_of_latents(latent, name(names.kv_up))
        out = self._heads_out(name, latent.value_dim)
        self.enter(norm, kv)
        self.do(Code.LINEAR, kv, Mode.STORE, Buffer.LATENTS)
        turn, window, cap = self.vectors.turn(index), spec.window(index) or 0, spec.attention_softcap or 0.0
        place = index - spec.held_layers.start  # in the pool
        self.do(Code.TURN_LATENTS, place, kv_norm, 0, turn, scale=self._score_scale(index))
        self.do(Code.ATTEND_LATENTS, place, window, spec.sees_spans(index), first, cap=cap)
        return self._product(Buffer.ATTENDED, out)

    def _latent_queries(self, latent: LatentSpec, norm: int, name: Name) -> None:
        """Compute queries, from latents of their own or from hidden states."""
        spec, heads, dim = self.spec, self.heads, self.spec.head_dim
        source = name(spec.names.q if latent.query_rank is None else spec.names.q_up)
        part = source, spec.num_heads * dim, (heads.q_start * dim, heads.q_end * dim)
        up = self.matrices.columns([[part]], has_bias=False, num_inputs=latent.query_rank)
        if latent.query_rank is None:
            self.enter(norm, up)
        else:
            down = self.matrices.whole(name(spec.names.q_down), latent.query_rank, has_bias=spec.has_qkv_bias)
            own_norm = self.vectors.norm(name(spec.names.q_latent_norm), latent.query_rank, latent.norm_eps)
            self.enter(norm, down)
            self.do(Code.LINEAR, down, Mode.STORE, Buffer.QUERY_LATENTS)
            self.do(Code.NORMALISE, own_norm, Buffer.QUERY_LATENTS)
            self.do(Code.PREPARE, Buffer.QUERY_LATENTS, 0, up)
        self.do(Code.LINEAR, up, Mode.STORE, Buffer.QKV)

    def _heads_of_latents(self, latent: LatentSpec, name: str) -> int:
        """A matrix for each head from queries to latents, then one for each from latents to values; the first one."""
        spec, heads = self.spec, self.heads
        still = spec.head_dim - (spec.rotary.dims or 0)
        height = still + latent.value_dim  # rows of a head: its key's, then its value's
        rows = heads.q_start * height, heads.q_end * height
        weight = self.weights.read_linear(
            name, spec.num_heads * height, latent.rank, rows=rows, is_transposed=spec.names.is_transposed
        ).view(-1, height, latent.rank)
        keys, values = torch.split(weight, [still, latent.value_dim], dim=1)
        first = self.matrices.per_head(name, keys.transpose(1, 2).unbind(), spec.num_heads)
        self.matrices.per_head(name, values.unbind(), spec.num_heads)
        return first

    def mlp(self, index: int, norm: int, name: Name) -> Leave:
        """Pass the MLP of a layer, or its mixture of experts, from hidden states behind a norm."""
        spec, experts = self.spec, self.spec.experts_of(index)
        if experts is not None:
            return self._mixture(experts, index, norm)
        units = spec.intermediate_size
        mine = self.parallel.split(units)
        up, *second = self.matrices.gate_and_up(mlp_parts(spec, mine, name), has_bias=spec.has_mlp_bias)
        down = self.matrices.rows(name(spec.names.down), units, mine, has_bias=spec.has_mlp_bias)
        mode = Mode.GATE if spec.is_gated and not second else Mode.ACTIVATE
        self.enter(norm, up)
        self.do(Code.LINEAR, up, mode, Buffer.HIDDEN, _ACTIVATIONS.index(spec.activation))
        for each in second:
            if self.matrices.operand_of(each) != self.matrices.operand_of(up):
                self.enter(norm, each)
            self.do(Code.LINEAR, each, Mode.MULTIPLY, Buffer.HIDDEN)
        return self._product(Buffer.HIDDEN, down)

    def _expert_matrices(self, spec: ModelSpec, name: Name, *, is_whole: bool = False) -> tuple[int, int]:
        """The matrices into the hidden units of an expert and back."""
        units = spec.intermediate_size
        mine = (0, units) if is_whole else self.parallel.split(units)
        parts = [[part] for part in mlp_parts(spec, mine, name)]
        down, has_bias, is_transposed = name(spec.names.down), spec.has_mlp_bias, spec.names.is_transposed
        return (
            self.matrices.columns(parts, has_bias=has_bias, is_transposed=is_transposed),
            self.matrices.rows(down, units, mine, has_bias=has_bias, is_transposed=is_transposed),
        )

    def _mixture(self, experts: ExpertsSpec, index: int, norm: int) -> Leave:
        spec, names, weights = self.spec, self.spec.names, self.weights

        def name(template: str) -> str:
            return weights.named(template, i=index)

        layers = [(name(names.router), experts.num_experts)]
        has_share = bool(experts.shared_size and names.shared_share)
        layers += [(name(names.shared_share), 1)] if has_share else []
        router = self.matrices.router(layers)
        correction = NONE
        if names.router_correction:
            correction = self.vectors.vector(name(names.router_correction), experts.num_experts)
        held = held_experts(self.parallel, experts.num_experts)
        each = [expert_spec(spec, experts, weights, index, j) for j in held]
        matrices = [self._expert_matrices(mlp, name, is_whole=self.parallel.spreads_experts) for mlp in each]
        if experts.shared_size:
            matrices.append(self._expert_matrices(shared_spec(spec, experts), name))
        record = MixtureRecord(
            router=router,
            correction=correction,
            first=matrices[0][0],
            **{field: getattr(experts, field) for field in _ALIKE},
            is_sigmoid=experts.score is ExpertScore.SIGMOID,
            has_shared=bool(experts.shared_size),
            has_share=has_share,
            is_gated=spec.is_gated,
            activation=_ACTIVATIONS.index(spec.activation),
            first_held=held.start,
            num_held=len(held),
        )
        mixture = self.engine.add_mixture(record)
        self.do(Code.HOLD, norm, 0, router)
        self.do(Code.EXPERTS, mixture)
        return lambda target, mode, scale: self.do(Code.ADD_EXPERTS, mixture, mode, target, scale=scale)

    def _product(self, source: Buffer, matrix: int) -> Leave:
        """A buffer's product with a matrix that is split by input."""

        def leave(target: Buffer, mode: Mode, scale: float) -> None:
            self.do(Code.PREPARE, source, 0, matrix)
            self.do(Code.LINEAR, matrix, mode, target, scale=scale)

        return leave
