"""The indexer of sparse attention: it chooses the tokens that each token attends to.

Source: DeepSeek Sparse Attention, DeepSeek-V3.2-Exp, and its code in transformers. Every rank computes the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from funitel.model_server.attention.torch_reference import masked_attention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import KVCache, gather_blocks
from funitel.model_server.layers.linear import Matmul
from funitel.model_server.layers.rotary import Rotation
from funitel.model_server.spec.model_spec import IndexerSpec, ModelSpec

_MOST_SCORES = 1 << 26  # numbers at once


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The positions [tokens, num_chosen] that the tokens of one row attend to, later ones not counted; None: all."""

    positions: torch.Tensor | None


class Indexer:
    """Ranks the tokens of a context by scores of small queries and keys; the pool has these keys too."""

    def __init__(self, spec: ModelSpec, indexer: IndexerSpec, num_inputs: int, weights: Weights, index: int) -> None:
        def name(template: str) -> str:
            return weights.prefix + template.format(i=index)

        names, dim, hidden = spec.names, indexer.head_dim, spec.hidden_size
        self.spec = indexer
        self.index = index
        self.queries = Matmul(weights.read_linear(name(names.index_q), indexer.num_heads * dim, num_inputs))
        self.keys = Matmul(weights.read_linear(name(names.index_k), dim, hidden))
        self.norm_weight = weights.read(f"{name(names.index_k_norm)}.weight", [dim])
        self.norm_bias = weights.read(f"{name(names.index_k_norm)}.bias", [dim])
        self.shares = Matmul(weights.read_linear(name(names.index_shares), indexer.num_heads, hidden))

    def __call__(
        self, x: torch.Tensor, latents: torch.Tensor, batch: ForwardBatch, cache: KVCache, rotation: Rotation
    ) -> list[ChosenTokens] | None:
        """Write the keys of tokens, and choose for each row of the batch; None where all rows attend to everything.

        Args:
            x: hidden states, [num_tokens, hidden_size].
            latents: those of queries, [num_tokens, query_rank].
            batch, cache: of the step.
            rotation: of the layer's tokens.
        """
        spec = self.spec
        rotation = replace(rotation, is_interleaved=spec.is_interleaved)
        keys = F.layer_norm(self.keys(x), (spec.head_dim,), self.norm_weight, self.norm_bias, spec.norm_eps)
        cache.write_index(self.index, batch.slots, rotation(keys[:, None]))
        if all(row.end <= spec.num_chosen for row in batch.rows):
            return None
        queries = rotation(self.queries(latents).view(len(x), spec.num_heads, -1)).float()
        shares = self.shares(x).float() * (spec.num_heads * spec.head_dim) ** -0.5
        return [
            self._choose(row, queries[start:end], shares[start:end], cache) for row, start, end in _parts_of(batch.rows)
        ]

    def _choose(self, row: RowSpan, queries: torch.Tensor, shares: torch.Tensor, cache: KVCache) -> ChosenTokens:
        """For the tokens of one row, from queries [tokens, num_heads, head_dim] and shares [tokens, num_heads]."""
        if row.end <= self.spec.num_chosen:
            return ChosenTokens(None)
        keys = _context(cache.index_keys[self.index], row, queries.dtype)[:, 0].float()
        at_once = max(1, _MOST_SCORES // (self.spec.num_heads * row.end))
        seen = torch.arange(row.end, device=keys.device)
        found = []
        for start in range(0, len(queries), at_once):
            part = slice(start, start + at_once)
            scores = F.relu(queries[part] @ keys.T).mul_(shares[part, :, None]).sum(dim=1)  # [tokens, context]
            own = row.start + start + torch.arange(len(scores), device=keys.device)[:, None]
            found.append(scores.masked_fill_(seen > own, -torch.inf).topk(self.spec.num_chosen).indices)
        return ChosenTokens(torch.cat(found))


def attend_chosen(
    query: torch.Tensor, cached: torch.Tensor, batch: ForwardBatch, choices: list[ChosenTokens], scale: float
) -> torch.Tensor:
    """Attend queries [num_tokens, num_heads, cached_dim] to the chosen tokens of a layer; its keys are values too."""
    out = torch.empty_like(query)
    for choice, (row, start, end) in zip(choices, _parts_of(batch.rows), strict=True):
        chosen, device = choice.positions, query.device
        if chosen is not None and end - start == 1:
            blocks = torch.from_numpy(row.block_table).to(device).long()[chosen[0] // batch.block_size]
            keys = cached[blocks, chosen[0] % batch.block_size].to(query.dtype)
            is_seen = torch.ones(1, len(keys), dtype=torch.bool, device=device)
        else:
            keys = _context(cached, row, query.dtype)
            own = torch.arange(row.start, row.end, device=device)[:, None]
            is_seen = torch.arange(row.end, device=device) <= own
            if chosen is not None:
                is_seen &= torch.zeros_like(is_seen).scatter_(1, chosen, True)
        keys = keys.transpose(0, 1)[None]  # [1, 1, context, cached_dim]
        at_once = max(1, _MOST_SCORES // (query.shape[1] * is_seen.shape[1]))
        for first in range(0, end - start, at_once):
            part = slice(start + first, min(start + first + at_once, end))
            q = query[part].transpose(0, 1)[None]
            seen = is_seen[first : first + at_once]
            out[part] = masked_attention(q, keys, keys, seen, scale)[0].transpose(0, 1)
    return out


def _context(cached: torch.Tensor, row: RowSpan, dtype: torch.dtype) -> torch.Tensor:
    """What a layer keeps of a row's tokens, [context, 1, elements]."""
    num_blocks = -(-row.end // cached.shape[1])
    blocks = torch.from_numpy(row.block_table[:num_blocks]).to(cached.device).long()
    return gather_blocks(cached, blocks, dtype).flatten(0, 1)[: row.end]


def _parts_of(rows: tuple[RowSpan, ...]) -> Iterator[tuple[RowSpan, int, int]]:
    """Each row with the range of its tokens in the batch."""
    start = 0
    for row in rows:
        yield row, start, start + len(row.tokens)
        start += len(row.tokens)
