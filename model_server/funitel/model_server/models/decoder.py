"""One decoder for every ModelSpec: embedding, layers of attention and MLP, final norm, head."""

from collections.abc import Sequence

import torch

from funitel.model_server.attention.backend import AttentionBackend
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.layers.altup import AltUp, Laurel, Streams
from funitel.model_server.layers.attention import Rotations
from funitel.model_server.layers.elementwise import ElementwiseOps, TorchElementwiseOps
from funitel.model_server.layers.layer_embedding import EmbeddingGate, LayerEmbeddings
from funitel.model_server.layers.linear import Matmul, NormLayer, VocabEmbedding, VocabHead
from funitel.model_server.layers.low_rank.ops import LowRankOps, LowRankStep
from funitel.model_server.layers.mlp import Experts, Mlp, MlpAndExperts
from funitel.model_server.layers.rotary import Rotary, rotations_of, sinusoids
from funitel.model_server.models.mixer import Mixer, adopt, mixer_of
from funitel.model_server.models.stage_boundary import Passed, StageBoundary
from funitel.model_server.models.weight_offload import Offload, OffloadedLayer
from funitel.model_server.spec.layer_spec import MultiplierSpec
from funitel.model_server.spec.model_spec import NORMS_BEFORE, NORMS_BEHIND, ModelSpec, NormPlacement, Position


class Decoder:
    """This rank's share of the model in torch. Loading takes every tensor of `weights` and refuses leftovers.

    `boundary` is that to the pipeline stages before and behind, where there are several.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        parallel: TensorParallel,
        attention: AttentionBackend,
        offload: Offload | None = None,
        boundary: StageBoundary | None = None,
    ) -> None:
        names = spec.names
        self.spec = spec
        self.boundary = boundary
        self.num_layers = spec.num_layers
        self._kept_layers: tuple[int, ...] = ()
        self.attention = attention
        self.low_rank: LowRankStep | None = None
        self.elementwise: ElementwiseOps = TorchElementwiseOps()
        self.token_embedding = TokenEmbedding(spec, weights, parallel)
        self.offload = offload
        self.layers: list[AnyLayer | OffloadedLayer[AnyLayer]] = []
        self.layer_embeddings: LayerEmbeddings | None = None
        if spec.layer_embeddings is not None and spec.is_first:
            self.layer_embeddings = LayerEmbeddings(spec, spec.layer_embeddings, weights, parallel)
        self.streams: Streams | None = None
        if spec.altup is not None:
            self.streams = Streams(spec, spec.altup, weights)
        for i in spec.held_layers:
            layer = layer_of(spec, weights, parallel, attention, i)
            self.layers.append(layer if offload is None else offload.keep(layer, i, (spec, parallel, attention)))
        if offload is not None:
            offload.finish()
        self.final_norm: NormLayer | None = None
        if names.final_norm and spec.is_last:
            self.final_norm = NormLayer(spec, weights, weights.prefix + names.final_norm, spec.hidden_size)
        self.narrow: Matmul | None = None
        if names.embedding_out and spec.is_last:
            name = weights.prefix + names.embedding_out
            self.narrow = Matmul(weights.read_linear(name, spec.table_size, spec.hidden_size))
        self.head: VocabHead | None = None
        if spec.is_last:
            self.head = VocabHead(spec, weights, names.head, self.token_embedding.embedding, parallel)
        tied = (rf"^{names.head}\.weight$",) if spec.is_tied else ()
        weights.finish(names.ignored + tied)

    def adopt(self, elementwise: ElementwiseOps) -> None:
        """Compute from now on with these operations."""
        self.elementwise = elementwise
        for layer in self.layers:
            (layer.layer if isinstance(layer, OffloadedLayer) else layer).adopt(elementwise)

    def mixtures(self) -> list[Experts]:
        """The mixtures of experts of all layers, in their order."""
        layers = [layer.layer if isinstance(layer, OffloadedLayer) else layer for layer in self.layers]
        return [mixture for layer in layers if layer.mlp is not None for mixture in layer.mlp.mixtures()]

    def keep_hidden(self, layers: Sequence[int]) -> None:
        """See KeepingForward."""
        self._kept_layers = tuple(layer % self.num_layers for layer in layers)

    def __call__(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor | None:
        """Run one forward; logits [len(batch.logit_indices), vocab_size] float32 on rank 0, None elsewhere."""
        return self.run(batch, cache, self.attention.plan(batch))

    def run(
        self, batch: ForwardBatch, cache: KVCache, plan: object, adapters: LowRankOps | None = None
    ) -> torch.Tensor | None:
        """Run one forward with a plan of its attention; with tensors alone where the plan is.

        `adapters` computes those of a recorded step, in place of the batch's own.
        """
        if self.offload is not None:
            self.offload.begin()
        if self.low_rank is None:
            return self._compute(batch, cache, plan)
        self.low_rank.begin(batch, adapters)
        try:
            return self._compute(batch, cache, plan)
        finally:
            self.low_rank.end()

    def _compute(self, batch: ForwardBatch, cache: KVCache, plan: object) -> torch.Tensor | None:
        if cache.state_pool is not None:
            cache.state_pool.clear([row.state_slot for row in batch.rows if row.start == 0])
        x, further = self._enter(batch)
        rotations = self.token_embedding.rotations(batch, x.dtype)
        embedded: list[torch.Tensor | None] = [None] * len(self.layers)
        if further is not None:
            embedded = list(further[:, : len(self.layers)].unbind(1))
        entering: torch.Tensor | None = None
        outputs: dict[int, torch.Tensor] = {}
        media, held = batch.media, self.spec.held_layers
        num_deep = 0 if media is None else len(media.deep)
        for index, (layer, following, own) in enumerate(
            zip(self.layers, [*self.layers[1:], None], embedded, strict=True)
        ):
            # The norm of an offloaded layer is not there before the layer computes.
            residual = following.attention_residual if isinstance(following, AnyLayer) else None
            if media is not None and held[index] < num_deep:
                x, entering = layer(x, entering, None, batch, cache, plan, rotations, own)
                x = media.deepen(x, held[index])
            else:
                x, entering = layer(x, entering, residual, batch, cache, plan, rotations, own)
            if index in self._kept_layers:
                outputs[index] = x
        if outputs:
            batch.kept.extend(outputs[layer] for layer in self._kept_layers)
        if self.head is None:
            assert self.boundary is not None, "another stage has the last layer"
            self.boundary.pass_on(x, None if further is None else further[:, len(self.layers) :])
            return None
        if batch.logit_indices.numel() == 0:
            return None
        x = x[batch.logit_indices]
        x = x if self.streams is None else self.streams.merge(x)
        x = x if self.final_norm is None else self.elementwise.norm(self.final_norm, x)
        return self.head(x if self.narrow is None else self.narrow(x))

    def _enter(self, batch: ForwardBatch) -> Passed:
        """What enters the first layer here."""
        if not self.spec.is_first:
            assert self.boundary is not None, "another stage has the first layer"
            return self.boundary.take_over(self.spec, batch.num_tokens)
        x = self.token_embedding(batch)
        further = None
        if self.layer_embeddings is not None:
            further = self.layer_embeddings(self.token_embedding.ids(batch), x)
        return x if self.streams is None else self.streams.spread(x), further


class TokenEmbedding:
    """Tokens and positions -> the hidden states that enter the first layer, and the rotations that all layers share.

    In other pipeline stages than the first there are the rotations alone, and the table where it is the head.
    """

    def __init__(self, spec: ModelSpec, weights: Weights, parallel: TensorParallel) -> None:
        names, prefix = spec.names, weights.prefix
        self.spec = spec
        self.embedding: VocabEmbedding | None = None
        if spec.holds_table:
            self.embedding = VocabEmbedding(spec, weights, prefix + names.embedding, parallel)
        self.norm: NormLayer | None = None
        if names.embedding_norm and spec.is_first:
            self.norm = NormLayer(spec, weights, prefix + names.embedding_norm, spec.table_size)
        self.widen: Matmul | None = None
        if names.embedding_in and spec.is_first:
            self.widen = Matmul(weights.read_linear(prefix + names.embedding_in, spec.hidden_size, spec.table_size))
        self.positions: torch.Tensor | None = None
        if spec.position is Position.LEARNED and spec.is_first:
            shape = [spec.max_position_embeddings + spec.position_offset, spec.hidden_size]
            self.positions = weights.read(f"{prefix}{names.positions}.weight", shape)
        specs = {spec.rotary_of(i) for i in spec.held_layers} - {None}
        self.rotaries = [Rotary(each, spec.head_dim, weights.device) for each in specs if each is not None]

    def ids(self, batch: ForwardBatch) -> torch.Tensor:
        """Tokens [num_tokens], in the places of media one that has embeddings."""
        if batch.media is None:
            return batch.input_ids
        embeddings = self.spec.layer_embeddings
        return batch.media.hide(batch.input_ids, 0 if embeddings is None else embeddings.media_token)

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size]."""
        spec = self.spec
        assert self.embedding is not None, "another stage has the embedding"
        x = self.embedding(self.ids(batch))
        if spec.embedding_scale != 1.0:
            x = x * spec.embedding_scale
        x = x if self.norm is None else self.norm(x)
        x = x if self.widen is None else self.widen(x)
        x = x if batch.media is None else batch.media.enter(x)
        places = batch.positions + spec.position_offset
        if self.positions is not None:
            return x + self.positions[places]
        if spec.position is Position.SINUSOIDAL:
            return x + sinusoids(places, spec.hidden_size).to(x.dtype)
        return x

    def rotations(self, batch: ForwardBatch, dtype: torch.dtype) -> Rotations:
        """How this step's queries and keys are rotated."""
        return rotations_of(self.rotaries, batch, dtype)


def layer_of(
    spec: ModelSpec, weights: Weights, parallel: TensorParallel, attention: AttentionBackend, index: int
) -> "AnyLayer":
    """A layer as the spec has it."""
    if spec.mlp_layers or not spec.has_mlp:
        return SingleBlockLayer(spec.at(index), weights, parallel, attention, index)
    kind = DecoderLayer if spec.altup is None else AltUpLayer
    return kind(spec.at(index), weights, parallel, attention, index)


class DecoderLayer:
    """Attention, or what takes its place, and MLP, each normalised where the spec says and added to the residual.

    The layer's embedding comes last. `spec` has the sizes of this layer.
    """

    def __init__(
        self, spec: ModelSpec, weights: Weights, parallel: TensorParallel, attention: AttentionBackend, index: int
    ) -> None:
        names = spec.names
        self.is_parallel = spec.is_parallel
        self.attention = mixer_of(spec, weights, parallel, attention, index)
        self.mlp = _mlp(spec, weights, parallel, index)
        of_attention, of_mlp = _factors(spec, index)
        self.attention_residual = ResidualBlock(
            spec, weights, names.attention_norm, names.attention_post_norm, index, factors=of_attention
        )
        self.mlp_residual = ResidualBlock(spec, weights, names.mlp_norm, names.mlp_post_norm, index, factors=of_mlp)
        self.laurel: Laurel | None = None
        if spec.laurel_rank is not None:
            self.laurel = Laurel(spec, spec.laurel_rank, weights, index)
        self.embedding_gate: EmbeddingGate | None = None
        if spec.layer_embeddings is not None:
            self.embedding_gate = EmbeddingGate(spec, spec.layer_embeddings, weights, index)
        self.scale: torch.Tensor | None = None
        if spec.has_layer_scale:
            self.scale = weights.read(weights.prefix + names.layer_scale.format(i=index), [1])

    def adopt(self, elementwise: ElementwiseOps) -> None:
        """Compute from now on with these operations."""
        self.attention_residual.elementwise = self.mlp_residual.elementwise = elementwise
        for mlp in self.mlp.mlps():
            mlp.elementwise = elementwise
        adopt(self.attention, elementwise)

    def __call__(
        self,
        x: torch.Tensor,
        entering: torch.Tensor | None,
        following: "ResidualBlock | None",
        batch: ForwardBatch,
        cache: KVCache,
        plan: object,
        rotations: Rotations,
        embedded: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """From the residual [num_tokens, hidden_size] and what of it enters this layer to those behind it.

        Args:
            x: the residual.
            entering: what the layer before made of it for this one, if it has.
            following: the norms around attention in the next layer, where that shall not do so itself.
            batch, cache, plan, rotations: of the step.
            embedded: the layer's embeddings of the tokens, [num_tokens, size], in models that have them.
        """
        if entering is None:
            entering = self.attention_residual.enter(x)
        attended = self.attention(entering, batch, cache, plan, rotations)
        if self.is_parallel:
            shared = entering if self.mlp_residual.before is None else self.mlp_residual.enter(x)
            result = attended + self.mlp(shared)
        elif self.laurel is not None:
            x = self.laurel.join(self.attention_residual.leave(x, attended), entering)
            result = self.mlp(self.mlp_residual.enter(x))
        else:
            x, shared = self.attention_residual.pass_on(
                self.attention_residual.base(x, entering), attended, self.mlp_residual
            )
            result = self.mlp(shared)
            x = self.mlp_residual.base(x, shared)
        if following is not None and self.embedding_gate is None and self.scale is None:
            return self.mlp_residual.pass_on(x, result, following)
        x = self.mlp_residual.leave(x, result)
        if self.embedding_gate is not None and embedded is not None:
            x = x + self.embedding_gate(x, embedded)
        return x if self.scale is None else x * self.scale, None


class AltUpLayer(DecoderLayer):
    """A layer that computes one of several hidden states of a token; its embedding is added to the others."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, parallel: TensorParallel, attention: AttentionBackend, index: int
    ) -> None:
        super().__init__(spec, weights, parallel, attention, index)
        assert spec.altup is not None
        self.altup = AltUp(spec, spec.altup, weights, index)

    def __call__(
        self,
        x: torch.Tensor,
        entering: torch.Tensor | None,
        following: "ResidualBlock | None",
        batch: ForwardBatch,
        cache: KVCache,
        plan: object,
        rotations: Rotations,
        embedded: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See DecoderLayer; the residual is [num_tokens, num_streams, hidden_size], and nothing of it enters."""
        predicted = self.altup.predict(x)
        active = predicted[:, self.altup.active].contiguous()
        result, _ = super().__call__(active, None, None, batch, cache, plan, rotations)
        x = self.altup.correct(predicted, result)
        if self.embedding_gate is not None and embedded is not None:
            added = self.embedding_gate(self.altup.output(x), embedded)
            x = torch.cat((x[:, :1], x[:, 1:] + added[:, None]), dim=1)
        return x, None


class SingleBlockLayer:
    """One block: attention, or what takes its place, or an MLP; normalised before it and added to the residual."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, parallel: TensorParallel, attention: AttentionBackend, index: int
    ) -> None:
        names = spec.names
        self.mixer: Mixer | None = None
        self.mlp: Mlp | Experts | MlpAndExperts | None = None
        if index in spec.mlp_layers:
            self.mlp = _mlp(spec, weights, parallel, index)
            self.attention_residual = ResidualBlock(spec, weights, names.mlp_norm, names.mlp_post_norm, index)
        else:
            self.mixer = mixer_of(spec, weights, parallel, attention, index)
            self.attention_residual = ResidualBlock(
                spec, weights, names.attention_norm, names.attention_post_norm, index
            )

    def adopt(self, elementwise: ElementwiseOps) -> None:
        """Compute from now on with these operations."""
        self.attention_residual.elementwise = elementwise
        for mlp in [] if self.mlp is None else self.mlp.mlps():
            mlp.elementwise = elementwise
        if self.mixer is not None:
            adopt(self.mixer, elementwise)

    def __call__(
        self,
        x: torch.Tensor,
        entering: torch.Tensor | None,
        following: "ResidualBlock | None",
        batch: ForwardBatch,
        cache: KVCache,
        plan: object,
        rotations: Rotations,
        embedded: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See DecoderLayer; it has no embeddings of its own."""
        if entering is None:
            entering = self.attention_residual.enter(x)
        if self.mlp is not None:
            result = self.mlp(entering)
        else:
            assert self.mixer is not None
            result = self.mixer(entering, batch, cache, plan, rotations)
        if following is None:
            return self.attention_residual.leave(x, result), None
        return self.attention_residual.pass_on(x, result, following)


AnyLayer = DecoderLayer | SingleBlockLayer


def _mlp(spec: ModelSpec, weights: Weights, parallel: TensorParallel, index: int) -> Mlp | Experts | MlpAndExperts:
    """The MLP of a layer, or its experts, or both."""
    experts = spec.experts_of(index)
    if experts is None:
        return Mlp(spec, weights, parallel, index)
    if experts.is_beside_mlp:
        return MlpAndExperts(spec, experts, weights, parallel, index)
    return Experts(spec, experts, weights, parallel, index)


def _factors(spec: ModelSpec, index: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Factors of the residual and of what the block gives, for the first block of a layer and for its MLP.

    The MLP multiplies what it gives by itself, as layers do of which attention and a state are beside each other.
    """
    factors = spec.multipliers or MultiplierSpec()
    of_mlp = factors.mlp_residual, 1.0
    if spec.is_state_beside:
        return (1.0, 1.0), of_mlp
    if index in spec.state_layers:
        return (factors.state_residual, factors.state_out), of_mlp
    return (factors.attention_residual, factors.attention_out), of_mlp


class ResidualBlock:
    """The norms around one block, and its way back into the residual.

    `sum_dtype` is the precision of the residual, where that is not the weights'; `factors` multiply the residual and
    what the block gives.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        before: str,
        after: str,
        index: int,
        sum_dtype: torch.dtype | None = None,
        factors: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        def norm(template: str) -> NormLayer:
            name = weights.named(template, i=index)
            return NormLayer(spec, weights, name, spec.hidden_size, dtype=sum_dtype)

        self.elementwise: ElementwiseOps = TorchElementwiseOps()
        placement = spec.placement(index)
        self.before = norm(before) if placement in NORMS_BEFORE and before else None
        self.after = norm(after) if placement in NORMS_BEHIND else None
        self.is_last = placement is NormPlacement.AFTER  # the norm comes after the sum
        self.is_within = placement is NormPlacement.WITHIN
        self.residual_factor, factor = factors
        self.scale = spec.residual_scale * factor

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """What the block reads."""
        return x if self.before is None else self.elementwise.norm(self.before, x)

    def base(self, x: torch.Tensor, entering: torch.Tensor) -> torch.Tensor:
        """What the block's result is added to, of the residual and what of it entered the block."""
        kept = entering if self.is_within else x
        return kept if self.residual_factor == 1.0 else kept * self.residual_factor

    def leave(self, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """The residual `x` with the block's `result`."""
        after, last = (None, self.after) if self.is_last else (self.after, None)
        return self.elementwise.join(x, result, after, self.scale, last)[1]

    def pass_on(
        self, x: torch.Tensor, result: torch.Tensor, following: "ResidualBlock"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual `x` with the block's `result`, and what of it enters the `following` block."""
        if self.is_last:
            x = self.leave(x, result)
            return x, following.enter(x)
        return self.elementwise.join(x, result, self.after, self.scale, following.before)
