"""Tokenize texts for an encoder, many at once. Knows no HTTP and no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from funitel.proto.errors import InvalidRequest, StartupError
from funitel.router.core import request_context
from funitel.router.text.encode_pool import SHORT_CHARACTERS, EncodePool
from funitel.router.text.model_files import ModelFiles

TextOrPair = str | tuple[str, str]
_MASKS = ("[MASK]", "<mask>")  # for folders that do not say which token it is


@dataclass(frozen=True, slots=True)
class EncodedText:
    """One text, or a pair, as tokens; `type_ids` is empty where all are 0.

    Where there are more tokens than the model takes, `num_excess` is their number, and there are no ids.
    """

    ids: tuple[int, ...]
    type_ids: tuple[int, ...] = ()
    num_excess: int = 0

    @property
    def num_tokens(self) -> int:
        """Of the text."""
        return self.num_excess or len(self.ids)


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts that texts are prefixed with, by name, from a folder of sentence-transformers."""

    named: Mapping[str, str]
    default: str = ""

    @classmethod
    def of(cls, folder: Path) -> "Prompts":
        """Read a model folder.

        Raises:
            StartupError: the file is unreadable.
        """
        config = ModelFiles(folder).json("config_sentence_transformers.json")
        found = config.get("prompts")
        named = {str(name): str(text) for name, text in found.items()} if isinstance(found, dict) else {}
        return cls(named, named.get(str(config.get("default_prompt_name")), ""))

    def pick(self, name: str | None) -> str:
        """Return the prompt of a name; the default one for None.

        Raises:
            InvalidRequest: the model has no such prompt.
        """
        if name is None:
            return self.default
        if name not in self.named:
            known = ", ".join(sorted(self.named)) or "none"
            raise InvalidRequest(f"`prompt_name` must be one of the model's: {known}. Given: {name!r}", "prompt_name")
        return self.named[name]


class TextEncoder:
    """The tokenizer of an encoder. Safe to use from any task.

    Args:
        pool: encodes; another has to close it.
        max_tokens: length of truncated texts, special tokens included.
        mask: text of the mask token; None where there is none.
    """

    def __init__(self, pool: EncodePool, max_tokens: int, mask: str | None) -> None:
        tokenizer = pool.tokenizer
        self.mask_id = next(
            (found for name in (mask, *_MASKS) if name and (found := tokenizer.token_to_id(name)) is not None), None
        )
        self._pool = pool
        self._max_tokens = max_tokens

    @classmethod
    def load(cls, folder: Path, pool: EncodePool, max_tokens: int) -> "TextEncoder":
        """Read a model folder.

        Raises:
            StartupError: a file is missing or unreadable, or the model takes fewer tokens than it adds itself.
        """
        tokenizer = pool.tokenizer
        if tokenizer.num_special_tokens_to_add(True) >= max_tokens:
            raise StartupError(f"a text of {max_tokens} tokens has no room beside the model's special ones")
        return cls(pool, max_tokens, ModelFiles(folder).special_tokens(tokenizer).get("mask_token"))

    async def encode(self, texts: Sequence[TextOrPair], truncate: str | None = None) -> list[EncodedText]:
        """Tokenize texts and pairs; `truncate` them at their "left" or "right" end.

        Raises: as `EncodePool.run`.
        """
        size = sum(len(text) if isinstance(text, str) else len(text[0]) + len(text[1]) for text in texts)
        found = await self._pool.run(
            "batch", size, "inputs", texts=list(texts), max_tokens=self._max_tokens, truncate=truncate
        )
        encoded = [
            EncodedText((), num_excess=ids) if isinstance(ids, int) else EncodedText(tuple(ids), tuple(type_ids))
            for ids, type_ids in found
        ]
        if size > SHORT_CHARACTERS:
            request_context.current().encoded_tokens += sum(each.num_tokens for each in encoded)
        return encoded

    async def words(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token by itself."""
        decode = self._pool.tokenizer.decode_batch
        return list(await self._pool.in_thread(lambda: decode([[i] for i in ids], skip_special_tokens=False)))
