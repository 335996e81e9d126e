"""Which tokens may follow in one sequence: its grammar, its least length, and tokens that it must or must not have.

Among the latter are those that would repeat an n-gram.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from funitel.model_server.sampling.grammar import GrammarState, TokenMasks
from funitel.model_server.sampling.token_history import TokenHistory
from funitel.proto.step import SamplingParams


class TokenRules:
    """A state of a sequence like that of a grammar, with further rules; where they leave no token, only the grammar."""

    def __init__(
        self,
        params: SamplingParams,
        grammar: GrammarState | None,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        output_ids: Sequence[int],
        prompt_ids: Sequence[int] = (),
    ) -> None:
        """`output_ids` are the completion so far, which the grammar has taken; n-grams are those of the prompt too."""
        self._params = params
        self._grammar = grammar
        self._vocab_size = vocab_size
        self._all = _bits(np.arange(vocab_size), vocab_size)
        self._allowed = _bits(params.allowed_token_ids, vocab_size) if params.allowed_token_ids else self._all
        self._endings = _bits([*eos_token_ids, *params.stop_token_ids], vocab_size)
        self._tokens = list(output_ids)
        self._ngram_size = 0 if params.strategy is None else params.strategy.no_repeat_ngram_size
        self._history = TokenHistory(chain(prompt_ids, output_ids) if self._ngram_size else ())

    @property
    def is_stuck(self) -> bool:
        """See `GrammarState`."""
        return self._grammar is not None and self._grammar.is_stuck

    def push(self, token_id: int) -> bool:
        """See `GrammarState`."""
        self._tokens.append(token_id)
        if self._ngram_size:
            self._history.push(token_id)
        return self._grammar is None or self._grammar.push(token_id)

    def forced(self, most: int) -> list[int]:
        """None: a token is forced by a grammar only, and the other rules might forbid it."""
        return []

    def fill(self, mask: np.ndarray) -> None:
        """Write which tokens may follow into one row of bits, see `GrammarState.fill`."""
        mask[:] = self._all
        if self._grammar is not None:
            self._grammar.fill(mask)
        ruled = mask & self._allowed
        if len(self._tokens) < self._params.min_new_tokens:
            ruled &= ~self._endings
        if self._ngram_size:
            ruled &= ~_bits(self._history.followers(self._ngram_size - 1), self._vocab_size)
        words = ruled.view(np.uint32)
        for *before, last in self._params.banned_tokens:
            if not before or self._tokens[-len(before) :] == before:
                words[last // 32] &= np.uint32(~(1 << last % 32) & 0xFFFFFFFF)
        if ruled.any():
            mask[:] = ruled


def _bits(ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    masks = TokenMasks.naming({0: np.asarray(ids, dtype=np.int64)}, vocab_size)
    assert masks is not None
    bits: np.ndarray = masks.bits[0]
    return bits
