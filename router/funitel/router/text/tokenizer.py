"""Tokenize texts in worker threads, and render chats as prompts. Knows no HTTP, no limits and no torch."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import tokenizers

from funitel.proto.errors import InvalidRequest, TemplateError, translating
from funitel.router.text.control_text import ControlText, RenderedChat, Spans
from funitel.router.text.control_tokens import ControlTokenGuard
from funitel.router.text.languages import Languages
from funitel.router.text.model_files import ModelFiles
from funitel.router.text.template_renderer import TemplateRenderer, TemplateTexts

logger = logging.getLogger(__name__)

NO_TEMPLATE = "template not found: the model has no chat template"


@dataclass(frozen=True, slots=True)
class Encoding:
    """A tokenized text; `offsets` are where each token begins and ends in it, in characters."""

    text: str
    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]

    def byte_offsets(self) -> list[tuple[int, int]]:
        """The offsets in bytes of the text's UTF-8 form."""
        if self.text.isascii():
            return list(self.offsets)
        byte_at = [0, *accumulate(len(character.encode()) for character in self.text)]
        return [(byte_at[start], byte_at[stop]) for start, stop in self.offsets]


def word_forms(word: str) -> tuple[str, str]:
    """A word at the beginning of a text, and behind a space: most vocabularies have other tokens there."""
    return word.lstrip(), " " + word.lstrip()


def cannot_tokenize(field: str, error: Exception) -> InvalidRequest:
    """The error for the text of a field at which the library failed, which raises bare Exception."""
    logger.debug("the tokenizer failed: %s", error)
    return InvalidRequest(f"`{field}` cannot be tokenized", field)


class Tokenizer:
    """A model's tokenizer and chat template. Safe to use from any task; `close` ends its threads and processes."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        template: TemplateTexts | None,
        workers: int,
        model_vocab_size: int | None = None,
    ) -> None:
        """Take what was read of a model.

        `model_vocab_size`: tokens the model has scores for, where that is known; it may be fewer or more.
        """
        tokenizer.no_truncation()  # a file may ask for either; neither is part of encoding
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        num_tokens = max(tokenizer.get_vocab().values(), default=-1) + 1
        self._num_tokens = num_tokens if model_vocab_size is None else min(num_tokens, model_vocab_size)
        self.languages = Languages.of(tokenizer)
        self._renderer = None if template is None else TemplateRenderer(template, workers)
        self._guard = ControlTokenGuard(tokenizer, ControlText(()) if template is None else template.control)
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix="tokenizer")

    @classmethod
    def load(
        cls, folder: str, config_path: str | None, workers: int, *, chat_special_tokens: bool = False
    ) -> "Tokenizer":
        """Read a model folder.

        Args:
            folder: has tokenizer.json, and may have config.json, tokenizer_config.json and a chat template.
            config_path: a file to use instead of the folder's tokenizer_config.json.
            workers: threads that encode, and processes that render chats.
            chat_special_tokens: whether what clients write as control tokens in a chat are control tokens.

        Raises:
            StartupError: a file is missing or unreadable.
        """
        files = ModelFiles(Path(folder), Path(config_path) if config_path else None)
        tokenizer = files.tokenizer()
        template = files.template_texts(tokenizer)
        if template is not None and chat_special_tokens:
            template = replace(template, control=ControlText(()))
        return cls(tokenizer, template, workers, files.model_vocab_size())

    @property
    def num_tokens(self) -> int:
        """Tokens that tokenizer and model both know, special ones included; ids are below it."""
        return self._num_tokens

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, field: str = "inputs", plain: Spans | None = None
    ) -> Encoding:
        """Tokenize the text of a `field`; of a chat, with the spans in which control tokens are ordinary text.

        Raises:
            InvalidRequest: the tokenizer cannot represent it.
        """
        loop = asyncio.get_running_loop()
        if plain or (plain is not None and self._guard.is_always_needed):
            return await loop.run_in_executor(
                self._workers, self._encode_guarded, text, plain, add_special_tokens, field
            )
        return await loop.run_in_executor(self._workers, self._encode, text, add_special_tokens, field)

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some tokens, special ones included; of no token that is not there."""
        loop = asyncio.get_running_loop()
        decode = partial(self._tokenizer.decode, list(ids), skip_special_tokens=False)
        return await loop.run_in_executor(self._workers, decode)

    def spellings(self, ids: Sequence[int]) -> list[str]:
        """Return tokens as the vocabulary spells them; "" for one that it does not have."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in ids]

    def template_source(self, *, with_tools: bool) -> str:
        """Text of the chat template, of the one for chats with tools if there is such; empty when there is none."""
        if self._renderer is None:
            return ""
        texts = self._renderer.texts
        return texts.tool_source if with_tools and texts.tool_source is not None else texts.source

    async def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> RenderedChat:
        """Render a chat with the options `TemplateRenderer.render` takes.

        Raises: as `TemplateRenderer.render`, and TemplateError where there is no template.
        """
        if self._renderer is None:
            raise TemplateError(NO_TEMPLATE)
        return await self._renderer.render(messages, **options)

    async def warm_up(self) -> None:
        """Have ready what the first chat needs."""
        if self._renderer is not None:
            await self._renderer.warm_up()

    async def close(self) -> None:
        """Let the threads end, and end the processes."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        if self._renderer is not None:
            await self._renderer.close()

    def _encode(self, text: str, add_special_tokens: bool, field: str) -> Encoding:
        with translating(partial(cannot_tokenize, field)):
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return Encoding(text, tuple(encoding.ids), tuple(encoding.offsets))

    def _encode_guarded(self, text: str, plain: Spans, add_special_tokens: bool, field: str) -> Encoding:
        guarded = self._guard.guarded(text, plain)
        with translating(partial(cannot_tokenize, field)):
            encoding = self._guard.tokenizer.encode(guarded.text, add_special_tokens=add_special_tokens)
        return Encoding(text, tuple(self._guard.ids(encoding.ids)), tuple(guarded.offsets(encoding.offsets)))
