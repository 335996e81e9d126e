"""Text to tokens, in worker threads, and chats to prompts. Knows no HTTP, no limits and no torch."""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import tokenizers

from funitel.proto.errors import InvalidRequest, StartupError, TemplateError
from funitel.router.text.languages import Languages
from funitel.router.text.template_renderer import TemplateRenderer, TemplateTexts

logger = logging.getLogger(__name__)

TOOL_USE = "tool_use"  # the name of a template of its own for chats with tools
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
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix="tokenizer")

    @classmethod
    def load(cls, folder: str, config_path: str | None, workers: int) -> "Tokenizer":
        """Read a model folder.

        Args:
            folder: has tokenizer.json, and may have config.json, tokenizer_config.json and a chat template.
            config_path: a file to use instead of the folder's tokenizer_config.json.
            workers: threads that encode, and processes that render chats.

        Raises:
            StartupError: a file is missing or unreadable.
        """
        files = ModelFiles(Path(folder), Path(config_path) if config_path else None)
        tokenizer = files.tokenizer()
        return cls(tokenizer, files.template_texts(tokenizer), workers, files.model_vocab_size())

    @property
    def num_tokens(self) -> int:
        """Tokens that tokenizer and model both know, special ones included; ids are below it."""
        return self._num_tokens

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> Encoding:
        """Tokenize a text.

        Raises:
            InvalidRequest: the tokenizer cannot represent it.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, self._encode, text, add_special_tokens)

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some tokens, special ones included; of no token that is not there."""
        loop = asyncio.get_running_loop()
        decode = partial(self._tokenizer.decode, list(ids), skip_special_tokens=False)
        return await loop.run_in_executor(self._workers, decode)

    def template_source(self, *, with_tools: bool) -> str:
        """Text of the chat template, of the one for chats with tools if there is such; empty when there is none."""
        if self._renderer is None:
            return ""
        texts = self._renderer.texts
        return texts.tool_source if with_tools and texts.tool_source is not None else texts.source

    async def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **wishes: Any) -> str:
        """Render a chat with the wishes `ChatTemplate.render` takes; encode the result without special tokens.

        Raises: as `TemplateRenderer.render`, and TemplateError where there is no template.
        """
        if self._renderer is None:
            raise TemplateError(NO_TEMPLATE)
        return await self._renderer.render(messages, **wishes)

    async def warm_up(self) -> None:
        """Have ready what the first chat needs."""
        if self._renderer is not None:
            await self._renderer.warm_up()

    async def close(self) -> None:
        """Let the threads end, and end the processes."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        if self._renderer is not None:
            await self._renderer.close()

    def _encode(self, text: str, add_special_tokens: bool) -> Encoding:
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # tokenizers raises bare Exception
            logger.debug("the tokenizer failed: %s", error)
            raise InvalidRequest("`inputs` cannot be tokenized", "inputs") from error
        return Encoding(text, tuple(encoding.ids), tuple(encoding.offsets))


class ModelFiles:
    """The files of a model folder that say how to tokenize."""

    def __init__(self, folder: Path, config_path: Path | None = None) -> None:
        self._folder = folder
        if config_path is not None and not config_path.is_file():
            raise StartupError(f"--tokenizer-config-path {config_path} is not a file")
        self._config = self._json(config_path or folder / "tokenizer_config.json")
        self._is_own_config = config_path is not None

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Read tokenizer.json."""
        path = self._folder / "tokenizer.json"
        if not path.is_file():
            raise StartupError(f"{path} does not exist: --tokenizer-name must be a folder that has it")
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise StartupError(f"{path} cannot be read: {error}") from error

    def model_vocab_size(self) -> int | None:
        """Rows of the model's embedding, as config.json says."""
        config = self._json(self._folder / "config.json")
        text_config = config.get("text_config")
        size = config.get("vocab_size") or (text_config.get("vocab_size") if isinstance(text_config, dict) else None)
        return size if isinstance(size, int) else None

    def template_texts(self, tokenizer: tokenizers.Tokenizer) -> TemplateTexts | None:
        """The chat template and what it may use; None if there is none."""
        source = self._template_source("default")
        if source is None:
            return None
        return TemplateTexts(source, self.special_tokens(tokenizer), self._template_source(TOOL_USE))

    def _template_source(self, name: str) -> str | None:
        """A config the user gave comes first; then files of their own, chat_template.json, tokenizer_config.json."""
        own = _pick_template(self._config.get("chat_template"), name)
        if own is not None and self._is_own_config:
            return own
        is_default = name == "default"
        path = "chat_template.jinja" if is_default else f"additional_chat_templates/{name}.jinja"
        jinja_file = self._folder / path
        if jinja_file.is_file():
            return jinja_file.read_text(encoding="utf-8")
        return _pick_template(self._json(self._folder / "chat_template.json").get("chat_template"), name) or own

    def json(self, name: str) -> dict[str, Any]:
        """A file of the folder, which must be a JSON object where it is there; empty where it is not."""
        return self._json(self._folder / name)

    def special_tokens(self, tokenizer: tokenizers.Tokenizer) -> dict[str, str]:
        """`bos_token`, `eos_token` and the like; the ids of config.json help where no text is given."""
        named = self._json(self._folder / "special_tokens_map.json") | self._config
        tokens = {name: _token_text(value) for name, value in named.items() if name.endswith("_token")}
        special = {name: text for name, text in tokens.items() if text is not None}
        ids = self._json(self._folder / "config.json") | self._json(self._folder / "generation_config.json")
        for name in ("bos_token", "eos_token"):
            text = _text_of_id(tokenizer, ids.get(f"{name}_id"))
            if name not in special and text is not None:
                special[name] = text
        return special

    def _json(self, path: Path) -> dict[str, Any]:
        if not path.is_file():
            return {}
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StartupError(f"{path} cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise StartupError(f"{path} is not a JSON object")
        return content


def _pick_template(value: Any, name: str) -> str | None:
    """The template of a name; one that has none is the default."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get(name)
    elif name != "default":
        value = None
    return value if isinstance(value, str) else None


def _token_text(value: Any) -> str | None:
    """A token is written as its text or as an object with it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _text_of_id(tokenizer: tokenizers.Tokenizer, token_id: Any) -> str | None:
    """An id may be one or a list of several, the first being the main one."""
    if isinstance(token_id, list):
        token_id = token_id[0] if token_id else None
    return tokenizer.id_to_token(token_id) if isinstance(token_id, int) else None
