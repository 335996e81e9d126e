"""End answers in JSON that a grammar would let go on until they are cut off.

Near the last token allowed, only what closes the answer may follow: first no further entries, then the ends of strings
and numbers, too. Strings, entries, numbers and depth are bounded in any case, unless the schema states more. What may
follow is a function of the tokens so far and of the number allowed, so it does not depend on how steps were taken.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from funitel.proto.grammar.json_schema import AnswerBounds

MAX_NUMBER = 64  # characters of a number
MAX_DEPTH = 64  # objects and arrays within each other
SPARE = 6  # tokens that are left when the answer has been closed
MAX_GROWTH = 64  # tokens that are kept free for what one token may open
MAX_CLOSING = 256  # tokens; an answer that takes more to close is not closed
RETRY = 8  # tokens until the next try, where no way to close was found

_STRUCTURE: Final = b"}] "


class Haste(IntEnum):
    """How much of what may follow is left out."""

    NONE = 0
    NO_ENTRIES = 1  # what opens another entry of an object or array
    CLOSE = 2  # all that closes nothing


class TokenKinds:
    """Sets of tokens by how they begin and what they have, as bits [vocab_size / 32] int32."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.texts = [tokenizer.decode_bytes([token_id]) for token_id in range(tokenizer.vocab_size)]
        self.vocab_size = tokenizer.vocab_size
        self.eos = self._bits(lambda text: False)
        for token_id in tokenizer.eos_tokens:
            self.eos.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
        ends = self._bits(lambda text: text[:1] in (b"}", b"]") and not text.strip(_STRUCTURE))
        quote = self._bits(lambda text: text[:1] == b'"')
        string_end = self._bits(lambda text: text[:1] == b'"' and not text[1:].strip(_STRUCTURE))
        comma = self._bits(lambda text: text[:1] == b",")
        scalar = self._bits(lambda text: text in (b'"', b'""') or text.isdigit())
        self.string_end = [string_end, quote]
        self.within_string = [self._bits(lambda text: b'"' not in text) | string_end]
        one_value = self._bits(lambda text: not any(opening in text.rstrip(b" ]}")[:-1] for opening in (b"[", b"{")))
        self.no_entry = [self.eos, ends, one_value]
        self.closing = [self.eos, ends, comma, scalar, one_value]
        self.no_number = [self._bits(lambda text: text[:1] not in b"0123456789+-.eE")]
        self.opening = [self._bits(lambda text: text[:1] in (b"{", b"["))]
        self.next_entry = [comma]
        self.no_opening = [ends, self._bits(lambda text: b"{" not in text and b"[" not in text)]

    def _bits(self, belongs: Callable[[bytes], bool]) -> np.ndarray:
        chosen = np.zeros(-(-self.vocab_size // 32) * 32, dtype=np.uint8)
        chosen[: self.vocab_size] = [bool(text) and belongs(text) for text in self.texts]
        return np.packbits(chosen, bitorder="little").view(np.int32)


@dataclass(slots=True)
class JsonPosition:
    """Where a JSON text stands, after each of its bytes."""

    in_string: bool = False
    string_length: int = 0  # characters of the string at hand
    number_length: int = 0
    containers: list[tuple[bool, int]] = field(default_factory=list)  # whether an object, and its entries so far
    last: int = 0  # byte outside strings, spaces left out
    _is_escaped: bool = False

    def copy(self) -> "JsonPosition":
        return JsonPosition(
            self.in_string, self.string_length, self.number_length, list(self.containers), self.last, self._is_escaped
        )

    def feed(self, text: bytes) -> None:
        """Take the bytes of the next token."""
        for byte in text:
            if self.in_string:
                self._feed_string(byte)
            elif byte != 0x20:
                self._feed_structure(byte)

    def _feed_string(self, byte: int) -> None:
        self.string_length += byte & 0xC0 != 0x80
        if self._is_escaped:
            self._is_escaped = False
        elif byte == ord("\\"):
            self._is_escaped = True
        elif byte == ord('"'):
            self.in_string = False

    def _feed_structure(self, byte: int) -> None:
        self.last = byte
        self.number_length = self.number_length + 1 if byte in b"0123456789+-.eE" else 0
        if byte == ord('"'):
            self.in_string, self.string_length = True, 0
        elif byte in b"{[":
            self.containers.append((byte == ord("{"), 1))
        elif byte in b"}]" and self.containers:
            self.containers.pop()
        elif byte == ord(",") and self.containers:
            is_object, count = self.containers[-1]
            self.containers[-1] = is_object, count + 1


@dataclass
class JsonAnswers:
    """What sequences of one JSON grammar share: its start, the bounds that its schema states, and kinds of tokens."""

    matcher: LLMatcher
    bounds: AnswerBounds
    kinds: TokenKinds

    @cached_property
    def whole_length(self) -> int | None:
        """How many tokens the shortest answer has, as far as it was found."""
        return self.closing_length(self.matcher, JsonPosition(), MAX_CLOSING)

    @cached_property
    def growth(self) -> int:
        """Tokens that the answer may need in addition when one entry is opened, at most `MAX_GROWTH`."""
        found = self._length(self.matcher, JsonPosition(), MAX_GROWTH, self._opening)
        return MAX_GROWTH if found is None else found

    def closing_length(self, matcher: LLMatcher, position: JsonPosition, most: int) -> int | None:
        """How many tokens close an answer from where it stands; None if more than `most`, or no way is found."""
        return self._length(matcher, position, most, lambda at: self.preferred(at, Haste.CLOSE))

    def preferred(self, position: JsonPosition, haste: Haste) -> Sequence[np.ndarray]:
        """Sets of tokens; those of the first that has any allowed ones may follow, and all if none has."""
        kinds, bounds = self.kinds, self.bounds
        is_full = bool(position.containers) and position.containers[-1][1] >= bounds.entries
        if position.in_string:
            if haste is Haste.CLOSE or position.string_length >= bounds.string:
                return kinds.string_end
            in_array = bool(position.containers) and not position.containers[-1][0]
            return kinds.within_string if is_full or (haste and in_array) else ()
        if haste is Haste.CLOSE:
            return kinds.closing
        if haste or is_full:
            return kinds.no_entry
        if position.number_length >= MAX_NUMBER:
            return kinds.no_number
        return kinds.no_opening if len(position.containers) >= MAX_DEPTH else ()

    def _opening(self, position: JsonPosition) -> Sequence[np.ndarray]:
        """Prefer every key of an object, and one entry of an array."""
        kinds = self.kinds
        if position.in_string:
            return kinds.string_end
        is_object = bool(position.containers) and position.containers[-1][0]
        if chr(position.last) in "[:":
            return kinds.opening
        return kinds.next_entry if is_object else kinds.closing

    def _length(
        self,
        matcher: LLMatcher,
        position: JsonPosition,
        most: int,
        preferred: Callable[[JsonPosition], Sequence[np.ndarray]],
    ) -> int | None:
        matcher, position = matcher.deep_copy(), position.copy()
        mask = np.zeros(-(-self.kinds.vocab_size // 32), dtype=np.int32)
        count = 0
        while count <= most:
            if matcher.is_stopped() or matcher.is_accepting():
                return None if matcher.is_error() else count
            token_ids = matcher.compute_ff_tokens()
            if not token_ids:
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
                narrow(mask, preferred(position))
                token_ids = _chosen(mask, count)
            if not token_ids or not matcher.consume_tokens(token_ids):
                return None
            count += len(token_ids)
            for token_id in token_ids:
                position.feed(self.kinds.texts[token_id])
        return None


def _chosen(mask: np.ndarray, turn: int) -> list[int]:
    """One of the tokens of a mask, another at every turn; none of an empty one."""
    words = np.flatnonzero(mask)
    if not len(words):
        return []
    word = int(words[turn * 7919 % len(words)])
    bits = int(mask.view(np.uint32)[word])
    return [word * 32 + (bits & -bits).bit_length() - 1]


class JsonEnding:
    """The end of one sequence in JSON: what may follow, given how many tokens are left.

    Args:
        grammar: what the sequence follows.
        num_left: tokens that it may have.
    """

    def __init__(self, grammar: JsonAnswers, num_left: int) -> None:
        self._grammar = grammar
        self._position = JsonPosition()
        self._num_left = num_left
        self._max_growth = num_left // 4
        self._check_at = num_left
        self.haste = Haste.NONE
        self._decide_by(grammar.whole_length)

    def take(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens of the answer."""
        self._num_left -= len(token_ids)
        for token_id in token_ids:
            self._position.feed(self._grammar.kinds.texts[token_id])

    def decide(self, matcher: LLMatcher) -> None:
        """Decide how much may follow where the answer stands, unless a token is forced there."""
        if self._num_left <= self._check_at and not matcher.compute_ff_tokens():
            self._decide_by(self._grammar.closing_length(matcher, self._position, min(self._num_left, MAX_CLOSING)))

    def _decide_by(self, length: int | None) -> None:
        """Decide by how many tokens close the answer, and when to look again."""
        if length is None:
            self._check_at = self._num_left - max(RETRY, self._num_left // 8)
            return
        spare = self._num_left - length - length // 4 - SPARE  # a model may write the same in more tokens
        growth = min(MAX_GROWTH, self._max_growth)
        if 0 < spare < 2 * growth:
            growth = min(self._grammar.growth, growth)
        if spare <= 0:
            self.haste, self._check_at = Haste.CLOSE, -1
        elif spare <= growth:
            self.haste, self._check_at = Haste.NO_ENTRIES, self._num_left - max(1, spare // 2)
        else:
            self._check_at = self._num_left - max(1, (spare - growth) // 2)

    def narrow(self, mask: np.ndarray) -> None:
        """Leave out of a mask [vocab_size / 32] int32 what may not follow any more, unless that is all it has."""
        narrow(mask, self._grammar.preferred(self._position, self.haste))


def narrow(mask: np.ndarray, preferred: Sequence[np.ndarray]) -> None:
    """Leave of a mask the tokens of the first set that has any of them; all if none has."""
    for bits in preferred:
        narrowed = mask[: len(bits)] & bits[: len(mask)]
        if narrowed.any():
            mask[: len(narrowed)] = narrowed
            mask[len(narrowed) :] = 0
            return
