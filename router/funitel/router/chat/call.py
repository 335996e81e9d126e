"""Records of a chat request, the same for every API: messages, tools and options. `prepare_chat` checks them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from funitel.proto.errors import InvalidRequest
from funitel.router.core.grammar import Grammar
from funitel.router.media.interface import MediaSource
from funitel.router.serving.sampling_request import SamplingRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PastToolCall:
    """A call the assistant made earlier in the conversation; `arguments` as values, not as JSON text."""

    id: str
    name: str
    arguments: Mapping[str, Any]


ContentPart = str | MediaSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of the conversation.

    `role` is one of `control_text.ROLES`: a template writes it between control tokens. A `tool` message carries the
    result of the call `tool_call_id`. `parts` are the content of a message with images or sounds, in order, and `text`
    is all text in them.
    """

    role: str
    text: str = ""
    parts: tuple[ContentPart, ...] = ()
    name: str | None = None
    tool_calls: tuple[PastToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None

    @classmethod
    def of_parts(cls, role: str, parts: Iterable[ContentPart], separator: str = "", **fields: Any) -> "ChatMessage":
        """A message of texts and media; the `separator` stands between texts that follow each other."""
        content = list(parts)
        text = separator.join(part for part in content if isinstance(part, str))
        if all(isinstance(part, str) for part in content):
            return cls(role=role, text=text, **fields)
        joined: list[ContentPart] = []
        for part in content:
            if isinstance(part, str) and joined and isinstance(joined[-1], str):
                joined[-1] += separator + part
            else:
                joined.append(part)
        return cls(role=role, text=text, parts=tuple(joined), **fields)

    @property
    def content(self) -> tuple[ContentPart, ...]:
        """Its texts and media, in order."""
        return self.parts or (self.text,)

    @property
    def media(self) -> tuple[MediaSource, ...]:
        """Its images and sounds, in order."""
        return tuple(part for part in self.parts if isinstance(part, MediaSource))

    def followed_by(self, text: str) -> "ChatMessage":
        """The same with more text at its end."""
        return replace(self, text=self.text + text, parts=(*self.parts, text) if self.parts else ())


_SPEAK_TEXT = ("system", "developer", "assistant")


def check_role_of_media(role: str, parts: Iterable[ContentPart]) -> None:
    """Raise InvalidRequest for an image or a sound in a message of a role that has none."""
    found = next((part for part in parts if isinstance(part, MediaSource)), None)
    if found is not None and role in _SPEAK_TEXT:
        words = f"`{found.place}`: a message with role `{role}` must be text; images belong into the user's"
        raise InvalidRequest(words, found.place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function the model may call; `parameters` is the JSON schema of its arguments, an object."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None  # None: takes no arguments
    strict: bool = False  # calls follow `parameters` even where the model may answer freely


class ToolMode(Enum):
    """Whether the model may, must or must not call a tool."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """How tools are used; with a `name`, that one must be called."""

    mode: ToolMode = ToolMode.AUTO
    name: str | None = None

    @classmethod
    def named(cls, name: str) -> "ToolChoice":
        """Call this tool and no other."""
        return cls(ToolMode.REQUIRED, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """One request for `n` answers to a conversation.

    An answer goes on with a last message of the assistant and follows any other, unless `continue_final_message` or
    `add_generation_prompt` say otherwise. `template_variables` reach the template as they are. `tool_prompt`
    takes the place of what a model is told of tools where its template does not tell it.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    tool_prompt: str | None = None
    grammar: Grammar | None = None  # what text must follow, if it is not a call; beside tools JSON only
    sampling: SamplingRequest = field(default_factory=SamplingRequest)
    n: int = 1
    reasoning_effort: str | None = None
    thinking_budget: int | None = None  # most tokens of thoughts; the block is closed then
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    wants_token_ids: bool = False  # as parts of the answer
    add_special_tokens: bool = False  # to what the template wrote
    template_variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def allows_several_calls(self) -> bool:
        """Whether an answer may call tools more than once; a tool asked for by name is called exactly once."""
        return self.parallel_tool_calls and self.tool_choice.name is None
