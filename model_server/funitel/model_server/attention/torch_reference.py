"""The attention backend in plain torch: runs on every device, and is what every faster backend is checked against."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from funitel.model_server.attention.backend import AttentionRule
from funitel.model_server.forward.batch import ForwardBatch, RowSpan, block_tables
from funitel.model_server.kv_cache.pool import KVCache, gather_blocks


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Single-token rows of similar context, padded to the longest."""

    start: int
    end: int
    blocks: torch.Tensor  # [rows * max_blocks] int64
    contexts: torch.Tensor  # [rows, 1] tokens


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One row that computes several tokens."""

    start: int
    end: int
    first_position: int
    context: int
    blocks: torch.Tensor  # [num_blocks] int64
    visible_ends: torch.Tensor | None  # [tokens, 1] of `ForwardBatch.visible_ends`, where they differ from positions
    masks: dict[tuple[int | None, int | None, bool], torch.Tensor]  # by window, chunk and whether spans are whole


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """Rows of one step, grouped for the reference backend."""

    groups: tuple[_DecodeGroup, ...]
    chunks: tuple[_Chunk, ...]


class TorchAttention:
    """Gather the blocks of each row and call scaled_dot_product_attention. The oracle of every faster backend."""

    name = "paged"

    def __init__(self, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.device = device

    def plan(self, batch: ForwardBatch) -> TorchPlan:
        """Group decode rows of contexts that differ by less than a factor of two; chunks stay alone."""
        groups = []
        start = 0
        sizes = [self._num_blocks(row).bit_length() for row in batch.rows[: batch.num_decode]]
        for i in range(1, batch.num_decode + 1):
            if i == batch.num_decode or sizes[i] != sizes[start]:
                groups.append(self._group(batch.rows[start:i], start))
                start = i
        chunks = []
        position = batch.num_decode
        ends = None if batch.visible_ends is None else batch.visible_ends[:, None]
        for row in batch.rows[batch.num_decode :]:
            blocks = torch.from_numpy(row.block_table[: self._num_blocks(row)].astype(np.int64)).to(self.device)
            end = position + len(row.tokens)
            visible_ends = None if ends is None or not row.whole_spans else ends[position:end]
            chunks.append(_Chunk(position, end, row.start, row.end, blocks, visible_ends, {}))
            position = end
        return TorchPlan(tuple(groups), tuple(chunks))

    def _num_blocks(self, row: RowSpan) -> int:
        return -(-row.end // self.block_size)

    def _group(self, rows: tuple[RowSpan, ...], start: int) -> _DecodeGroup:
        blocks = block_tables(rows, self.block_size).astype(np.int64)
        contexts = torch.tensor([[row.end] for row in rows], device=self.device)
        return _DecodeGroup(start, start + len(rows), torch.from_numpy(blocks.ravel()).to(self.device), contexts)

    def attend(
        self, query: torch.Tensor, cache: KVCache, layer: int, plan: TorchPlan, rule: AttentionRule
    ) -> torch.Tensor:
        """See AttentionBackend."""
        keys, values = cache.keys[layer], cache.values[layer]
        out = query.new_empty(*query.shape[:2], values.shape[3])
        for group in plan.groups:
            self._attend_group(query, keys, values, group, rule, out)
        for chunk in plan.chunks:
            self._attend_chunk(query, keys, values, chunk, rule, out)
        return out

    def _attend_group(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        group: _DecodeGroup,
        rule: AttentionRule,
        out: torch.Tensor,
    ) -> None:
        num_rows, num_kv, dim = group.end - group.start, keys.shape[2], keys.shape[3]
        k = gather_blocks(keys, group.blocks, query.dtype).view(num_rows, -1, num_kv, dim).transpose(1, 2)
        v = k
        if values is not keys:
            v = gather_blocks(values, group.blocks, query.dtype).view(num_rows, -1, num_kv, values.shape[3])
            v = v.transpose(1, 2)
        # The query heads that share a KV head stand in as queries of one head: no copy of K and V per query head.
        q = query[group.start : group.end].view(num_rows, num_kv, -1, dim)  # [rows, kv_heads, heads_per_kv, dim]
        slots = torch.arange(k.shape[2], device=self.device)
        is_seen = slots < group.contexts
        if rule.window is not None:
            is_seen &= slots >= group.contexts - rule.window
        if rule.chunk is not None:
            is_seen &= slots >= (group.contexts - 1) // rule.chunk * rule.chunk
        mask = is_seen[:, None, None]  # [rows, 1, 1, slots]
        if rule.slopes is not None:
            distances = (slots - group.contexts + 1)[:, None, None]
            mask = (rule.slopes.view(num_kv, -1, 1) * distances).masked_fill_(~mask, -torch.inf).to(q.dtype)
        sinks = None if rule.sinks is None else rule.sinks.view(num_kv, -1, 1)  # as the queries lie
        attended = _attend(q, k, v, mask, rule, sinks)
        out[group.start : group.end] = attended.reshape(num_rows, -1, values.shape[3])

    def _attend_chunk(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        chunk: _Chunk,
        rule: AttentionRule,
        out: torch.Tensor,
    ) -> None:
        num_kv = keys.shape[2]
        k, v = (
            gather_blocks(cached, chunk.blocks, query.dtype).flatten(0, 1)[: chunk.context].transpose(0, 1)[None]
            for cached in (keys, values)
        )
        q = query[chunk.start : chunk.end].transpose(0, 1)[None]  # [1, num_heads, chunk, dim]
        changes = rule.window, rule.softcap, rule.slopes, rule.sinks, rule.chunk, _ends(chunk, rule)
        if chunk.first_position == 0 and all(change is None for change in changes):
            attended = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=rule.scale, enable_gqa=q.shape[1] != num_kv
            )
        else:
            sinks = None if rule.sinks is None else rule.sinks.view(-1, 1, 1)
            attended = _attend(q, k, v, self._chunk_mask(chunk, rule, q.dtype), rule, sinks)
        out[chunk.start : chunk.end] = attended[0].transpose(0, 1)

    def _chunk_mask(self, chunk: _Chunk, rule: AttentionRule, dtype: torch.dtype) -> torch.Tensor:
        """What is added to the scores of the chunk's tokens: [chunk, context], with slopes [num_heads, chunk, context].

        -inf hides.
        """
        window, size, ends = rule.window, rule.chunk, _ends(chunk, rule)
        kind = window, size, ends is not None
        if kind not in chunk.masks:
            own = torch.arange(chunk.first_position, chunk.context, device=self.device)[:, None]
            seen = torch.arange(chunk.context, device=self.device)
            is_hidden = seen > own if ends is None else seen >= ends
            if window is not None:
                is_hidden |= seen <= own - window
            if size is not None:
                is_hidden |= seen < own // size * size
            mask = torch.zeros(is_hidden.shape, device=self.device)
            if rule.slopes is not None:
                mask = rule.slopes.view(-1, 1, 1) * (seen - own)
            chunk.masks[kind] = mask.masked_fill_(is_hidden, -torch.inf).to(dtype)
        return chunk.masks[kind]


def _ends(chunk: _Chunk, rule: AttentionRule) -> torch.Tensor | None:
    """How far each token of a chunk sees in a layer, where that is not up to itself."""
    return chunk.visible_ends if rule.sees_spans else None


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    rule: AttentionRule,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend queries [rows, num_heads, tokens, head_dim]; `mask` is added to scores, or says which of them count.

    `sinks` are those of the rule, as scores [rows, num_heads, tokens, 1] take them.
    """
    group = query.shape[1] // keys.shape[1]
    if rule.softcap is None and sinks is None:
        return masked_attention(query, keys, values, mask, rule.scale)
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = query @ keys.transpose(-1, -2) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    if sinks is None:
        return scores.softmax(dim=-1) @ values
    scores = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:3], 1)), dim=-1)
    return scores.softmax(dim=-1)[..., :-1] @ values


def masked_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend queries [rows, num_heads, tokens, dim] to keys [rows, num_kv_heads, context, dim]; see `_attend`."""
    is_grouped = query.shape[1] != keys.shape[1]
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=is_grouped)
