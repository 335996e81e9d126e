"""Detokenize incrementally, never splitting a character, and find stop strings.

Both are rebuilt silently over `output_ids` when a sequence is resumed. Knows no tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from funitel.proto.errors import WeightsError, translating

PREFIX_TOKENS = 5  # prompt tokens decoded along, so that the first piece keeps its leading space (TGI's choice)
REPLACEMENT = "\ufffd"


class TextCodec:
    """The tokenizer of a checkpoint folder: encode prompts of peers that send text, decode completions."""

    def __init__(self, folder: Path) -> None:
        self.path = path = folder / "tokenizer.json"
        if not path.is_file():
            raise WeightsError(f"{folder} holds no tokenizer.json")
        with translating(lambda error: WeightsError(f"{path} is not a readable tokenizer: {error}")):
            self._tokenizer: Tokenizer = Tokenizer.from_file(str(path))  # raises bare Exception for a malformed file
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}
        self._alone: dict[int, str] = {}  # texts of tokens that were decoded alone

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included; incomplete characters become U+FFFD."""
        if len(ids) == 1:
            text = self._alone.get(ids[0])
            if text is None:
                text = self._alone[ids[0]] = self._decode(ids)
            return text
        return self._decode(ids)

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def token_id(self, content: str) -> int | None:
        """Id of a token by its content."""
        found: int | None = self._tokenizer.token_to_id(content)
        return found

    def vocabulary(self) -> dict[str, int]:
        """Ids of all tokens by their content."""
        found: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return found

    def special_text(self, token_id: int) -> str | None:
        """Content of a special token, None for ordinary ones."""
        return self._special.get(token_id)


class Detokenizer:
    """Text of a growing sequence, one piece per token.

    A piece is "" while a character is incomplete and comes whole with the token that completes it. `text` is all
    pieces so far without special tokens.
    """

    def __init__(self, codec: TextCodec, prompt_ids: Sequence[int]) -> None:
        self._codec = codec
        self._ids = list(prompt_ids[-PREFIX_TOKENS:])
        self._prefix = 0  # tokens before it are done and out of reach
        self._read = len(self._ids)  # tokens before it have been turned into text
        self.text = ""

    def push(self, token_id: int) -> str:
        """Take the next token; return its piece, special tokens' content included."""
        special = self._codec.special_text(token_id)
        if special is not None:
            piece = self.flush() + special
            self._ids.append(token_id)
            self._prefix = self._read = len(self._ids)
            return piece
        self._ids.append(token_id)
        known = self._codec.decode(self._ids[self._prefix : self._read])
        whole = self._codec.decode(self._ids[self._prefix :])
        if len(whole) <= len(known) or whole.endswith(REPLACEMENT):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        piece = whole[len(known) :]
        self.text += piece
        return piece

    def flush(self) -> str:
        """Stop waiting for the rest of a character; return what there is of it, with U+FFFD."""
        if self._read == len(self._ids):
            return ""
        known = self._codec.decode(self._ids[self._prefix : self._read])
        piece = self._codec.decode(self._ids[self._prefix :])[len(known) :]
        self._prefix, self._read = self._read, len(self._ids)
        self.text += piece
        return piece


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Which stop sequence was found and where it lies in the text, in characters."""

    index: int
    start: int
    end: int


class StopMatcher:
    """Find the first stop sequence anywhere in a growing text, across token boundaries."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._searched = 0  # characters of the text that were searched
        self._floor = 0  # no stop begins before

    def skip(self, end: int) -> None:
        """Find no stop that begins before a character of the text."""
        self._floor = end

    def search(self, text: str, special: str | None = None) -> StopMatch | None:
        """Search what is new in `text`; `special` is the content of the special token just taken, if it was one."""
        if not self._stops:
            return None
        start = max(self._floor, self._searched - self._longest + 1)
        self._searched = len(text)
        found = [
            StopMatch(i, at, at + len(stop))
            for i, stop in enumerate(self._stops)
            if (at := text.find(stop, start)) >= 0
        ]
        if found:
            return min(found, key=lambda match: (match.start, match.end))
        if special in self._stops:
            return StopMatch(self._stops.index(special), len(text), len(text))
        return None
