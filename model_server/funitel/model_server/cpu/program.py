"""Compile a ModelSpec and its weights to an engine with matrices, vectors and a program: one flat list of operations.

Says the same as `decoder.Decoder`, operation by operation; that one stays the oracle.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu.blocks import Blocks, Leave
from funitel.model_server.cpu.footprint import has_plain_mlp, weight_bytes
from funitel.model_server.cpu.native import Buffer, Code, Mode, NativeEngine, NativeOperation, Shape
from funitel.model_server.cpu.precision import ActivationDtype, KvKind, Tier
from funitel.model_server.cpu.tensors import NONE, Matrices, Vectors
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.spec.model_spec import ModelSpec, NormPlacement

_OF_FEATURES = (Code.ENTER, Code.DEEPEN)


@dataclass(frozen=True, slots=True)
class _Frame:
    """The norms around a block, by their indices, or `NONE`."""

    before: int
    after: int


class Program:
    """This rank's share of a model as an engine's program. Takes every tensor of `weights` and refuses leftovers.

    `held_bytes`, `sharded_bytes` and `total_sharded_bytes` are those of `Weights`, of what the engine keeps. `kinds`
    says how each matrix but routers is kept, by the names of its layers; `kv_kind` how keys and values are. `sites` are
    the parts of matrices that every token passes, by their index in the engine; the head's is `head`.
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
        activations: ActivationDtype,
        kv_kind: KvKind | None = None,
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._parallel = parallel
        self._tier = tier
        self._heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
        self._operations: list[NativeOperation] = []
        self.is_limited = False  # see `limit_to`
        self._takes_features = False  # see `take_features`
        self._starts: list[int] = []  # of each layer's operations, and where the last one's end
        self.num_kv_layers, self.num_kv_heads = len(spec.held_layers), self._heads.num_kv_heads
        self.kv_kind = tier.kv_kind(spec, block_size, activations) if kv_kind is None else kv_kind
        self.engine = NativeEngine(library, self._shape(block_size, num_threads, activations))
        self._matrices = Matrices(spec, weights, parallel, tier, self.engine)
        weights.takes_blocks = tier.takes_blocks
        # Before memory is taken by what config.json says: that may be of another model.
        weights.check(f"{weights.prefix}{spec.names.embedding}.weight", [spec.vocab_size, spec.hidden_size])
        self.engine.reserve(weight_bytes(spec, parallel, tier, weights.block_type, weights.num_outliers))
        self._vectors = Vectors(spec, weights, self._heads, self.engine)
        self._blocks = Blocks(
            spec, weights, parallel, self._heads, self.engine, self._matrices, self._vectors, self._operations
        )
        self._do = self._blocks.do
        self._compile()
        linear = {operation.a for operation in self._operations if operation.code == Code.LINEAR}
        self.sites = {index: parts for index, parts in self._matrices.sites.items() if index in linear}
        self.held_bytes = self._matrices.held_bytes + self._vectors.held_bytes
        self.sharded_bytes = self._matrices.sharded_bytes
        self.total_sharded_bytes = self._matrices.total_sharded_bytes
        self.kinds = self._matrices.kinds
        self._set(self._operations)
        # All that refers to the checkpoint: a file that stays mapped counts as memory beside the weights of the engine.
        del self._weights, self._matrices, self._vectors, self._blocks, self._do

    def _set(self, operations: list[NativeOperation]) -> None:
        self._current = [each for each in operations if self._takes_features or each.code not in _OF_FEATURES]
        self.engine.set_program(self._current)

    def take_features(self) -> None:
        """Have steps from the next one on take features of tokens; before, they have no operations for these."""
        if not self._takes_features:
            self._takes_features = True
            self._set(self._operations)

    def reduced_at(self, at: int) -> tuple[Buffer, int]:
        """What is to be summed over the ranks before the program goes on at operation `at`: so much of each row."""
        operation = self._current[at - 1]
        return Buffer(operation.a), operation.b

    def limit_to(self, layers: range | None) -> None:
        """Compute nothing but some layers from the next step on, without logits; None for all that is here.

        Layers are counted from the first one here.
        """
        self.is_limited = layers is not None
        operations = self._operations
        if layers is not None:
            first, last = self._starts[layers.start], self._starts[layers.stop]
            operations = operations[: self._starts[0]] + operations[first:last]
        self._set(operations)

    def _shape(self, block_size: int, num_threads: int, activations: ActivationDtype) -> Shape:
        spec, latent = self._spec, self._spec.latent
        units = self._parallel.split(spec.intermediate_size if has_plain_mlp(spec) else 0)
        return Shape(
            hidden_size=spec.hidden_size,
            head_dim=spec.head_dim,
            num_heads=self._heads.num_heads,
            num_kv_heads=self._heads.num_kv_heads,
            intermediate_size=units[1] - units[0],
            num_layers=len(spec.held_layers),
            block_size=block_size,
            kv_kind=self.kv_kind,
            num_threads=num_threads,
            level_bits=8 * activations,
            latent_rank=0 if latent is None else latent.rank,
            latent_turned=0 if latent is None else spec.cached_dim - latent.rank,
            value_dim=0 if latent is None else latent.value_dim,
            query_rank=0 if latent is None else latent.query_rank or 0,
        )

    def _compile(self) -> None:
        spec, weights, names = self._spec, self._weights, self._spec.names
        head_bias = names.head if spec.has_head_bias else None
        embedding = self.head = NONE
        if spec.holds_table:
            bias = head_bias if spec.is_tied else None
            embedding = self._matrices.vocabulary(weights.prefix + names.embedding, bias)
        if spec.is_first:
            self._embed(embedding)
        for index in spec.held_layers:
            self._starts.append(len(self._operations))
            self._layer(index)
        self._starts.append(len(self._operations))
        if spec.is_last:
            self._score(embedding, head_bias)
        tied = (rf"^{names.head}\.weight$",) if spec.is_tied else ()
        weights.finish(names.ignored + tied)

    def _score(self, embedding: int, head_bias: str | None) -> None:
        """From hidden states to logits; `embedding` is the head where both are the same."""
        spec, weights, names = self._spec, self._weights, self._spec.names
        final = self._vectors.norm(weights.prefix + names.final_norm) if names.final_norm else NONE
        head = embedding if spec.is_tied else self._matrices.vocabulary(names.head, head_bias)
        self.head = head
        self._do(Code.SELECT)
        self._blocks.enter(final, head)
        self._do(Code.LINEAR, head, Mode.STORE, Buffer.LOGITS)
        if spec.logit_scale != 1.0 or spec.logit_softcap is not None:
            self._do(Code.CAP, scale=spec.logit_scale, cap=spec.logit_softcap or 0.0)

    def _embed(self, table: int) -> None:
        spec = self._spec
        self._do(Code.EMBED, table, self._parallel.split(spec.vocab_size)[0], scale=spec.embedding_scale)
        self._blocks.reduce(Buffer.X, spec.hidden_size)
        if spec.names.embedding_norm:
            norm = self._vectors.norm(self._weights.prefix + spec.names.embedding_norm)
            self._do(Code.NORMALISE, norm, Buffer.X)
        self._do(Code.ENTER)
        if self._vectors.positions != NONE:
            self._do(Code.POSITIONS, self._vectors.positions)

    def _layer(self, index: int) -> None:
        spec, names = self._spec, self._spec.names

        def name(template: str) -> str:
            return self._weights.prefix + template.format(i=index, j="{j}")

        attention = self._frame(names.attention_norm, names.attention_post_norm, index)
        if not spec.is_parallel:
            attended = self._blocks.attention(index, attention.before, name)
            self._leave([attended], attention.after)
        mlp = self._frame(names.mlp_norm, names.mlp_post_norm, index)
        before = attention.before if spec.is_parallel and mlp.before == NONE else mlp.before
        products = [self._blocks.mlp(index, before, name)]
        if spec.is_parallel:  # the hidden units wait in their buffer while attention reads the same residual
            products.append(self._blocks.attention(index, attention.before, name))
        self._leave(products, mlp.after)
        self._do(Code.DEEPEN, index)

    def _frame(self, before: str, after: str, index: int) -> _Frame:
        def name(template: str) -> str:
            return self._weights.named(template, i=index)

        placement = self._spec.norm_placement
        has_before = placement in (NormPlacement.PRE, NormPlacement.BOTH) and before
        return _Frame(
            self._vectors.norm(name(before)) if has_before else NONE,
            self._vectors.norm(name(after)) if placement is not NormPlacement.PRE else NONE,
        )

    def _leave(self, products: Sequence[Leave], after: int) -> None:
        """Add the last products of blocks to the residual: one sum over the ranks for all."""
        scale, is_last = self._spec.residual_scale, self._spec.norm_placement is NormPlacement.AFTER
        is_direct = self._parallel.size == 1 and (after == NONE or is_last)
        target, mode = (Buffer.X, Mode.ACCUMULATE) if is_direct else (Buffer.PARTIAL, Mode.STORE)
        for product in products:
            product(target, mode, scale if is_direct else 1.0)
            mode = Mode.ACCUMULATE
        if not is_direct:
            self._blocks.reduce(Buffer.PARTIAL, self._spec.hidden_size)
            if after != NONE and not is_last:
                self._do(Code.NORMALISE, after, Buffer.PARTIAL)
            self._do(Code.ADD, scale=scale)
        if after != NONE and is_last:
            self._do(Code.NORMALISE, after, Buffer.X)
