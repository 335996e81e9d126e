"""Encode the caller's prompts and conversations to tokens; every error names the index of its prompt."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any, TypeAlias

import tokenizers

from funitel.proto.errors import ContextTooLong, FunitelError, InvalidRequest, TemplateError, translating
from funitel.router.core.request import Limits
from funitel.router.text.chat_template import ChatTemplate
from funitel.router.text.control_text import ROLES, ControlText, RenderedChat
from funitel.router.text.control_tokens import ControlTokenGuard
from funitel.router.text.model_files import ModelFiles
from funitel.router.text.template_renderer import TemplateTexts
from funitel.router.text.tokenizer import NO_TEMPLATE, word_forms

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or one of them under the name that vLLM has for it: `prompt`, `prompt_token_ids`."""
Message: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the model sees it; `text` is None where tokens were given."""

    text: str | None
    ids: tuple[int, ...]


class PromptEncoder:
    """The tokenizer and chat template of a model folder; thread-safe."""

    def __init__(self, folder: Path, vocab_size: int, *, chat_special_tokens: bool = False) -> None:
        files = ModelFiles(folder)
        self._tokenizer = files.tokenizer()
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        texts = files.template_texts(self._tokenizer)
        self._control = ControlText(()) if texts is None or chat_special_tokens else texts.control
        self._guard = ControlTokenGuard(self._tokenizer, self._control)
        self._template = _template(texts)
        self._vocab_size = vocab_size

    @property
    def tokenizer(self) -> tokenizers.Tokenizer:
        """The model's."""
        return self._tokenizer

    def prompts(self, given: Prompt | Sequence[Prompt]) -> list[EncodedPrompt]:
        """Encode one prompt or several; texts get the special tokens the model's tokenizer adds.

        Raises:
            InvalidRequest: an item is neither a text nor a list of token ids of the vocabulary.
        """
        prompts = [_as_prompt(place, item) for place, item in enumerate(_as_list(given))]
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encodings = iter(self._encode(texts, self._tokenizer, add_special_tokens=True))
        encoded = [
            EncodedPrompt(prompt, next(encodings)) if isinstance(prompt, str) else EncodedPrompt(None, prompt)
            for prompt in prompts
        ]
        for place, prompt in enumerate(encoded):
            self._check_ids(place, prompt.ids)
        return encoded

    def chats(self, given: Sequence[Message] | Sequence[Sequence[Message]]) -> list[EncodedPrompt]:
        """Render one conversation or several by the model's template and encode them.

        Raises:
            InvalidRequest: an item is no conversation.
            TemplateError: the model has no template, or it refuses a conversation.
        """
        is_one = isinstance(given, Sequence) and bool(given) and isinstance(given[0], Mapping)
        conversations = [given] if is_one else given
        if isinstance(conversations, str) or not isinstance(conversations, Sequence):
            raise InvalidRequest(
                f"messages must be a list of messages or of conversations, given {given!r}", "messages"
            )
        chats = [self._render(place, messages) for place, messages in enumerate(conversations)]
        guarded = [self._guard.guarded(chat.text, chat.plain) for chat in chats]
        encodings = self._encode([chat.text for chat in guarded], self._guard.tokenizer, add_special_tokens=False)
        return [
            EncodedPrompt(chat.text, tuple(self._guard.ids(ids))) for chat, ids in zip(chats, encodings, strict=True)
        ]

    def banned_tokens(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The tokens of words that must not come, at the beginning of a text and behind a space."""
        texts = [text for word in words for text in word_forms(word)]
        return tuple(dict.fromkeys(self._encode(texts, self._tokenizer, add_special_tokens=False)))

    def _encode(
        self, texts: Sequence[str], tokenizer: tokenizers.Tokenizer, *, add_special_tokens: bool
    ) -> list[tuple[int, ...]]:
        if not texts:
            return []
        with translating(lambda error: InvalidRequest(f"tokenizer error {error}", "prompts")):
            encodings = tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return [tuple(encoding.ids) for encoding in encodings]

    def _check_ids(self, place: int, ids: Sequence[int]) -> None:
        if not ids:
            raise InvalidRequest(f"prompt {place} has no tokens", "prompts")
        for token_id in (min(ids), max(ids)):
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequest(
                    f"prompt {place}: token ids must be within 0..{self._vocab_size - 1}, given {token_id}", "prompts"
                )

    def _render(self, place: int, messages: Any) -> RenderedChat:
        if isinstance(self._template, TemplateError):
            raise TemplateError(self._template.message)
        knows_developers = "developer" in self._template.source
        try:
            checked = [_message(number, message, knows_developers) for number, message in enumerate(_listed(messages))]
            last = checked[-1]
            is_begun = last["role"] == "assistant" and not last.get("tool_calls")
            chat = {"messages": checked, "continues": is_begun}
            return self._template.render_without_control(self._control, chat)
        except FunitelError as error:
            raise numbered("conversation", place, error) from error


def _template(texts: TemplateTexts | None) -> ChatTemplate | TemplateError:
    """The compiled chat template, or the error; it runs in this process, in jinja's sandbox without other limits."""
    if texts is None:
        return TemplateError(NO_TEMPLATE)
    try:
        return ChatTemplate(texts.source, texts.special_tokens, texts.tool_source)
    except TemplateError as error:
        return error


def numbered(what: str, index: int, error: FunitelError) -> FunitelError:
    """The same error, with the index of its prompt or conversation in the message."""
    named = type(error)(f"{what} {index}: {error.message}")
    if isinstance(error, InvalidRequest) and isinstance(named, InvalidRequest):
        named.param = error.param
    return named


def room_for(prompt: EncodedPrompt, max_tokens: int | None, limits: Limits) -> int:
    """Maximum of tokens in a completion: as requested, limited by the context.

    Raises:
        ContextTooLong: the prompt leaves no room, or exceeds the maximum of input tokens.
    """
    num_tokens = len(prompt.ids)
    maximum = min(limits.max_input_tokens, limits.max_total_tokens - 1)
    if num_tokens > maximum:
        raise ContextTooLong(f"the prompt must have at most {maximum} tokens, given {num_tokens}", "prompts")
    room = limits.max_total_tokens - num_tokens
    return room if max_tokens is None else min(max_tokens, room)


def _as_list(given: Any) -> Sequence[Any]:
    """A list of prompts; a single prompt becomes a list of one."""
    if isinstance(given, str | Mapping) or (isinstance(given, Sequence) and given and _is_id(given[0])):
        return [given]
    if isinstance(given, bytes) or not isinstance(given, Sequence):
        raise InvalidRequest(
            f"prompts must be a text, token ids or a list of these, given {reprlib.repr(given)}", "prompts"
        )
    return given


def _as_prompt(place: int, item: Any) -> str | tuple[int, ...]:
    if isinstance(item, Mapping):
        return _named_prompt(place, item)
    return item if isinstance(item, str) else _ids(place, item)


def _named_prompt(place: int, item: Mapping[str, Any]) -> str | tuple[int, ...]:
    """The prompt of a mapping with `prompt_token_ids` or else `prompt`, and no other key that has a value."""
    given = {name: value for name, value in item.items() if value is not None}
    ids, text = (
        given.pop("prompt_token_ids", None),
        given.pop("prompt", None),
    )  # vLLM takes the ids where both are given
    if given or (ids is None and text is None):
        names = ", ".join(map(repr, item))
        message = f"prompt {place} must have 'prompt' or 'prompt_token_ids' and no other key, given {names or 'none'}"
        raise InvalidRequest(message, "prompts")
    return text if ids is None and isinstance(text, str) else _ids(place, text if ids is None else ids)


def _ids(place: int, item: Any) -> tuple[int, ...]:
    if isinstance(item, bytes | Mapping) or not isinstance(item, Sequence) or not all(map(_is_id, item)):
        raise InvalidRequest(f"prompt {place} must be a text or token ids, given {reprlib.repr(item)}", "prompts")
    return tuple(map(index, item))


def _is_id(value: Any) -> bool:
    """Whether a value is an integer of any library, and no boolean."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _listed(messages: Any) -> Sequence[Any]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest(f"a conversation must be a list of messages, given {reprlib.repr(messages)}", "messages")
    return messages


def _message(number: int, message: Any, knows_developers: bool) -> dict[str, Any]:
    """A message for the template: its role, its content as text, and its other fields."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"message {number} must have a role, given {message!r}", "messages")
    if message["role"] not in ROLES:
        known = ", ".join(ROLES)
        raise InvalidRequest(f"message {number}: role must be one of {known}, given {message['role']!r}", "messages")
    role = "system" if message["role"] == "developer" and not knows_developers else message["role"]
    return {**message, "role": role, "content": _text(number, message.get("content"))}


def _text(number: int, content: Any) -> str:
    """A message's content as text; text parts are joined."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence):
        texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    raise InvalidRequest(f"message {number}: content must be a text or text parts, given {content!r}", "messages")
