"""Tokenize texts for an encoder, many at once, in worker threads. Knows no HTTP and no torch."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import tokenizers

from funitel.proto.errors import InvalidRequest, StartupError, translating
from funitel.router.text.model_files import ModelFiles
from funitel.router.text.tokenizer import cannot_tokenize

TextOrPair = str | tuple[str, str]
_MASKS = ("[MASK]", "<mask>")  # for folders that do not say which token it is


@dataclass(frozen=True, slots=True)
class EncodedText:
    """One text, or a pair, as tokens; `type_ids` is empty where all are 0."""

    ids: tuple[int, ...]
    type_ids: tuple[int, ...] = ()


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
    """The tokenizer of an encoder. Safe to use from any task; `close` ends its threads.

    Args:
        tokenizer: the model's.
        max_tokens: length of truncated texts, special tokens included.
        mask: text of the mask token; None where there is none.
        workers: threads that encode.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, max_tokens: int, mask: str | None, workers: int) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.mask_id = next(
            (found for name in (mask, *_MASKS) if name and (found := tokenizer.token_to_id(name)) is not None), None
        )
        self._tokenizer = tokenizer
        self._truncating = lru_cache(maxsize=2)(self._make_truncating)
        self._max_tokens = max_tokens
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix="texts")

    @classmethod
    def load(cls, folder: Path, max_tokens: int, workers: int) -> "TextEncoder":
        """Read a model folder.

        Raises:
            StartupError: a file is missing or unreadable, or the model takes fewer tokens than it adds itself.
        """
        files = ModelFiles(folder)
        tokenizer = files.tokenizer()
        if tokenizer.num_special_tokens_to_add(True) >= max_tokens:
            raise StartupError(f"a text of {max_tokens} tokens has no room beside the model's special ones")
        return cls(tokenizer, max_tokens, files.special_tokens(tokenizer).get("mask_token"), workers)

    async def encode(self, texts: Sequence[TextOrPair], truncate: str | None = None) -> list[EncodedText]:
        """Tokenize texts and pairs; `truncate` them at their "left" or "right" end.

        Raises:
            InvalidRequest: the tokenizer cannot represent one.
        """
        return await asyncio.get_running_loop().run_in_executor(self._workers, self._encode, texts, truncate)

    def _encode(self, texts: Sequence[TextOrPair], truncate: str | None) -> list[EncodedText]:
        tokenizer = self._tokenizer if truncate is None else self._truncating(truncate)
        with translating(partial(cannot_tokenize, "inputs")):
            found = tokenizer.encode_batch_fast(list(texts))
        has_pairs = any(not isinstance(text, str) for text in texts)
        return [EncodedText(tuple(each.ids), tuple(each.type_ids) if has_pairs else ()) for each in found]

    def _make_truncating(self, direction: str) -> tokenizers.Tokenizer:
        """Copy the tokenizer: truncation is part of its state, which other threads use at the same time."""
        tokenizer = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.enable_truncation(self._max_tokens, direction=direction)
        return tokenizer

    async def words(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token by itself."""
        decode = self._tokenizer.decode_batch
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, lambda: decode([[i] for i in ids], skip_special_tokens=False))

    def close(self) -> None:
        """Let the threads end."""
        self._workers.shutdown(wait=False, cancel_futures=True)
