"""Constrain sampling by grammars: compiled once for many sequences, with a state for each that masks tokens.

Compiling may happen on any thread, all else on the compute thread. The engine is llguidance (ADR 6).
"""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Protocol

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from funitel.model_server.sampling.json_ending import JsonAnswers, JsonEnding, TokenKinds
from funitel.proto.errors import InvalidRequest
from funitel.proto.grammar.compiler import compile_grammar
from funitel.proto.grammar.json_schema import AnswerBounds
from funitel.proto.step import GrammarType, SamplingParams

CAPACITY = 32  # grammars kept, of some 30 MB at most; a running sequence keeps its own


class FollowerState(Protocol):
    """What may follow in one sequence."""

    @property
    def is_stuck(self) -> bool:
        """Whether nothing can follow, and the text is not complete either."""

    def push(self, token_id: int) -> bool:
        """Take the next token; False if it is not allowed here."""

    def forced(self, most: int) -> list[int]:
        """Take the tokens that alone can follow, at most so many, an end token included, and return them."""

    def fill(self, mask: np.ndarray) -> None:
        """Write which tokens may follow into one row of bits [vocab_size / 32] int32."""


class GrammarState:
    """Where one sequence stands in its grammar. Special tokens are never allowed, save an end token at an end."""

    def __init__(
        self,
        matcher: LLMatcher,
        eos_token_ids: Sequence[int],
        *,
        ignores_eos: bool,
        ending: JsonEnding | None = None,
    ) -> None:
        """`ending` ends an answer in JSON in time."""
        self._matcher = matcher
        self._ending = ending
        self._eos = list(eos_token_ids)
        self._ignores_eos = ignores_eos
        self._is_stuck = False

    @property
    def is_stuck(self) -> bool:
        """Whether nothing can follow, and the text is not complete either."""
        return self._is_stuck

    def push(self, token_id: int) -> bool:
        """Take the next token; False if the grammar does not allow it here."""
        if token_id in self._eos:
            return True
        if self._ending is not None:
            self._ending.take([token_id])
        return self._matcher.consume_token(token_id)

    def replay(self, token_ids: Sequence[int]) -> bool:
        """Take tokens that were chosen before, as `fill` and `push` did; False if the grammar does not allow them."""
        for token_id in token_ids:
            self._decide()
            if not self.push(token_id):
                return False
        return True

    def forced(self, most: int) -> list[int]:
        """Take the tokens that alone can follow, at most so many, an end token included, and return them."""
        found: list[int] = []
        while len(found) < most and not self._matcher.is_stopped():
            following = self._matcher.compute_ff_tokens()[: most - len(found)]
            if not following or not self._matcher.consume_tokens(following):
                return found
            if self._ending is not None:
                self._ending.take(following)
            found += following
        if len(found) < most and self._is_complete:
            found.append(self._eos[0])
        return found

    @property
    def _is_complete(self) -> bool:
        """Whether the text is whole and nothing may be added to it."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def fill(self, mask: np.ndarray) -> None:
        """Write which tokens may follow into one row of bits [vocab_size / 32] int32; where none may, an end token."""
        self._decide()
        if not self._matcher.is_stopped():
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if not self._matcher.is_error() and mask.any():
                self._leave_out_eos(mask)
                if self._ending is not None:
                    self._ending.narrow(mask)
                return
        self._is_stuck = not self._is_complete
        mask[:] = 0
        _set_bit(mask, self._eos[0])

    def _decide(self) -> None:
        if self._ending is not None and not self._matcher.is_stopped():
            self._ending.decide(self._matcher)

    def _leave_out_eos(self, mask: np.ndarray) -> None:
        """Where end tokens are ignored, take them out as long as anything else may follow."""
        if self._ignores_eos:
            without = mask.copy()
            for token_id in self._eos:
                _clear_bit(without, token_id)
            mask[:] = without if without.any() else mask


def _set_bit(mask: np.ndarray, token_id: int) -> None:
    mask.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


def _clear_bit(mask: np.ndarray, token_id: int) -> None:
    mask.view(np.uint32)[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """What may follow in some rows of a batch, as bits."""

    rows: list[int]
    bits: np.ndarray  # [len(rows), vocab_size / 32] int32, lowest bit first

    @classmethod
    def of(cls, states: Sequence[FollowerState | None], vocab_size: int) -> "TokenMasks | None":
        """The masks of a batch, one state per row; None when no row has a grammar."""
        rows = [row for row, state in enumerate(states) if state is not None]
        if not rows:
            return None
        bits = np.zeros((len(rows), -(-vocab_size // 32)), dtype=np.int32)
        for place, row in enumerate(rows):
            state = states[row]
            assert state is not None
            state.fill(bits[place])
        return cls(rows, bits)

    @classmethod
    def naming(cls, ids: Mapping[int, np.ndarray], vocab_size: int) -> "TokenMasks | None":
        """Masks of the tokens that are named for some rows; None for no rows."""
        if not ids:
            return None
        is_named = np.zeros((len(ids), -(-vocab_size // 32) * 32), dtype=np.uint8)
        for line, named in zip(is_named, ids.values(), strict=True):
            line[named] = 1
        return cls(list(ids), np.packbits(is_named, axis=1, bitorder="little").view(np.int32))


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A compiled grammar, to be copied before use; `json`: how its answers end, if they are JSON."""

    matcher: LLMatcher
    json: JsonAnswers | None


class GrammarCompiler:
    """Compiles grammars over the tokenizer of a checkpoint, and keeps the latest."""

    def __init__(self, tokenizer_path: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer_path = tokenizer_path
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._lock = Lock()
        self._loading = Lock()
        self._tokenizer: LLTokenizer | None = None
        self._kinds: TokenKinds | None = None
        self._compiled: OrderedDict[tuple[GrammarType, str], CompiledGrammar] = OrderedDict()

    def compile(self, kind: GrammarType, text: str) -> CompiledGrammar:
        """The compiled grammar.

        Raises:
            InvalidRequest: the grammar, or any grammar over this tokenizer, cannot be compiled.
        """
        key = kind, text
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
        matcher = compile_grammar(kind, text, self._vocabulary())
        json_grammar = None
        if kind is GrammarType.JSON:
            json_grammar = JsonAnswers(matcher, AnswerBounds.of(json.loads(text)), self._token_kinds())
        compiled = CompiledGrammar(matcher, json_grammar)
        with self._lock:
            self._compiled[key] = compiled
            if len(self._compiled) > CAPACITY:
                self._compiled.popitem(last=False)
        return compiled

    def start(
        self, params: SamplingParams, output_ids: Sequence[int], *, num_left: int, ignores_eos: bool
    ) -> GrammarState:
        """The state of a sequence that has these completion tokens already, and may have `num_left` with them.

        Raises:
            InvalidRequest: the grammar cannot be compiled, or does not allow these tokens.
        """
        compiled = self.compile(params.grammar_type, params.grammar)
        ending = None if compiled.json is None else JsonEnding(compiled.json, num_left)
        state = GrammarState(compiled.matcher.deep_copy(), self._eos, ignores_eos=ignores_eos, ending=ending)
        if not state.replay(output_ids):
            raise InvalidRequest("output_ids are not a text that the grammar allows", "grammar")
        return state

    def _token_kinds(self) -> TokenKinds:
        vocabulary = self._vocabulary()
        with self._loading:
            if self._kinds is None:
                self._kinds = TokenKinds(vocabulary)
            return self._kinds

    def _vocabulary(self) -> LLTokenizer:
        """The engine's view of the tokenizer, made when first needed: it takes half a second."""
        with self._loading:
            if self._tokenizer is None:
                try:
                    self._tokenizer = LLTokenizer(
                        str(self._tokenizer_path), n_vocab=self._vocab_size, eos_token=self._eos
                    )
                except ValueError as error:
                    raise InvalidRequest(f"grammars are not supported with this model's tokenizer: {error}") from error
            return self._tokenizer
