"""Encode texts with a `tokenizers.Tokenizer`: what threads and encoder processes both run. Blocking.

`CALLS` are the functions by name; their arguments and answers are JSON. The library works without the interpreter's
lock in `encode_batch_fast`, which computes no offsets.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import tokenizers

from funitel.router.text.control_text import ControlText, Spans
from funitel.router.text.control_tokens import ControlTokenGuard
from funitel.router.text.left_cut import can_cut, find_cut

NO_CONTROL_TEXT = ControlText(())
MAX_LISTED_TOKENS = 1 << 18  # of an answer that lists the tokens of a text
MIN_CUT_CHARACTERS = 1 << 16  # shorter texts are encoded whole


class EncodeCalls:
    """The functions, for one tokenizer and its control tokens. Thread-safe."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, control: ControlText = NO_CONTROL_TEXT) -> None:
        tokenizer.no_truncation()  # a file may ask for either; neither is part of encoding
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.control = control
        self._guard = ControlTokenGuard(tokenizer, control)
        self._truncating = lru_cache(maxsize=2)(self._make_truncating)

    def run(self, call: str, arguments: Mapping[str, Any]) -> Any:
        """Call a function of `CALLS`; the library raises bare Exception where it cannot encode."""
        return CALLS[call](self, **arguments)

    def prompt(
        self, text: str, add_special_tokens: bool, plain: Spans | None, max_tokens: int, keep_last: int | None
    ) -> Any:
        """Return the ids of a text, of them the last `keep_last`; their number alone where that is > `max_tokens`.

        `plain` are spans in which control tokens are ordinary text.
        """
        is_guarded = self._is_guarded(plain)
        ids = None if keep_last is None or is_guarded else self._last(text, add_special_tokens, keep_last)
        if ids is None:
            ids = (
                self._guarded_ids(text, add_special_tokens, plain or [])
                if is_guarded
                else self._ids(text, add_special_tokens)
            )
            ids = ids if keep_last is None else ids[-keep_last:]
        return ids if len(ids) <= max_tokens else len(ids)

    def batch(self, texts: Sequence[Any], max_tokens: int, truncate: str | None) -> list[tuple[Any, list[int]]]:
        """Return ids and type ids of texts and pairs, truncated to `max_tokens` at their "left" or "right" end.

        Untruncated ones that are longer give their number of tokens in place of the ids.
        """
        tokenizer = self.tokenizer if truncate is None else self._truncating(truncate, max_tokens)
        given = [text if isinstance(text, str) else tuple(text) for text in texts]
        has_pairs = any(not isinstance(text, str) for text in given)
        found = tokenizer.encode_batch_fast(given)
        return [
            (each.ids if len(each) <= max_tokens else len(each), each.type_ids if has_pairs else []) for each in found
        ]

    def rows(self, text: str, add_special_tokens: bool, plain: Spans | None) -> Any:
        """Return a JSON list of the tokens of a text as `/tokenize` shows them; their number where they are too many.

        Each has its id, its text, and its start and stop in bytes.
        """
        if self._is_guarded(plain):
            guarded = self._guard.guarded(text, plain or [])
            encoding = self._guard.tokenizer.encode(guarded.text, add_special_tokens=add_special_tokens)
            ids, offsets = self._guard.ids(encoding.ids), guarded.offsets(encoding.offsets)
        else:
            encoding = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
            ids, offsets = encoding.ids, encoding.offsets
        if len(ids) > MAX_LISTED_TOKENS:
            return len(ids)
        at = range(len(text) + 1) if text.isascii() else [0, *accumulate(len(each.encode()) for each in text)]
        rows = [
            {"id": id, "text": text[begin:end], "start": at[begin], "stop": at[end]}
            for id, (begin, end) in zip(ids, offsets, strict=True)
        ]
        return json.dumps(rows, ensure_ascii=False, separators=(",", ":"))

    def _is_guarded(self, plain: Spans | None) -> bool:
        return bool(plain) or (plain is not None and self._guard.is_always_needed)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        [encoding] = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def _guarded_ids(self, text: str, add_special_tokens: bool, plain: Spans) -> list[int]:
        guarded = self._guard.guarded(text, plain)
        [encoding] = self._guard.tokenizer.encode_batch_fast([guarded.text], add_special_tokens=add_special_tokens)
        return self._guard.ids(encoding.ids)

    @cached_property
    def _can_cut(self) -> bool:
        return can_cut(self.tokenizer)

    def _last(self, text: str, add_special_tokens: bool, count: int) -> list[int] | None:
        """The last `count` tokens by encoding no more than is needed; None where that is the whole text."""
        wanted = count
        while len(text) >= MIN_CUT_CHARACTERS and self._can_cut:
            cut, num_unused = find_cut(text, wanted)
            if not cut:
                break
            ids = self._ids(text[cut:], add_special_tokens)
            if len(ids) >= count + num_unused:
                return ids[-count:]
            wanted *= 4
        return None

    def _make_truncating(self, direction: str, max_tokens: int) -> tokenizers.Tokenizer:
        """Copy the tokenizer: truncation is part of its state, which other threads use at the same time."""
        tokenizer = tokenizers.Tokenizer.from_str(self.tokenizer.to_str())
        tokenizer.enable_truncation(max_tokens, direction=direction)
        return tokenizer


CALLS: Mapping[str, Callable[..., Any]] = {
    "prompt": EncodeCalls.prompt,
    "batch": EncodeCalls.batch,
    "rows": EncodeCalls.rows,
}
