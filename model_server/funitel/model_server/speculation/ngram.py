"""Drafts by lookup: what followed the latest tokens of a sequence where they came before, in its prompt or completion.

Of the earlier places that end with the sequence's last `MIN_MATCH` tokens, the latest `MAX_PLACES` are compared
backwards, and the one that agrees with most tokens, at most `MAX_MATCH`, is gone on from; the latest of equals. A match
of n tokens gives at most n drafts: what agreed for long is likelier to agree for longer.
"""

from array import array
from collections.abc import Sequence, Set

import torch

from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.speculation.interface import DraftRow

MIN_MATCH = 2
MAX_MATCH = 8
MAX_PLACES = 8  # compared in a step, of which the cost so is bounded whatever the text


class NgramIndex:
    """Where the pairs of a growing list of tokens are; taking a token in costs the same however many there are."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], int] = {}  # by pair, the number of tokens up to and with it
        self._before = array("i")  # by that number - MIN_MATCH, that of the same pair before; 0: none

    def __len__(self) -> int:
        """Tokens taken in; 0 for fewer than a pair."""
        return len(self._before) + MIN_MATCH - 1 if self._before else 0

    def drafts(self, tokens: Sequence[int], limit: int) -> list[int]:
        """At most `limit` tokens that may follow; takes in what was added to `tokens` since the last call."""
        count = len(tokens)
        if count < MIN_MATCH:
            return []
        latest, before = self._latest, self._before
        for end in range(len(before) + MIN_MATCH, count + 1):
            pair = tokens[end - 2], tokens[end - 1]
            before.append(latest.get(pair, 0))
            latest[pair] = end
        place, best, longest = before[count - MIN_MATCH], 0, 0
        for _ in range(MAX_PLACES):
            if not place or longest == MAX_MATCH:
                break
            size = _agreement(tokens, place)
            if size > longest:
                best, longest = place, size
            place = before[place - MIN_MATCH]
        return list(tokens[best : best + min(limit, longest)]) if best else []


def _agreement(tokens: Sequence[int], place: int) -> int:
    """How many tokens before `place` are those at the end, at most `MAX_MATCH`."""
    count = len(tokens)
    for size in range(min(MAX_MATCH, place)):
        if tokens[place - 1 - size] != tokens[count - 1 - size]:
            return size
    return min(MAX_MATCH, place)


class NgramDrafter:
    """See Drafter. Its drafts depend on the tokens of a row alone, so every rank makes the same."""

    name = "ngram"
    hidden_layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._indexes: dict[int, NgramIndex] = {}  # by request

    def observe(self, batch: ForwardBatch, next_ids: torch.Tensor, hidden: torch.Tensor | None) -> None:
        """See Drafter; nothing is read of a forward."""

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """See Drafter."""
        return [self._index(row.request_id, row.tokens).drafts(row.tokens, row.limit) for row in rows]

    def forget_all_but(self, request_ids: Set[int]) -> None:
        """Drop the indexes of sequences that have ended."""
        if len(self._indexes) > 2 * len(request_ids):
            self._indexes = {i: index for i, index in self._indexes.items() if i in request_ids}

    def _index(self, request_id: int, tokens: Sequence[int]) -> NgramIndex:
        index = self._indexes.get(request_id)
        if index is None or len(index) > len(tokens):  # another sequence has the id now
            index = self._indexes[request_id] = NgramIndex()
        return index
