"""Which tokens may follow in a transcript: the checkpoint's suppressed tokens, and the order of timestamps.

Timestamps come in pairs around texts, never decrease, and the first is near the beginning. Source: Whisper, arXiv
2212.04356, and `ApplyTimestampRules` of its decoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from funitel.model_server.sampling.grammar import FollowerState


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptTokens:
    """Token ids of a checkpoint that hears. Every id from `no_timestamps` + 1 on is a timestamp, in order of time."""

    end: int  # ids below it are text
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()  # as the first of a completion
    no_timestamps: int | None = None  # None: the model knows no timestamps
    max_initial: int | None = None  # the largest timestamp that may come first, counted from the smallest

    @property
    def first_timestamp(self) -> int | None:
        """The smallest timestamp; None: the model knows none."""
        return None if self.no_timestamps is None else self.no_timestamps + 1


class TranscriptRules:
    """A state of a sequence like that of a grammar, around one; where they leave no token, that one alone counts."""

    def __init__(
        self,
        tokens: TranscriptTokens,
        vocab_size: int,
        output_ids: Sequence[int],
        inner: FollowerState | None = None,
        *,
        with_timestamps: bool,
    ) -> None:
        """`output_ids` are the completion so far, which `inner` has taken."""
        self._tokens = tokens
        self._inner = inner
        self._completion = list(output_ids)
        self._first_timestamp = tokens.first_timestamp if with_timestamps else None
        width = -(-vocab_size // 32) * 32
        self._usual = np.arange(width) < vocab_size
        self._usual[list(tokens.suppressed)] = False
        if with_timestamps and tokens.no_timestamps is not None:
            self._usual[tokens.no_timestamps] = False

    @property
    def is_stuck(self) -> bool:
        """See `GrammarState`."""
        return self._inner is not None and self._inner.is_stuck

    def push(self, token_id: int) -> bool:
        """See `GrammarState`."""
        self._completion.append(token_id)
        return self._inner is None or self._inner.push(token_id)

    def forced(self, most: int) -> list[int]:
        """None: the rules might forbid a token that a grammar forces."""
        return []

    def fill(self, mask: np.ndarray) -> None:
        """Write which tokens may follow into one row of bits, see `GrammarState.fill`."""
        mask[:] = -1
        if self._inner is not None:
            self._inner.fill(mask)
        allowed = self._usual.copy()
        if not self._completion:
            allowed[list(self._tokens.suppressed_first)] = False
        if self._first_timestamp is not None:
            self._order(allowed, self._first_timestamp)
        ruled = mask & np.packbits(allowed, bitorder="little").view(np.int32)
        if ruled.any():
            mask[:] = ruled

    def _order(self, allowed: np.ndarray, first: int) -> None:
        """Forbid timestamps, or texts, that may not come next; `first` is the smallest timestamp."""
        before = self._completion
        if not before:
            allowed[:first] = False
            if self._tokens.max_initial is not None:
                allowed[first + self._tokens.max_initial + 1 :] = False
            return
        was_time = before[-1] >= first
        was_time_before = len(before) < 2 or before[-2] >= first
        if was_time and was_time_before:
            allowed[first:] = False
        elif was_time:
            allowed[: self._tokens.end] = False
        latest = next((token_id for token_id in reversed(before) if token_id >= first), None)
        if latest is not None:  # one that closes a text may come again, to open the next
            allowed[first : latest + (0 if was_time and not was_time_before else 1)] = False


def prefer_timestamps(scores: torch.Tensor, first: int) -> None:
    """Leave timestamps alone where all of them together are likelier than the likeliest other token, in place.

    Args:
        scores: [vocab_size] float32 of one row, -inf where a token may not follow.
        first: the smallest timestamp.
    """
    is_likelier = scores[first:].logsumexp(dim=0) > scores[:first].max()
    scores[:first].masked_fill_(is_likelier, -torch.inf)
