"""One dense decoder for every ModelSpec: embedding, layers of attention and MLP, final norm, head."""

from typing import Protocol

import torch

from funitel.model_server.attention import AttentionBackend
from funitel.model_server.batch import ForwardBatch
from funitel.model_server.kv_cache import KVCache
from funitel.model_server.layers import (
    ACTIVATIONS,
    ColumnLinear,
    NormLayer,
    Rotary,
    RowLinear,
    VocabEmbedding,
    VocabHead,
    qkv_parts,
)
from funitel.model_server.parallel import HeadSplit, TensorParallel
from funitel.model_server.spec import ModelSpec, Position
from funitel.model_server.weights import Weights

Angles = tuple[torch.Tensor, torch.Tensor] | None


class Forward(Protocol):
    """One forward of this rank's share of a model; all ranks call it with the same batch."""

    def __call__(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor | None:
        """Run one forward; logits [len(batch.logit_indices), vocab_size] float32 on rank 0, None elsewhere."""


class Decoder:
    """This rank's share of the model in torch. Loading takes every tensor of `weights` and refuses leftovers."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, parallel: TensorParallel, attention: AttentionBackend
    ) -> None:
        names = spec.names
        self.spec = spec
        self.attention = attention
        self.embedding = VocabEmbedding(spec, weights, weights.prefix + names.embedding, parallel)
        self.positions: torch.Tensor | None = None
        self.rotary: Rotary | None = None
        if spec.position is Position.LEARNED:
            shape = [spec.max_position_embeddings, spec.hidden_size]
            self.positions = weights.read(f"{weights.prefix}{names.positions}.weight", shape)
        else:
            self.rotary = Rotary(spec.head_dim, spec.rotary_base, spec.rotary_scaling, weights.device)
        self.layers = [Layer(spec, weights, parallel, attention, i) for i in range(spec.num_layers)]
        self.final_norm = NormLayer(spec, weights, weights.prefix + names.final_norm, spec.hidden_size)
        self.head = VocabHead(spec, weights, names.head, self.embedding, parallel)
        tied = (rf"^{names.head}\.weight$",) if spec.is_tied else ()
        weights.finish(names.ignored + tied)

    def __call__(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor | None:
        """Run one forward; logits [len(batch.logit_indices), vocab_size] float32 on rank 0, None elsewhere."""
        x = self.embedding(batch.input_ids)  # [num_tokens, hidden_size]
        if self.positions is not None:
            x = x + self.positions[batch.positions]
        angles = self.rotary.angles(batch.positions, x.dtype) if self.rotary is not None else None
        plan = self.attention.plan(batch)
        for layer in self.layers:
            x = layer(x, batch, cache, plan, angles)
        if batch.logit_indices.numel() == 0:
            return None
        return self.head(self.final_norm(x[batch.logit_indices]))


class Layer:
    """Attention and MLP, each behind a norm and added to the residual."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        parallel: TensorParallel,
        attention: AttentionBackend,
        index: int,
    ) -> None:
        prefix = weights.prefix

        def norm(template: str) -> NormLayer:
            return NormLayer(spec, weights, prefix + template.format(i=index), spec.hidden_size)

        self.attention_norm = norm(spec.names.attention_norm)
        self.attention = Attention(spec, weights, parallel, attention, index)
        self.mlp_norm = norm(spec.names.mlp_norm)
        self.mlp = Mlp(spec, weights, parallel, index)

    def __call__(
        self, x: torch.Tensor, batch: ForwardBatch, cache: KVCache, plan: object, angles: Angles
    ) -> torch.Tensor:
        """One layer over hidden states [num_tokens, hidden_size]."""
        x = x + self.attention(self.attention_norm(x), batch, cache, plan, angles)
        return x + self.mlp(self.mlp_norm(x))


class Attention:
    """Packed QKV, optional norms of queries and keys, rotary, the cache, and the output projection."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        parallel: TensorParallel,
        backend: AttentionBackend,
        index: int,
    ) -> None:
        def name(template: str) -> str:
            return weights.prefix + template.format(i=index)

        names, dim = spec.names, spec.head_dim
        heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
        self.index = index
        self.backend = backend
        self.window = spec.window(index)
        self.num_heads, self.num_kv_heads, self.head_dim = heads.num_heads, heads.num_kv_heads, dim
        self.qkv = ColumnLinear(
            weights,
            qkv_parts(spec, heads, name),
            spec.hidden_size,
            has_bias=spec.has_qkv_bias,
            is_transposed=names.is_transposed,
        )
        self.q_norm = NormLayer(spec, weights, name(names.q_norm), dim) if spec.has_qk_norm else None
        self.k_norm = NormLayer(spec, weights, name(names.k_norm), dim) if spec.has_qk_norm else None
        self.out = RowLinear(
            weights,
            name(names.out),
            spec.hidden_size,
            spec.num_heads * dim,
            (heads.q_start * dim, heads.q_end * dim),
            parallel,
            has_bias=spec.has_out_bias,
            is_transposed=names.is_transposed,
        )

    def __call__(
        self, x: torch.Tensor, batch: ForwardBatch, cache: KVCache, plan: object, angles: Angles
    ) -> torch.Tensor:
        """Attend tokens [num_tokens, hidden_size] to the cache, their own keys and values included."""
        num_qk = self.num_heads + self.num_kv_heads
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)  # [num_tokens, q + k + v heads, head_dim]
        qk, v = qkv[:, :num_qk], qkv[:, num_qk:]
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat((self.q_norm(qk[:, : self.num_heads]), self.k_norm(qk[:, self.num_heads :])), dim=1)
        if angles is not None:
            qk = Rotary.rotate(qk, *angles)
        cache.write(self.index, batch.slots, qk[:, self.num_heads :], v)
        q = qk[:, : self.num_heads].contiguous()
        attended = self.backend.attend(q, cache, self.index, plan, self.window)
        return self.out(attended.view(x.shape[0], -1))


class Mlp:
    """Gated or plain MLP; hidden units are split between ranks."""

    def __init__(self, spec: ModelSpec, weights: Weights, parallel: TensorParallel, index: int) -> None:
        names, units = spec.names, spec.intermediate_size
        mine = parallel.split(units)
        inputs = (names.gate, names.up) if spec.is_gated else (names.up,)
        self.is_gated = spec.is_gated
        self.activation = ACTIVATIONS[spec.activation]
        self.up = ColumnLinear(
            weights,
            [(weights.prefix + template.format(i=index), units, mine) for template in inputs],
            spec.hidden_size,
            has_bias=spec.has_mlp_bias,
            is_transposed=names.is_transposed,
        )
        self.down = RowLinear(
            weights,
            weights.prefix + names.down.format(i=index),
            spec.hidden_size,
            units,
            mine,
            parallel,
            has_bias=spec.has_mlp_bias,
            is_transposed=names.is_transposed,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] in and out."""
        x = self.up(x)
        if not self.is_gated:
            return self.down(self.activation(x))
        gate, up = x.chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)
