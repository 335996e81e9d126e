"""Sequences with images for tests of a forward: random features, positions by axis, spans seen whole; their steps."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from funitel.model_server.forward.batch import Forward, ForwardBatch, RowMedia, RowSpan
from funitel.model_server.kv_cache.pool import KVCache

PLACEHOLDER = 287
Piece = int | tuple[int, int, int]
"""So many tokens of text, or an image of (frames, rows, columns) of features."""


def make_sequence(
    pieces: Sequence[Piece],
    hidden_size: int,
    seed: int,
    *,
    num_deep: int = 0,
    has_axes: bool = False,
    sees_whole: bool = False,
    placeholder: int = PLACEHOLDER,
) -> RowSpan:
    """Random text and images as the row that computes all of it at once, still without blocks.

    Args:
        pieces: what the sequence is of.
        hidden_size: elements of a feature.
        seed: of what is random.
        num_deep: layers behind which features are added.
        has_axes: whether tokens have positions by axis, as those of Qwen2-VL.
        sees_whole: whether all tokens of an image see each other.
        placeholder: id of the tokens of images; those of text are below.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    axes: list[np.ndarray] = []
    images, spans, place = [], [], 0
    for piece in pieces:
        first = len(tokens)
        if isinstance(piece, int):
            tokens += torch.randint(0, placeholder, (piece,), generator=generator).tolist()
            axes.append(np.tile(np.arange(place, place + piece), (3, 1)))
        else:
            count = int(np.prod(piece))
            tokens += [placeholder] * count
            axes.append(np.indices(piece).reshape(3, -1) + place)
            features, *deep = 0.4 * torch.randn(1 + num_deep, count, hidden_size, generator=generator)
            images.append(RowMedia(np.arange(first, first + count), features, tuple(deep)))
            spans.append((first, first + count))
        place = int(axes[-1].max()) + 1
    return RowSpan(
        tokens,
        0,
        np.zeros(0, np.int32),
        "all",
        media=tuple(images),
        rotary=np.concatenate(axes, axis=1) if has_axes and images else None,
        whole_spans=tuple(spans) if sees_whole else (),
    )


@torch.inference_mode()
def step_sequences(
    decoder: Forward, cache: KVCache, sequences: Sequence[RowSpan], num_decode: int, chunk: int = 11
) -> list[torch.Tensor]:
    """Logits of every token of every sequence [num_tokens, vocab_size] on rank 0; empty tensors elsewhere.

    All sequences step together: chunks of tokens first, which take the rest of a span that is seen whole too, single
    tokens for the last `num_decode`.
    """
    blocks = np.random.default_rng(3).permutation(np.arange(1, cache.num_blocks)).astype(np.int32)
    each = len(blocks) // len(sequences)
    tables = np.split(blocks[: each * len(sequences)], len(sequences))
    done = [0] * len(sequences)
    collected: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(d < s.end for d, s in zip(done, sequences, strict=True)):
        rows, owners = [], []
        for i, sequence in enumerate(sequences):
            left = sequence.end - done[i]
            if left:
                wanted = done[i] + (min(chunk, left - num_decode) if left > num_decode else 1)
                cut = (end for begin, end in sequence.whole_spans if max(begin, done[i]) < wanted < end)
                rows.append(replace(sequence, block_table=tables[i]).part(done[i], next(cut, wanted)))
                owners.append(i)
        out = decoder(ForwardBatch.build(rows, cache.block_size, torch.device("cpu")), cache)
        at = 0
        for i, row in zip(owners, rows, strict=True):
            done[i] = row.end
            if out is not None:
                collected[i].append(out[at : at + len(row.tokens)])
                at += len(row.tokens)
    return [torch.cat(parts) if parts else torch.empty(0) for parts in collected]
