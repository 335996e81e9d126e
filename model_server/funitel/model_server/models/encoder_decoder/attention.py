"""Attention of an encoder over whole prompts, of a decoder over views of the pool, and what both add for distance.

A sequence in the pool is its prompt, then the decoder's tokens. Where a token of the prompt lies, the pool keeps what
every layer of the decoder sees of it: keys and values of cross-attention, written once the encoder has read the prompt.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.pinned_memory import upload
from funitel.model_server.device.tensor_parallel import HeadSplit
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import Slots
from funitel.model_server.models.encoder.packed import Packed, pack
from funitel.model_server.spec.encoder_decoder import DistanceBiasSpec
from funitel.proto.step import EncoderInput


@dataclass(frozen=True, slots=True)
class EncoderInputs:
    """Prompts that the encoder reads at once, and the slots of the pool of their tokens, in their order."""

    packed: Packed
    slots: Slots


@dataclass(frozen=True, slots=True)
class GivenFeatures:
    """What the decoder looks at where no encoder of ours reads it, and the slots of the pool of its places."""

    features: torch.Tensor  # [num_features, hidden_size]
    slots: Slots


@dataclass(frozen=True, slots=True)
class View:
    """Rows with as many queries each, and the slots of the pool that these look at.

    `tokens` [rows * queries] are places among the decoder's tokens of the step, `blocks` [rows * blocks] lie in the
    pool. `is_seen` and `distances` are [rows, queries, slots]: what a query sees, and their places less its own.
    """

    tokens: torch.Tensor
    blocks: torch.Tensor
    is_seen: torch.Tensor
    distances: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The sources are the prompts that the encoder reads, or features are given; all else is about decoder tokens.

    `kept` are those that need logits, in the order of the caller's rows.
    """

    sources: tuple[EncoderInputs, ...]
    features: tuple[GivenFeatures, ...]
    input_ids: torch.Tensor  # [num_tokens]
    positions: torch.Tensor  # [num_tokens], from 0 in each sequence
    slots: Slots
    kept: torch.Tensor  # [num_logits]
    own: tuple[View, ...]  # what decoder tokens see of those before them, and of themselves
    others: tuple[View, ...]  # what they see of the prompt

    @classmethod
    def of(cls, batch: ForwardBatch, block_size: int, max_read: int) -> "StepLayout":
        """Lay a batch out, the encoder reading `max_read` tokens at once; its tensors say where it is computed."""
        device = batch.input_ids.device
        positions = np.concatenate([np.arange(row.start, row.end) - row.source_len for row in batch.rows])
        is_decoded = positions >= 0
        places = upload(is_decoded.cumsum() - 1, device)
        decoded = upload(is_decoded.nonzero()[0], device)
        own, others, first = [], [], 0
        for row in batch.rows:
            begin = max(row.start, row.source_len)
            count = row.end - begin
            if count > 0:
                own.append(_own(row, begin, first, block_size))
                others.append(_others(row, count, first, block_size))
                first += count
        blocks, offsets = batch.slots
        return cls(
            sources=tuple(_source(rows, block_size, device) for rows in _read_together(batch.rows, max_read)),
            features=tuple(_given(row, block_size, device) for row in batch.rows if row.media),
            input_ids=batch.input_ids[decoded],
            positions=upload(positions[is_decoded], device),
            slots=(blocks[decoded], offsets[decoded]),
            kept=places[batch.logit_indices],
            own=_views(own, block_size, device),
            others=_views(others, block_size, device),
        )


def _read_together(rows: Iterable[RowSpan], max_read: int) -> list[list[RowSpan]]:
    """Rows with prompts to be read, longest first as `pack` wants them: at most `max_read` tokens, or one, at once.

    Each is read whole, whatever part of it the plan counts in this step: only this bounds what the encoder takes.
    """
    parts: list[list[RowSpan]] = []
    num_tokens = 0
    for row in sorted((row for row in rows if row.source), key=lambda row: -len(row.source)):
        num_tokens += len(row.source)
        if not parts or num_tokens > max_read:
            parts.append([])
            num_tokens = len(row.source)
        parts[-1].append(row)
    return parts


def _source(rows: Sequence[RowSpan], block_size: int, device: torch.device) -> EncoderInputs:
    """The prompts of rows, packed, and the slots of their tokens."""
    packed = pack([EncoderInput(input_ids=tuple(row.source)) for row in rows], device)
    positions = [np.arange(len(row.source)) for row in rows]
    return EncoderInputs(packed, _slots(rows, positions, block_size, device))


def _given(row: RowSpan, block_size: int, device: torch.device) -> GivenFeatures:
    """The features of a row, and the slots of their places."""
    positions = np.concatenate([row.start + media.places for media in row.media])
    features = torch.cat([media.features for media in row.media]).to(device)
    return GivenFeatures(features, _slots([row], [positions], block_size, device))


def _slots(rows: Sequence[RowSpan], positions: Sequence[np.ndarray], block_size: int, device: torch.device) -> Slots:
    """The slots of positions in each row, one behind the other."""
    blocks = [row.block_table[places // block_size] for row, places in zip(rows, positions, strict=True)]

    def tensor(parts: Sequence[np.ndarray]) -> torch.Tensor:
        return upload(np.concatenate(parts).astype(np.int64), device)

    return tensor(blocks), tensor(positions) % block_size


@dataclass(frozen=True, slots=True)
class _Sight:
    """What the queries of one row see: of the slots of `blocks` those from `low` on, each up to its own `end`."""

    first: int  # place of the first query among the decoder's tokens
    blocks: np.ndarray  # [num_blocks]
    low: int
    ends: np.ndarray  # [queries]


def _own(row: RowSpan, begin: int, first: int, block_size: int) -> _Sight:
    skipped = row.source_len // block_size
    blocks = row.block_table[skipped : -(-row.end // block_size)]
    ends = np.arange(begin, row.end) + 1 - skipped * block_size
    return _Sight(first, blocks, row.source_len - skipped * block_size, ends)


def _others(row: RowSpan, count: int, first: int, block_size: int) -> _Sight:
    blocks = row.block_table[: -(-row.source_len // block_size)]
    return _Sight(first, blocks, 0, np.full(count, row.source_len))


def _views(sights: Sequence[_Sight], block_size: int, device: torch.device) -> tuple[View, ...]:
    """Put rows of one query together if their blocks differ by less than a factor of two; others stay alone."""

    def kind(sight: _Sight) -> tuple[int, int]:
        is_alone = len(sight.ends) > 1
        return (sight.first + 1, 0) if is_alone else (0, len(sight.blocks).bit_length())

    ordered = sorted(sights, key=kind)
    return tuple(_view(tuple(group), block_size, device) for _, group in groupby(ordered, kind))


def _view(group: Sequence[_Sight], block_size: int, device: torch.device) -> View:
    width = max(len(sight.blocks) for sight in group)
    blocks = np.zeros((len(group), width), dtype=np.int64)  # block 0 pads
    for i, sight in enumerate(group):
        blocks[i, : len(sight.blocks)] = sight.blocks
    slots = np.arange(width * block_size)
    lows = np.array([sight.low for sight in group])[:, None, None]
    ends = np.stack([sight.ends for sight in group])[:, :, None]
    tokens = np.concatenate([np.arange(sight.first, sight.first + len(sight.ends)) for sight in group])
    return View(
        tokens=upload(tokens, device),
        blocks=upload(blocks.ravel(), device),
        is_seen=upload((slots >= lows) & (slots < ends), device),
        distances=upload(slots - (ends - 1), device),
    )


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
