"""Texts -> windows of tokens, each predicted in one context, and which tokens of each are scored."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.proto.errors import SettingsError


@dataclass(frozen=True)
class TokenizedText:
    """A text as tokens, with the special tokens that its tokenizer adds.

    Attributes:
        ids: the tokens.
        sizes: [num_tokens] int64, bytes of the text that each token ends behind and the one before it does not.
        num_opening: leading tokens that the tokenizer adds to every text, such as the one of its beginning.
    """

    ids: list[int]
    sizes: np.ndarray
    num_opening: int = 0

    @classmethod
    def of(cls, codec: TextCodec, text: str) -> "TokenizedText":
        """Tokenise a text."""
        ids, ends = codec.encode_with_ends(text, add_special_tokens=True)
        bytes_before = np.zeros(len(text) + 1, dtype=np.int64)  # of so many characters
        np.cumsum([len(character.encode("utf-8", "surrogatepass")) for character in text], out=bytes_before[1:])
        reached = np.maximum.accumulate(bytes_before[np.array(ends, dtype=np.int64)])
        opening = takewhile(
            lambda each: each[1] == 0 and codec.special_text(each[0]) is not None, zip(ids, ends, strict=True)
        )
        return cls(ids, np.diff(reached, prepend=0), len(list(opening)))

    def cut(self, num_tokens: int) -> "TokenizedText":
        """The first `num_tokens` tokens."""
        return TokenizedText(self.ids[:num_tokens], self.sizes[:num_tokens], self.num_opening)


@dataclass(frozen=True)
class Window:
    """Tokens that are predicted in one context; the first `num_context` are not scored, at least one.

    Attributes:
        ids: the tokens.
        num_context: leading tokens that are only context.
        num_bytes: bytes of the text in its scored tokens.
    """

    ids: Sequence[int]
    num_context: int
    num_bytes: int


def windows_of(text: TokenizedText, window: int, stride: int) -> Iterator[Window]:
    """Cut a text into windows of at most `window` tokens that begin at its token 0, `stride`, 2 * `stride` and so on.

    As every prompt that is served, each window begins with the opening tokens, which are not scored; where a window has
    no room for `stride` tokens behind them, the next begins where it ends. A window scores the tokens that no window
    before it has, but for its first one if there are no opening tokens: that has no context. So with a `stride`
    below `window`, or with opening tokens, every token is scored exactly once, but for the first of a text without
    opening tokens; otherwise the first token of every window is not. The last window is the first that reaches the end
    of the text. Windows without a token to score are left out.

    Args:
        text: of any length.
        window: at least 2.
        stride: 1..window.

    Raises:
        SettingsError: the opening tokens fill a window.
    """
    opening, body, sizes = text.ids[: text.num_opening], text.ids[text.num_opening :], text.sizes[text.num_opening :]
    room = window - len(opening)
    if room < 1:
        raise SettingsError(f"--window {window} has no room behind the {len(opening)} tokens that begin every text")
    scored = 0  # tokens of the text that windows have been through
    for begin in range(0, len(body), min(stride, room)):
        end = min(begin + room, len(body))
        first = max(scored, begin if opening else begin + 1)
        if first < end:
            yield Window(opening + body[begin:end], len(opening) + first - begin, int(sizes[first:end].sum()))
        scored = end
        if end == len(body):
            return
