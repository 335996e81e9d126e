"""One step of an encoder-decoder as tensors: what the encoder reads, the decoder's tokens, and what each of them sees.

A sequence in the pool is its prompt, then the decoder's tokens. Where a token of the prompt lies, the pool keeps what
every layer of the decoder sees of it: keys and values of cross-attention, written once the encoder has read the prompt.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from funitel.model_server.device.upload import upload
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import Slots
from funitel.model_server.models.encoder.packed import Packed, pack
from funitel.proto.step import EncoderInput


@dataclass(frozen=True, slots=True)
class EncoderInputs:
    """Prompts that the encoder reads at once, and the slots of the pool of their tokens, in their order."""

    packed: Packed
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
    """The sources are the prompts that the encoder reads; all else is about the decoder's tokens.

    `kept` are those that need logits, in the order of the caller's rows.
    """

    sources: tuple[EncoderInputs, ...]
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
    blocks = [row.block_table[places // block_size] for row, places in zip(rows, positions, strict=True)]

    def tensor(parts: Sequence[np.ndarray]) -> torch.Tensor:
        return upload(np.concatenate(parts).astype(np.int64), device)

    return EncoderInputs(packed, (tensor(blocks), tensor(positions) % block_size))


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
