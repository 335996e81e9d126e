"""The first block of a decoder layer: attention over the paged cache, with keys and values by head or from latents."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from funitel.model_server.attention.backend import AttentionBackend, AttentionRule
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.layers.elementwise import ElementwiseOps, HeadRule, TorchElementwiseOps
from funitel.model_server.layers.indexer import Indexer, attend_chosen
from funitel.model_server.layers.linear import (
    ColumnLinear,
    HeadNorm,
    Matmul,
    NormLayer,
    gated_query_parts,
    heads_out,
    qkv_parts,
)
from funitel.model_server.layers.rotary import Rotation, alibi_slopes
from funitel.model_server.spec.model_spec import (
    LatentSpec,
    ModelSpec,
    Position,
    QkNorm,
    QueryGrowthSpec,
    RotarySpec,
)

Rotations = Mapping[RotarySpec, Rotation]  # of one step, for each kind of rotary positions in the model


class Attention:
    """Packed QKV, optional norms of queries and keys, positions, the cache, and the output projection.

    `num_inputs` is how many elements it reads of a token, where that is not the hidden size.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        parallel: TensorParallel,
        backend: AttentionBackend,
        index: int,
        num_inputs: int | None = None,
    ) -> None:
        def name(template: str) -> str:
            return weights.prefix + template.format(i=index, j="{j}")

        names, dim, own = spec.names, spec.head_dim, spec.layer(index)
        heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
        self.index = index
        self.backend = backend
        # A pool of float8 holds keys and values divided by their scales.
        scales = weights.read_kv_scales(name(names.qkv or names.q))
        rule = _rule(spec, heads, index, weights.device)
        sinks: torch.Tensor | None = None
        if spec.has_sinks:
            sinks = weights.read(name(names.sinks), [spec.num_heads], rows=(heads.q_start, heads.q_end))
        self.rule = replace(rule, scale=rule.scale * scales[0], sinks=sinks)
        self.rotary = spec.rotary_of(index)
        self.growth = spec.growth_of(index)
        self.elementwise: ElementwiseOps = TorchElementwiseOps()
        self.head_dim = dim
        self.qkv = ColumnLinear(
            weights,
            qkv_parts(spec, heads, name, own),
            num_inputs or spec.hidden_size,
            has_bias=spec.has_qkv_bias,
            is_transposed=names.is_transposed,
        )
        norms: tuple[HeadNorm, HeadNorm] | None = None
        if spec.qk_norm is not QkNorm.NONE and not (spec.is_qk_norm_last and self.rotary is None):
            holders = HeadSplit.num_holders(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
            q, kv = (heads.q_start, heads.q_end), (heads.kv_start, heads.kv_end)
            of_queries = HeadNorm(spec, weights, name(names.q_norm), spec.num_heads, q, parallel, 1)
            of_keys = of_queries
            if own.kv_source is None:
                of_keys = HeadNorm(spec, weights, name(names.k_norm), spec.num_kv_heads, kv, parallel, holders)
            norms = of_queries, of_keys
        self.heads = HeadRule(
            heads.num_heads,
            heads.num_kv_heads if own.kv_source is None else 0,
            spec.qkv_clip,
            norms,
            *scales,
            is_norm_last=spec.is_qk_norm_last,
            has_key_values=own.has_key_values,
            value_eps=spec.norm_eps if spec.has_value_norm else None,
        )
        self.gate: ColumnLinear | None = None
        if spec.has_output_gate:
            parts = [(name(names.output_gate), spec.num_heads * dim, (heads.q_start * dim, heads.q_end * dim))]
            if names.is_gate_in_q:
                parts = gated_query_parts(spec, heads, name, 1)
            has_bias, transposed = names.is_gate_in_q and spec.has_qkv_bias, names.is_transposed
            self.gate = ColumnLinear(weights, parts, spec.hidden_size, has_bias=has_bias, is_transposed=transposed)
        self.out = heads_out(spec, weights, name(names.out), heads, parallel, dim)

    def __call__(
        self, x: torch.Tensor, batch: ForwardBatch, cache: KVCache, plan: object, rotations: Rotations
    ) -> torch.Tensor:
        """Attend tokens [num_tokens, hidden_size] to the cache, their own keys and values included."""
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)  # [num_tokens, q + k + v heads, head_dim]
        rotation = None if self.rotary is None else rotations[self.rotary]
        q = self.elementwise.place(qkv, self.heads, rotation, cache, self.index, batch.slots)
        if self.growth is not None:
            q = q * grown(batch.positions, self.growth).to(q.dtype)
        attended = self.backend.attend(q, cache, self.index, plan, self.rule)
        if self.heads.value_scale != 1.0:
            attended = attended * self.heads.value_scale
        attended = attended.view(x.shape[0], -1)
        if self.gate is not None:
            attended = attended * torch.sigmoid(self.gate(x))
        return self.out(attended)


def grown(positions: torch.Tensor, growth: QueryGrowthSpec) -> torch.Tensor:
    """What queries of tokens at `positions` [num_tokens] are multiplied by, [num_tokens, 1, 1] float32."""
    periods = torch.floor((positions.float() + growth.offset) / growth.period)
    return (1 + growth.rate * torch.log1p(periods))[:, None, None]


class _HeadLinear:
    """A matrix for each of this rank's heads: [num_tokens, heads, inputs] -> [num_tokens, heads, outputs]."""

    def __init__(self, weight: torch.Tensor) -> None:  # [heads, outputs, inputs]
        contiguous = torch.contiguous_format
        self.heads = [Matmul(matrix.clone(memory_format=contiguous)) for matrix in weight]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        products = [head(part.contiguous()) for head, part in zip(self.heads, x.unbind(1), strict=True)]
        return torch.stack(products, dim=1)


class LatentAttention:
    """Attention in the space of latents: the cache keeps one vector of a token for all heads, and every rank has it.

    A head's keys and values are linear in the latent, so its queries are taken there, and what it attends to is taken
    back. Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.2.
    """

    def __init__(
        self,
        spec: ModelSpec,
        latent: LatentSpec,
        weights: Weights,
        parallel: TensorParallel,
        backend: AttentionBackend,
        index: int,
    ) -> None:
        def name(template: str) -> str:
            return weights.prefix + template.format(i=index)

        names, num_turned = spec.names, spec.rotary.dims or 0
        heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
        self.index = index
        self.backend = backend
        self.rule = _rule(spec, heads, index, weights.device)
        self.rotary = spec.rotary_of(index)
        self.growth = spec.growth_of(index)
        self.rank = latent.rank
        self.parts = [spec.head_dim - num_turned, num_turned]  # elements of a query that stay, and that turn
        self.queries = _LatentQueries(spec, latent, weights, heads, name)
        self.choice_source = spec.choice_source(index)
        self.is_sparse = spec.indexer is not None
        self.indexer: Indexer | None = None
        if spec.indexer is not None and latent.query_rank is not None and self.choice_source == index:
            self.indexer = Indexer(spec, spec.indexer, latent.query_rank, weights, index)
        self.kv_down = _to_latent(spec, weights, name(names.kv_down), latent.rank + num_turned)
        self.kv_norm = NormLayer(spec, weights, name(names.kv_latent_norm), latent.rank, eps=latent.norm_eps)
        self.into, self.back = self._heads_of_latents(spec, latent, weights, heads, name(names.kv_up))
        self.out = heads_out(spec, weights, name(names.out), heads, parallel, latent.value_dim)

    def _heads_of_latents(
        self, spec: ModelSpec, latent: LatentSpec, weights: Weights, heads: HeadSplit, name: str
    ) -> tuple[_HeadLinear, _HeadLinear]:
        """For each head the maps from queries to latents and from latents to values."""
        height = self.parts[0] + latent.value_dim  # rows of a head: its key's, then its value's
        rows = heads.q_start * height, heads.q_end * height
        weight = weights.read_linear(
            name, spec.num_heads * height, latent.rank, rows=rows, is_transposed=spec.names.is_transposed
        )
        keys, values = torch.split(weight.view(-1, height, latent.rank), [self.parts[0], latent.value_dim], dim=1)
        return _HeadLinear(keys.transpose(1, 2)), _HeadLinear(values)

    def __call__(
        self, x: torch.Tensor, batch: ForwardBatch, cache: KVCache, plan: object, rotations: Rotations
    ) -> torch.Tensor:
        """Attend tokens [num_tokens, hidden_size] to the cache, their own latents included."""
        latents = self.queries.latents(x)
        if self.indexer is not None and self.rotary is not None:
            batch.choices[self.index] = self.indexer(x, latents, batch, cache, rotations[self.rotary])
        still, rotated = torch.split(self.queries(latents), self.parts, dim=-1)  # each [num_tokens, num_heads, ...]
        latent, key = torch.split(self.kv_down(x), [self.rank, self.parts[1]], dim=-1)
        rotated = torch.cat((rotated, key[:, None]), dim=1)
        if self.rotary is not None:
            rotated = rotations[self.rotary](rotated)
        cached = torch.cat((self.kv_norm(latent)[:, None], rotated[:, -1:]), dim=-1)  # [num_tokens, 1, cached_dim]
        cache.write(self.index, batch.slots, cached)
        query = torch.cat((self.into(still), rotated[:, :-1]), dim=-1)
        if self.growth is not None:
            query = query * grown(batch.positions, self.growth).to(query.dtype)
        choices = batch.choices[self.choice_source] if self.is_sparse else None
        if choices is None:
            attended = self.backend.attend(query, cache, self.index, plan, self.rule)
        else:
            attended = attend_chosen(query, cache.keys[self.index], batch, choices, self.rule.scale)
        return self.out(self.back(attended[..., : self.rank]).flatten(1))


class _LatentQueries:
    """Queries [num_tokens, num_heads, head_dim] of this rank, from latents of their own or from hidden states."""

    def __init__(
        self, spec: ModelSpec, latent: LatentSpec, weights: Weights, heads: HeadSplit, name: Callable[[str], str]
    ) -> None:
        names, dim, num_inputs = spec.names, spec.head_dim, latent.query_rank or spec.hidden_size
        self.head_dim = dim
        self.down: Matmul | None = None
        if latent.query_rank is not None:
            self.down = _to_latent(spec, weights, name(names.q_down), latent.query_rank)
            self.norm = NormLayer(spec, weights, name(names.q_latent_norm), latent.query_rank, eps=latent.norm_eps)
        source = name(names.q if latent.query_rank is None else names.q_up)
        part = source, spec.num_heads * dim, (heads.q_start * dim, heads.q_end * dim)
        self.up = ColumnLinear(weights, [part], num_inputs, has_bias=False, is_transposed=names.is_transposed)

    def latents(self, x: torch.Tensor) -> torch.Tensor:
        """What queries are made of."""
        return x if self.down is None else self.norm(self.down(x))

    def __call__(self, latents: torch.Tensor) -> torch.Tensor:
        return self.up(latents).view(latents.shape[0], -1, self.head_dim)


def _to_latent(spec: ModelSpec, weights: Weights, name: str, num_outputs: int) -> Matmul:
    """A linear layer on hidden states that every rank has whole."""
    weight = weights.read_linear(name, num_outputs, spec.hidden_size, is_transposed=spec.names.is_transposed)
    return Matmul(weight, weights.read(f"{name}.bias", [num_outputs]) if spec.has_qkv_bias else None)


def _rule(spec: ModelSpec, heads: HeadSplit, index: int, device: torch.device) -> AttentionRule:
    slopes = None
    if spec.position is Position.ALIBI:
        every = alibi_slopes(spec.num_heads, spec.alibi_bias_max) * spec.alibi_scale
        slopes = every[heads.q_start : heads.q_end].to(device)
    scale = spec.score_scale / (index + 1) if spec.is_scaled_by_layer else spec.score_scale
    window, chunk, sees_spans = spec.window(index), spec.chunk(index), spec.sees_spans(index)
    return AttentionRule(scale, window, spec.attention_softcap, slopes, chunk=chunk, sees_spans=sees_spans)
