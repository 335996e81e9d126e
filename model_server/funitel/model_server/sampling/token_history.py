"""The tokens of a sequence, to look for what followed its latest ones before."""

from collections.abc import Iterable

import numpy as np

_MIN_CAPACITY = 256


class TokenHistory:
    """A growing list of token ids."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._ids = np.fromiter(token_ids, dtype=np.int64)
        self._count = len(self._ids)

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> np.ndarray:
        """All of them, in order: [num_tokens] int64."""
        return self._ids[: self._count]

    def push(self, token_id: int) -> None:
        """Append a token."""
        if self._count == len(self._ids):
            grown = np.zeros(max(2 * self._count, _MIN_CAPACITY), dtype=np.int64)
            grown[: self._count] = self.ids
            self._ids = grown
        self._ids[self._count] = token_id
        self._count += 1

    def followers(self, count: int) -> np.ndarray:
        """What followed each earlier occurrence of the last `count` tokens: [num_occurrences] int64.

        All tokens for a `count` of 0, none where there are fewer than `count`.
        """
        ids = self.ids
        if count > len(ids):
            return ids[:0]
        places = np.arange(count, len(ids))  # of what follows
        for back in range(1, count + 1):
            places = places[ids[places - back] == ids[-back]]
        followers: np.ndarray = ids[places]
        return followers
