"""Rows of a step side by side as a padded batch of a transformers model, with what it keeps handed over and taken back.

For models that keep a state of their own, and those with attention outside `AttentionInterface`. Single
tokens of sequences of similar length are one forward; a row of several tokens is one by itself.
"""

from collections.abc import Sequence
from typing import Any

import torch

from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.models.transformers_fallback.cache_adapters import CacheAdapter, StackedRows
from funitel.model_server.models.transformers_fallback.dynamic_rope import DynamicRope
from funitel.model_server.models.transformers_fallback.packed import places_of
from funitel.model_server.models.transformers_fallback.pool import FallbackPool
from funitel.proto.errors import InvalidRequest


class StackedModel:
    """A transformers model as a `Forward` that is given rows of equal token count, and what it keeps of them.

    `is_alone`: every row is a forward by itself, for code that is wrong about batches. See PackedModel for `rope`.
    """

    def __init__(
        self, model: Any, adapter: CacheAdapter, device: torch.device, rope: DynamicRope, *, is_alone: bool
    ) -> None:
        self.name = "alone" if is_alone else "stacked"
        self._is_alone = is_alone
        self._model = model
        self._adapter = adapter
        self._device = device
        self._rope = rope
        self._ends: dict[int, int] = {}  # first block of a sequence -> tokens that its state has seen
        self.kept = adapter.kept
        self.takes_chunks = self.shares_prefixes = not (adapter.kept.states or rope.is_by_length)

    def __call__(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor | None:
        """See Forward."""
        assert isinstance(cache, FallbackPool)
        logits: torch.Tensor | None = None
        places = places_of(batch)
        firsts = _firsts(batch.rows)
        for piece in self._pieces(batch.rows):
            found = self._run([batch.rows[i] for i in piece], cache)  # [rows, tokens, vocab_size]
            for i, part in zip(piece, found, strict=True):
                if len(places[i]):
                    if logits is None:
                        logits = part.new_empty(len(batch.logit_indices), part.shape[-1])
                    where = torch.from_numpy(places[i]).to(self._device)
                    logits[where] = part[batch.logit_indices[where] - firsts[i]]
        return logits

    def _pieces(self, rows: Sequence[RowSpan]) -> list[list[int]]:
        """Rows that are computed together: those of one token that turn alike, by context, within a factor of two."""
        pieces: dict[tuple[int, ...], list[int]] = {}
        for i, row in enumerate(rows):
            alone = (i,) if len(row.tokens) > 1 or self._is_alone else ()
            length = row.end.bit_length() if self.kept.layers else 0
            pieces.setdefault((row.start > 0, length, self._rope.kind(row.end), *alone), []).append(i)
        return list(pieces.values())

    def _run(self, rows: Sequence[RowSpan], pool: FallbackPool) -> torch.Tensor:
        """Logits [rows, tokens, vocab_size]. Tokens upon a state go one by one: not every model takes more."""
        if self.kept.states:
            self._follow(rows)
        if not self.kept.states or rows[0].start == 0 or len(rows[0].tokens) == 1:
            return self._forward(rows, pool)
        (row,) = rows
        singles = [RowSpan([token], row.start + i, row.block_table) for i, token in enumerate(row.tokens)]
        return torch.cat([self._forward([single], pool) for single in singles], dim=1)

    def _follow(self, rows: Sequence[RowSpan]) -> None:
        """Note how far the states of `rows` will be; a state that has not seen the tokens before cannot go on."""
        for row in rows:
            block = int(row.block_table[0])
            if row.start and self._ends.get(block) != row.start:
                raise InvalidRequest(
                    f"cache_len {row.start} must be 0: a model with a state computes sequences from their first token"
                )
            self._ends[block] = row.end

    def _forward(self, rows: Sequence[RowSpan], pool: FallbackPool) -> torch.Tensor:
        stacked = StackedRows.of(rows, pool.block_size, self._device)
        given = self._adapter.give(stacked, pool)
        self._rope.forget()
        output = self._model(input_ids=stacked.input_ids, use_cache=True, **given)
        self._adapter.take(stacked, pool, given, output)
        logits: torch.Tensor = output.logits.float()
        return logits


def _firsts(rows: Sequence[RowSpan]) -> list[int]:
    """The first token of each row among those of the batch."""
    firsts, at = [], 0
    for row in rows:
        firsts.append(at)
        at += len(row.tokens)
    return firsts
