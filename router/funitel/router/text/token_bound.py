"""A lower bound on the number of tokens of a text, so that a text that cannot fit is refused without encoding it.

A token covers at most as many characters as the longest vocabulary entry has, and at most as many digits as the entry
with most digits. That is proven for byte-level and byte-fallback BPE with a normalizer and a pre-tokenizer that drop
nothing; other tokenizers have no bound, for one unknown token may cover a whole word.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

_WHITESPACE = b" \n\t\r"
_DIGITS = b"0123456789"
_CONTINUATION = bytes(range(0x80, 0xC0))  # of a character in UTF-8
_MAPPED_WHITESPACE = "ĠĊĉč▁ \n\t\r"  # as byte-level alphabets and Metaspace write it
# Each keeps the number of characters of an ASCII text, or adds some.
_KEEPING_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "Split", "Punctuation")
_KEEPING_NORMALIZERS = ("Prepend", "ByteLevel")
_ASCII_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase")

# Byte-level BPE writes printable bytes as themselves, and the others, in order, as characters from U+0100 on.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_SHIFTED = {byte: chr(0x100 + place) for place, byte in enumerate(b for b in range(256) if b not in _PRINTABLE)}
_BYTE_SYMBOLS = [_SHIFTED.get(byte, chr(byte)) for byte in range(256)]


@dataclass(frozen=True, slots=True)
class TokenBound:
    """For kinds of characters, the bytes of UTF-8 that are not of the kind, and the most of it that an entry has.

    `is_for_ascii` where other texts have no bound.
    """

    kinds: Sequence[tuple[bytes, int]]
    is_for_ascii: bool

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer) -> "TokenBound | None":
        """Read the bound of a tokenizer; None where there is none."""
        described = json.loads(tokenizer.to_str())
        normalizers = parts_of(described["normalizer"], "normalizers")
        pre_tokenizers = parts_of(described["pre_tokenizer"], "pretokenizers")
        vocabulary = tokenizer.get_vocab()
        is_byte_level = any(part["type"] == "ByteLevel" for part in (*normalizers, *pre_tokenizers))
        unknown = _unknown_bytes(described["model"], vocabulary, is_byte_level=is_byte_level)
        if unknown is None or not _keep_characters(normalizers, pre_tokenizers):
            return None
        uncounted = _CONTINUATION + unknown
        no_digits = bytes(byte for byte in range(256) if byte not in _DIGITS or byte in unknown)
        kinds = [
            (uncounted + _WHITESPACE, max(len(each) - sum(map(each.count, _MAPPED_WHITESPACE)) for each in vocabulary)),
            (no_digits, max(sum(map(each.count, "0123456789")) for each in vocabulary)),
        ]
        if not any(token["lstrip"] or token["rstrip"] for token in described["added_tokens"]):  # they absorb blanks
            kinds.append((uncounted, max(map(len, vocabulary))))
        return cls(kinds, any(part["type"] in _ASCII_NORMALIZERS for part in normalizers))

    def tokens_beyond(self, text: str, limit: int) -> int | None:
        """Return a number of tokens above `limit` that a text has at least; None where that is not proven."""
        if len(text) <= limit or (self.is_for_ascii and not text.isascii()):
            return None
        encoded = text.encode()
        bounds = [-(-len(encoded.translate(None, others)) // most) for others, most in self.kinds if most]
        at_least = max(bounds, default=0)
        return at_least if at_least > limit else None


def parts_of(component: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The members of a serialised normalizer or pre-tokenizer, which may be a sequence of them under `name`."""
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    return [part for member in component[name] for part in parts_of(member, name)]


def _unknown_bytes(model: dict[str, Any], vocabulary: dict[str, int], *, is_byte_level: bool) -> bytes | None:
    """Bytes that the tokenizer drops or makes unknown tokens of; None where that may happen to whole characters."""
    if model["type"] != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    if is_byte_level:
        return bytes(byte for byte in range(256) if _BYTE_SYMBOLS[byte] not in vocabulary)
    has_bytes = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return b"" if has_bytes else None


def _keep_characters(normalizers: list[dict[str, Any]], pre_tokenizers: list[dict[str, Any]]) -> bool:
    for part in normalizers:
        replaces_blank = part["type"] == "Replace" and part["pattern"] == {"String": " "} and len(part["content"]) == 1
        if not replaces_blank and part["type"] not in (*_KEEPING_NORMALIZERS, *_ASCII_NORMALIZERS):
            return False
    return all(part["type"] in _KEEPING_PRE_TOKENIZERS and part.get("behavior") != "Removed" for part in pre_tokenizers)
