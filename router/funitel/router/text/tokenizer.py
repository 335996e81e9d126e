"""Tokenize texts and render chats as prompts. Knows no HTTP and no torch."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers

from funitel.proto.errors import InvalidRequest, TemplateError
from funitel.router.core import request_context
from funitel.router.text.control_text import ControlText, RenderedChat, Spans
from funitel.router.text.encode import MAX_LISTED_TOKENS, EncodeCalls
from funitel.router.text.encode_pool import SHORT_CHARACTERS, SHORT_LISTED_CHARACTERS, EncodePool
from funitel.router.text.languages import Languages
from funitel.router.text.model_files import ModelFiles
from funitel.router.text.template_renderer import TemplateRenderer, TemplateTexts
from funitel.router.text.token_bound import TokenBound

NO_TEMPLATE = "template not found: the model has no chat template"


class TooManyTokens(Exception):
    """A text has more tokens than are wanted: `num_tokens` exactly, or at least."""

    def __init__(self, num_tokens: int, *, is_exact: bool) -> None:
        super().__init__(num_tokens)
        self.num_tokens = num_tokens
        self.is_exact = is_exact

    @property
    def words(self) -> str:
        """The number, as in "7" or "at least 7"."""
        return f"{'' if self.is_exact else 'at least '}{self.num_tokens}"


def word_forms(word: str) -> tuple[str, str]:
    """A word at the beginning of a text, and behind a space: most vocabularies have other tokens there."""
    return word.lstrip(), " " + word.lstrip()


class TokenCodec:
    """A tokenizer's decoding, as the shards decode."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included; incomplete characters become U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def special_text(self, token_id: int) -> str | None:
        """Content of a special token, None for ordinary ones."""
        return self._special.get(token_id)


class Tokenizer:
    """A model's tokenizer and chat template. Safe to use from any task; `close` ends its threads and processes."""

    def __init__(
        self,
        pool: EncodePool,
        template: TemplateTexts | None,
        workers: int,
        model_vocab_size: int | None = None,
        *,
        has_several_keys: bool = False,
    ) -> None:
        """Take what was read of a model.

        Args:
            pool: encodes.
            template: of chats.
            workers: processes that render chats, at most.
            model_vocab_size: tokens the model has scores for, where that is known; it may be fewer or more.
            has_several_keys: whether one API key must leave a process to others.
        """
        self.pool = pool
        tokenizer = self._tokenizer = pool.tokenizer
        self._codec = TokenCodec(tokenizer)
        num_tokens = max(tokenizer.get_vocab().values(), default=-1) + 1
        self._num_tokens = num_tokens if model_vocab_size is None else min(num_tokens, model_vocab_size)
        self.languages = Languages.of(tokenizer)
        self._bound = TokenBound.of(tokenizer)
        self._renderer = (
            None if template is None else TemplateRenderer(template, workers, has_several_keys=has_several_keys)
        )

    @classmethod
    def load(
        cls,
        folder: str,
        config_path: str | None,
        workers: int,
        *,
        chat_special_tokens: bool = False,
        has_several_keys: bool = False,
    ) -> "Tokenizer":
        """Read a model folder.

        Args:
            folder: has tokenizer.json, and may have config.json, tokenizer_config.json and a chat template.
            config_path: a file to use instead of the folder's tokenizer_config.json.
            workers: threads that encode, processes that encode long texts, and processes that render chats.
            chat_special_tokens: whether what clients write as control tokens in a chat are control tokens.
            has_several_keys: whether one API key must leave some of these to others.

        Raises:
            StartupError: a file is missing or unreadable.
        """
        files = ModelFiles(Path(folder), Path(config_path) if config_path else None)
        tokenizer = files.tokenizer()
        template = files.template_texts(tokenizer)
        if template is not None and chat_special_tokens:
            template = replace(template, control=ControlText(()))
        calls = EncodeCalls(tokenizer, ControlText(()) if template is None else template.control)
        pool = EncodePool(calls, files.tokenizer_path, workers, has_several_keys=has_several_keys)
        return cls(pool, template, workers, files.model_vocab_size(), has_several_keys=has_several_keys)

    @property
    def num_tokens(self) -> int:
        """Tokens that tokenizer and model both know, special ones included; ids are below it."""
        return self._num_tokens

    def token_text(self, token_id: int) -> str:
        """What a token is written as in the vocabulary; empty for an unknown one."""
        return str(self.pool.tokenizer.id_to_token(token_id) or "")

    async def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        field: str = "inputs",
        plain: Spans | None = None,
        max_tokens: int = sys.maxsize,
        keep_last: int | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids of the text of a `field`; of them the last `keep_last`.

        `plain` are the spans of a chat in which control tokens are ordinary text.

        Raises:
            TooManyTokens: there are more than `max_tokens`.
            InvalidRequest, Overloaded: as `EncodePool.run`.
        """
        if len(text) > SHORT_CHARACTERS and keep_last is None and self._bound is not None:
            beyond = self._bound.tokens_beyond(text, max_tokens)
            if beyond is not None:
                request_context.current().encoded_tokens += beyond
                raise TooManyTokens(beyond, is_exact=False)
        found = await self._encode(text, field, add_special_tokens, plain, max_tokens, keep_last)
        if isinstance(found, int):
            raise TooManyTokens(found, is_exact=True)
        return tuple(found)

    async def count(self, text: str, field: str = "inputs", *, plain: Spans | None = None) -> int:
        """Return how many tokens a text has, without added special ones; raises as `EncodePool.run`."""
        return await self._encode(text, field, False, plain, 0, None) or 0

    async def listed(self, text: str, *, add_special_tokens: bool = True, plain: Spans | None = None) -> str:
        """Return a JSON list of the tokens of a text: id, text, and start and stop in bytes of each.

        Raises: as `EncodePool.run`; InvalidRequest for more than `MAX_LISTED_TOKENS`.
        """
        arguments = {"text": text, "add_special_tokens": add_special_tokens, "plain": plain}
        rows = await self.pool.run("rows", len(text), "inputs", short=SHORT_LISTED_CHARACTERS, **arguments)
        if isinstance(rows, int):
            raise _too_many_to_list(rows, "inputs")
        return str(rows)

    async def listed_ids(
        self, text: str, *, add_special_tokens: bool, field: str, plain: Spans | None = None
    ) -> tuple[int, ...]:
        """Return the token ids of a text; raises as `listed`."""
        try:
            return await self.encode(
                text, add_special_tokens=add_special_tokens, field=field, plain=plain, max_tokens=MAX_LISTED_TOKENS
            )
        except TooManyTokens as many:
            raise _too_many_to_list(many.words, field) from None

    async def _encode(
        self,
        text: str,
        field: str,
        add_special_tokens: bool,
        plain: Spans | None,
        max_tokens: int,
        keep_last: int | None,
    ) -> Any:
        """Run `EncodeCalls.prompt`, and note what a long text is charged for."""
        found = await self.pool.run(
            "prompt",
            len(text),
            field,
            text=text,
            add_special_tokens=add_special_tokens,
            plain=plain,
            max_tokens=max_tokens,
            keep_last=keep_last,
        )
        if len(text) > SHORT_CHARACTERS:
            request_context.current().encoded_tokens += found if isinstance(found, int) else len(found)
        return found

    @property
    def codec(self) -> TokenCodec:
        """What gives the texts of tokens at once; of a few of them, or beside the event loop."""
        return self._codec

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some tokens, special ones included; of no token that is not there."""
        decode = partial(self._tokenizer.decode, list(ids), skip_special_tokens=False)
        return str(await self.pool.in_thread(decode))

    def token_id(self, text: str) -> int | None:
        """Return the id of a token that is spelt so; None for none."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def spellings(self, ids: Sequence[int]) -> list[str]:
        """Return tokens as the vocabulary spells them; "" for one that it does not have."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in ids]

    def special_ids(self, texts: Sequence[str]) -> dict[str, int]:
        """Return the ids of those texts that are tokens of their own, which grammars name by number.

        To llguidance, which reads grammars, an added token is one if it is special or written between `<` and `>`.
        """
        return {
            token.content: token_id
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.content in texts and (token.special or (token.content[:1] == "<" and token.content[-1:] == ">"))
        }

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
        await self.pool.close()
        if self._renderer is not None:
            await self._renderer.close()


def _too_many_to_list(given: object, field: str) -> InvalidRequest:
    return InvalidRequest(f"`{field}` must have at most {MAX_LISTED_TOKENS} tokens to list. Given: {given}", field)
