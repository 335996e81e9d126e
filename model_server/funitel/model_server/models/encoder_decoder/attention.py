"""Attention of an encoder over whole prompts, of a decoder over views of the pool, and what both add for distance."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import HeadSplit
from funitel.model_server.models.encoder.packed import Packed
from funitel.model_server.models.encoder_decoder.layout import View
from funitel.model_server.spec.encoder_decoder import DistanceBiasSpec

# A bias is as large as the scores: it is made for so many queries at a time.
BIASED_QUERIES = 256


class ShardedDistanceBias:
    """What this rank's heads add to the score of two tokens for their distance. Source: T5, arXiv 1910.10683, 2.1."""

    def __init__(
        self, spec: DistanceBiasSpec, name: str, weights: Weights, num_heads: int, heads: HeadSplit, *, is_causal: bool
    ) -> None:
        columns = heads.q_start, heads.q_end
        table = weights.read(f"{name}.weight", [spec.num_buckets, num_heads], columns=columns)
        distances = torch.arange(-spec.max_distance, spec.max_distance + 1)
        found = _buckets(distances, spec.num_buckets, spec.max_distance, is_causal=is_causal)
        self._by_distance = table[found.to(table.device)].t().contiguous()  # [heads, 2 * max_distance + 1]
        self._longest = spec.max_distance

    def __call__(self, distances: torch.Tensor) -> torch.Tensor:
        """The biases [heads, *shape] at distances [*shape]: the place of a key less that of the query."""
        return self._by_distance[:, distances.clamp(-self._longest, self._longest) + self._longest]


def _buckets(distances: torch.Tensor, num_buckets: int, longest: int, *, is_causal: bool) -> torch.Tensor:
    """Where keys behind count alone all buckets are theirs, else half are for each direction.

    Half of a direction's are exact, the others grow with the distance.
    """
    count = num_buckets if is_causal else num_buckets // 2
    exact = count // 2
    far = (-distances).clamp(min=0) if is_causal else distances.abs()
    scaled = torch.log(far.float().clamp(min=1) / exact) / math.log(longest / exact) * (count - exact)
    rough = (exact + scaled.long()).clamp(max=count - 1)
    found = torch.where(far < exact, far, rough)
    return found if is_causal else found + count * (distances > 0)


def attend_whole(qkv: torch.Tensor, packed: Packed, scale: float, bias: ShardedDistanceBias | None) -> torch.Tensor:
    """Let every token of a prompt see all of its prompt: [num_tokens, 3, heads, head_dim] -> [num_tokens, heads * dim].

    Prompts of one length are one call; no token of one sees another's, and there is none that is padding.
    """
    out = qkv.new_empty(qkv.shape[0], qkv.shape[2] * qkv.shape[3])
    for group in packed.groups:
        length = group.length
        rows = slice(group.start, group.start + group.num_tokens)
        q, k, v = qkv[rows].view(group.count, length, *qkv.shape[1:]).permute(2, 0, 3, 1, 4)
        at_once = length if bias is None else BIASED_QUERIES
        parts = []
        for begin in range(0, length, at_once):
            end = min(begin + at_once, length)
            mask = None
            if bias is not None:
                there = torch.arange(length, device=qkv.device)
                mask = bias(there[None, :] - there[begin:end, None]).to(qkv.dtype)
            parts.append(F.scaled_dot_product_attention(q[:, :, begin:end], k, v, attn_mask=mask, scale=scale))
        out[rows] = torch.cat(parts, dim=2).transpose(1, 2).reshape(group.num_tokens, -1)
    return out


def masks_of(views: Sequence[View], bias: ShardedDistanceBias | None, dtype: torch.dtype) -> list[torch.Tensor]:
    """For each view what every layer adds to its scores, or which of them count: [rows, heads or 1, queries, slots]."""
    if bias is None:
        return [view.is_seen[:, None] for view in views]
    return [
        bias(view.distances).transpose(0, 1).masked_fill(~view.is_seen[:, None], -torch.inf).to(dtype) for view in views
    ]


def attend_views(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    views: Sequence[View],
    masks: Sequence[torch.Tensor],
    scale: float,
) -> torch.Tensor:
    """Attend queries [num_tokens, heads, head_dim] to the pool of one layer; [num_tokens, heads * head_dim] back."""
    out = torch.empty_like(query)
    num_heads, dim = query.shape[1:]
    for view, mask in zip(views, masks, strict=True):
        rows, queries = view.is_seen.shape[:2]
        k = keys.index_select(0, view.blocks).view(rows, -1, num_heads, dim).transpose(1, 2)
        v = values.index_select(0, view.blocks).view(rows, -1, num_heads, dim).transpose(1, 2)
        q = query[view.tokens].view(rows, queries, num_heads, dim).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        out[view.tokens] = attended.transpose(1, 2).reshape(-1, num_heads, dim)
    return out.flatten(1)
