"""The tokenizer of a checkpoint folder, for the incremental detokenizer and the stop strings of `proto`."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from funitel.proto.detokenizer import Detokenizer, StopMatch, StopMatcher
from funitel.proto.errors import WeightsError, translating

__all__ = ["Detokenizer", "StopMatch", "StopMatcher", "TextCodec"]


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

    def encode_with_ends(self, text: str, *, add_special_tokens: bool) -> tuple[list[int], list[int]]:
        """Token ids of `text`, and behind which of its characters each of them ends; 0 for one that adds itself."""
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return encoding.ids, [end for _, end in encoding.offsets]

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
