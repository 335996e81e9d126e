"""What a client asks of a chat, whatever API it speaks. Plain records; the checks are made when it is prepared."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from funitel.router.chat.sampling import ChatSampling


@dataclass(frozen=True, slots=True, kw_only=True)
class PastToolCall:
    """A call the assistant made earlier in the conversation; `arguments` as values, not as JSON text."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of the conversation.

    `role` is `system`, `developer`, `user`, `assistant`, `tool` or whatever else the model's template knows. A `tool`
    message carries the result of the call `tool_call_id`.
    """

    role: str
    text: str = ""
    name: str | None = None
    tool_calls: tuple[PastToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function the model may call; `parameters` is the JSON schema of its arguments, an object."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None  # None: takes no arguments


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

    `template_variables` reach the chat template as they are.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    sampling: ChatSampling = field(default_factory=ChatSampling)
    n: int = 1
    template_variables: Mapping[str, Any] = field(default_factory=dict)
