"""Texts -> windows of tokens, each predicted in one context, and which tokens of each are scored."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from funitel.model_server.sequence.detokenizer import TextCodec


@dataclass(frozen=True)
class TokenizedText:
    """A text as tokens, with the special tokens that its tokenizer adds.

    Attributes:
        ids: the tokens.
        sizes: [num_tokens] int64, bytes of the text that each token ends behind and the one before it does not.
    """

    ids: list[int]
    sizes: np.ndarray

    @classmethod
    def of(cls, codec: TextCodec, text: str) -> "TokenizedText":
        """Tokenise a text."""
        ids, ends = codec.encode_with_ends(text, add_special_tokens=True)
        bytes_before = np.zeros(len(text) + 1, dtype=np.int64)  # of so many characters
        np.cumsum([len(character.encode("utf-8", "surrogatepass")) for character in text], out=bytes_before[1:])
        reached = np.maximum.accumulate(bytes_before[np.array(ends, dtype=np.int64)])
        return cls(ids, np.diff(reached, prepend=0))

    def cut(self, num_tokens: int) -> "TokenizedText":
        """The first `num_tokens` tokens."""
        return TokenizedText(self.ids[:num_tokens], self.sizes[:num_tokens])


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
    """Cut a text into windows of at most `window` tokens that begin at 0, `stride`, 2 * `stride` and so on.

    A window scores the tokens that no window before it has, but for its own first token, which has no context. So with
    a `stride` below `window` every token but the first of the text is scored, exactly once; with one equal to it the
    first token of every window is not. The last window is the first that reaches the end of the text. Windows without
    a token to score are left out.

    Args:
        text: of any length.
        window: at least 2.
        stride: 1..window.
    """
    scored = 0  # tokens of the text that windows have been through
    for begin in range(0, len(text.ids), stride):
        end = min(begin + window, len(text.ids))
        num_context = max(1, scored - begin)
        if begin + num_context < end:
            yield Window(text.ids[begin:end], num_context, int(text.sizes[begin + num_context : end].sum()))
        scored = end
        if end == len(text.ids):
            return
