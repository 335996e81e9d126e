"""One encoder-decoder for every spec, in torch: this rank's heads and hidden units of both stacks."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from funitel.model_server.checkpoint.storage import Part
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.kv_cache.pool import KVCache, Slots
from funitel.model_server.layers.linear import (
    ColumnLinear,
    NormLayer,
    VocabEmbedding,
    VocabHead,
    heads_out,
    qkv_parts,
)
from funitel.model_server.layers.mlp import Mlp
from funitel.model_server.layers.rotary import sinusoids
from funitel.model_server.models.decoder import ResidualBlock
from funitel.model_server.models.encoder.packed import Packed
from funitel.model_server.models.encoder_decoder.attention import (
    ShardedDistanceBias,
    StepLayout,
    attend_views,
    attend_whole,
    masks_of,
)
from funitel.model_server.spec.encoder_decoder import Seq2SeqSpec
from funitel.model_server.spec.model_spec import ModelSpec, Position

Masks = list[torch.Tensor]

# The embedding table by its other names, which all families have alike.
_COPIES = ("encoder.embed_tokens", "decoder.embed_tokens")


class Seq2Seq:
    """Both stacks and the head. Loading takes every tensor of `weights` and refuses leftovers."""

    def __init__(self, spec: Seq2SeqSpec, weights: Weights, parallel: TensorParallel) -> None:
        decoder, sums = spec.decoder, _sum_dtype(spec, weights)
        self.dtype = weights.dtype
        self.max_read = spec.encoder.max_position_embeddings
        table = _table(decoder, weights)
        embedding = VocabEmbedding(decoder, weights, table, parallel)
        self.encoder = None if spec.hears else EncoderStack(spec, weights, parallel, embedding)
        self.token_embedding = StackEmbedding(decoder, weights, embedding, sums)
        self.bias = _bias(spec, weights, parallel, is_causal=True)
        self.layers = [Seq2SeqDecoderLayer(spec, weights, parallel, i) for i in range(decoder.num_layers)]
        self.final_norm = _final_norm(decoder, weights, sums)
        head = _head_of(decoder, weights, table)
        self.is_tied = head.is_tied
        self.head = VocabHead(head, weights, decoder.names.head, embedding, parallel)
        self.logits_bias: torch.Tensor | None = None
        if spec.logits_bias and weights.has(spec.logits_bias):
            self.logits_bias = weights.read(spec.logits_bias, [1, decoder.vocab_size])
        weights.finish(decoder.names.ignored)

    def __call__(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor | None:
        """Run one forward; logits [len(batch.logit_indices), vocab_size] float32 on rank 0, None elsewhere."""
        step = StepLayout.of(batch, cache.block_size, self.max_read)
        for source in step.sources:
            assert self.encoder is not None, "what hears has features, and no tokens to read"
            self._look_at(self.encoder(source.packed), cache, source.slots)
        for given in step.features:
            self._look_at(given.features.to(self.dtype), cache, given.slots)
        if not step.input_ids.numel():
            return None
        x = self.token_embedding(step.input_ids, step.positions)
        masks = masks_of(step.own, self.bias, self.dtype), masks_of(step.others, None, self.dtype)
        for layer in self.layers:
            x = layer(x, step, cache, *masks)
        if not step.kept.numel():
            return None
        x = x[step.kept]
        logits = self.head(x if self.final_norm is None else self.final_norm(x))
        return logits if logits is None or self.logits_bias is None else logits + self.logits_bias

    def _look_at(self, encoded: torch.Tensor, cache: KVCache, slots: Slots) -> None:
        for layer in self.layers:
            layer.look_at(encoded, cache, slots)


class EncoderStack:
    """Prompts -> what the decoder looks at: [num_tokens] -> [num_tokens, hidden_size]."""

    def __init__(
        self, spec: Seq2SeqSpec, weights: Weights, parallel: TensorParallel, embedding: VocabEmbedding
    ) -> None:
        stack, sums = spec.encoder, _sum_dtype(spec, weights)
        self.token_embedding = StackEmbedding(stack, weights, embedding, sums)
        self.bias = _bias(spec, weights, parallel, is_causal=False)
        self.layers = [Seq2SeqEncoderLayer(stack, weights, parallel, i, sums) for i in range(stack.num_layers)]
        self.final_norm = _final_norm(stack, weights, sums)

    def __call__(self, packed: Packed) -> torch.Tensor:
        x = self.token_embedding(packed.input_ids, packed.positions)
        for layer in self.layers:
            x = layer(x, packed, self.bias)
        return x if self.final_norm is None else self.final_norm(x)


class StackEmbedding:
    """Tokens and their positions -> the hidden states that enter the first layer of a stack, of precision `sums`."""

    def __init__(self, spec: ModelSpec, weights: Weights, embedding: VocabEmbedding, sums: torch.dtype | None) -> None:
        names = spec.names
        self.dtype = sums or weights.dtype
        self.spec = spec
        self.embedding = embedding
        self.positions: torch.Tensor | None = None
        if spec.position is Position.LEARNED:
            shape = [spec.max_position_embeddings + spec.position_offset, spec.hidden_size]
            self.positions = weights.read(f"{weights.named(names.positions)}.weight", shape)
        self.norm: NormLayer | None = None
        if names.embedding_norm:
            self.norm = NormLayer(spec, weights, weights.named(names.embedding_norm), spec.hidden_size)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        x = self.embedding(input_ids)
        if spec.embedding_scale != 1.0:
            x = x * spec.embedding_scale
        places = positions + spec.position_offset
        if self.positions is not None:
            x = x + self.positions[places]
        elif spec.position is Position.SINUSOIDAL:
            x = x + sinusoids(places, spec.hidden_size).to(x.dtype)
        x = x if self.norm is None else self.norm(x)
        return x.to(self.dtype)


class SelfAttention:
    """This rank's heads: queries, keys and values in one product, and the way back to hidden states."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, parallel: TensorParallel, index: int, *, has_key_bias: bool
    ) -> None:
        def name(template: str) -> str:
            return weights.named(template, i=index)

        heads = _heads(spec, parallel)
        self.shape = (3, heads.num_heads, spec.head_dim)
        self.scale = spec.score_scale
        unbiased = [] if has_key_bias else [name(spec.names.k)]
        self.qkv = _columns(spec, weights, qkv_parts(spec, heads, name), unbiased)
        self.out = heads_out(spec, weights, name(spec.names.out), heads, parallel, spec.head_dim)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values [num_tokens, 3, heads, head_dim]."""
        return self.qkv(x).view(-1, *self.shape)


class CrossAttention:
    """This rank's heads: queries of the decoder's tokens, keys and values of what the encoder has read."""

    def __init__(self, whole: Seq2SeqSpec, weights: Weights, parallel: TensorParallel, index: int) -> None:
        spec, names = whole.decoder, whole.cross
        heads = _heads(spec, parallel)
        mine = heads.q_start * spec.head_dim, heads.q_end * spec.head_dim

        def part(template: str) -> Part:
            return weights.named(template, i=index), spec.num_heads * spec.head_dim, mine

        self.index = index
        self.scale = spec.score_scale
        self.heads = (heads.num_heads, spec.head_dim)
        self.q = _columns(spec, weights, [part(names.q)])
        keys = part(names.k)
        self.kv = _columns(spec, weights, [keys, part(names.v)], [] if whole.has_key_bias else [keys[0]])
        self.out = heads_out(spec, weights, weights.named(names.out, i=index), heads, parallel, spec.head_dim)

    def look_at(self, encoded: torch.Tensor, cache: KVCache, slots: Slots) -> None:
        """Keep what every later token of the decoder sees of prompts [num_tokens, hidden_size]."""
        keys, values = self.kv(encoded).view(-1, 2, *self.heads).unbind(1)
        cache.write(self.index, slots, keys, values)

    def __call__(self, x: torch.Tensor, step: StepLayout, cache: KVCache, masks: Masks) -> torch.Tensor:
        q = self.q(x).view(-1, *self.heads)
        keys, values = cache.keys[self.index], cache.values[self.index]
        return self.out(attend_views(q, keys, values, step.others, masks, self.scale))


class Seq2SeqEncoderLayer:
    """Attention over a whole prompt and MLP, each normalised where the spec says and added to the residual."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, parallel: TensorParallel, index: int, sums: torch.dtype | None
    ) -> None:
        self.attention = SelfAttention(spec, weights, parallel, index, has_key_bias=True)
        self.mlp = Mlp(spec, weights, parallel, index, sums)
        self.attention_residual, self.mlp_residual = _frames(spec, weights, index, sums)

    def __call__(self, x: torch.Tensor, packed: Packed, bias: ShardedDistanceBias | None) -> torch.Tensor:
        attention = self.attention
        qkv = attention.project(self.attention_residual.enter(x))
        x = self.attention_residual.leave(x, attention.out(attend_whole(qkv, packed, attention.scale, bias)))
        return self.mlp_residual.leave(x, self.mlp(self.mlp_residual.enter(x)))


class Seq2SeqDecoderLayer:
    """Attention to the decoder's own tokens, to the prompt, and MLP, each normalised and added as the spec says."""

    def __init__(self, spec: Seq2SeqSpec, weights: Weights, parallel: TensorParallel, index: int) -> None:
        stack, sums = spec.decoder, _sum_dtype(spec, weights)
        self.index = index
        self.attention = SelfAttention(stack, weights, parallel, index, has_key_bias=spec.has_key_bias)
        self.cross = CrossAttention(spec, weights, parallel, index)
        self.look_at = self.cross.look_at
        self.mlp = Mlp(stack, weights, parallel, index, sums)
        self.attention_residual, self.mlp_residual = _frames(stack, weights, index, sums)
        self.cross_residual = ResidualBlock(stack, weights, spec.cross.norm, spec.cross.norm, index, sums)

    def __call__(
        self, x: torch.Tensor, step: StepLayout, cache: KVCache, own_masks: Masks, other_masks: Masks
    ) -> torch.Tensor:
        attention = self.attention
        q, k, v = attention.project(self.attention_residual.enter(x)).unbind(1)
        cache.write(self.index, step.slots, k, v)
        keys, values = cache.keys[self.index], cache.values[self.index]
        attended = attend_views(q, keys, values, step.own, own_masks, attention.scale)
        x = self.attention_residual.leave(x, attention.out(attended))
        x = self.cross_residual.leave(x, self.cross(self.cross_residual.enter(x), step, cache, other_masks))
        return self.mlp_residual.leave(x, self.mlp(self.mlp_residual.enter(x)))


def _table(spec: ModelSpec, weights: Weights) -> str:
    """The name under which a checkpoint holds the embedding table: of those tied to one another one is enough."""
    name, head = weights.named("|".join((spec.names.embedding, *_COPIES))), spec.names.head
    return head if weights.has_linear(head) and not weights.has_linear(name) else name


def _head_of(spec: ModelSpec, weights: Weights, table: str) -> ModelSpec:
    """The decoder with a head of its own, where the checkpoint has one: configs are not reliable there."""
    has_own = spec.names.head != table and weights.has_linear(spec.names.head)
    return replace(spec, is_tied=False) if has_own else spec


def _bias(
    spec: Seq2SeqSpec, weights: Weights, parallel: TensorParallel, *, is_causal: bool
) -> ShardedDistanceBias | None:
    bias = spec.distance_bias
    if bias is None:
        return None
    stack, name = (spec.decoder, bias.decoder) if is_causal else (spec.encoder, bias.encoder)
    heads = _heads(stack, parallel)
    return ShardedDistanceBias(bias, weights.named(name), weights, stack.num_heads, heads, is_causal=is_causal)


def _sum_dtype(spec: Seq2SeqSpec, weights: Weights) -> torch.dtype | None:
    """Precision of sums of layers, and of the products that make them large, where it is not that of the weights."""
    return torch.float32 if spec.outgrows_float16 and weights.dtype is torch.float16 else None


def _final_norm(spec: ModelSpec, weights: Weights, sums: torch.dtype | None) -> NormLayer | None:
    if not spec.names.final_norm:
        return None
    return NormLayer(spec, weights, weights.named(spec.names.final_norm), spec.hidden_size, dtype=sums)


def _heads(spec: ModelSpec, parallel: TensorParallel) -> HeadSplit:
    return HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)


def _columns(spec: ModelSpec, weights: Weights, parts: list[Part], unbiased: Sequence[str] = ()) -> ColumnLinear:
    has_bias = spec.has_qkv_bias
    return ColumnLinear(weights, parts, spec.hidden_size, has_bias=has_bias, is_transposed=False, unbiased=unbiased)


def _frames(
    spec: ModelSpec, weights: Weights, index: int, sums: torch.dtype | None
) -> tuple[ResidualBlock, ResidualBlock]:
    """The norms around a layer's attention and around its MLP."""
    names = spec.names
    return (
        ResidualBlock(spec, weights, names.attention_norm, names.attention_post_norm, index, sums),
        ResidualBlock(spec, weights, names.mlp_norm, names.mlp_post_norm, index, sums),
    )
