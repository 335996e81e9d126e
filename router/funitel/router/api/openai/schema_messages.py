"""Request records of messages in OpenAI's chats: text parts, results of tools, and answers sent back."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from funitel.router.api.common.schema_base import Body, json_object
from funitel.router.chat.call import ChatMessage, PastToolCall
from funitel.router.text.control_text import ROLES


class ContentPart(Body):
    """A part of a message's content; text, or a refusal sent back, is the only kind."""

    type: str
    text: str = ""
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: str | None = None
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None

    @field_validator("type")
    @classmethod
    def _is_text(cls, value: str) -> str:
        if value not in ("text", "refusal"):
            raise ValueError(f"content of type `{value}` is not supported, only `text`")
        return value


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _as_values(arguments: Any) -> Any:
    """OpenAI sends arguments as JSON text, TGI's clients as an object; templates want values."""
    return json_object(arguments) if isinstance(arguments, str) else arguments


class SentFunction(Body):
    """The function of an earlier call."""

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_as_values, json_schema_input_type=str | dict[str, Any])] = (
        Field(default_factory=dict)
    )
    description: Any = None  # TGI's answers carry it
    parsed_arguments: Any = None  # the openai package's parsed answers carry it


class SentToolCall(Body):
    """A call the assistant made earlier, as the answer had it."""

    id: str = ""
    type: str = "function"
    function: SentFunction
    index: int | None = None

    @field_validator("type")
    @classmethod
    def _is_function(cls, value: str) -> str:
        if value != "function":
            raise ValueError(f"a call of type `{value}` is not supported, only `function`")
        return value


def _check_role(role: str) -> str:
    if role not in ROLES:
        raise ValueError(f"must be one of {', '.join(ROLES)}. Given: {role[:50]!r}")
    return role


class Message(Body):
    """One message of a chat. Fields copied from answers are accepted where they ask for nothing."""

    role: Annotated[str, AfterValidator(_check_role), Field(description=f"One of {', '.join(ROLES)}.")]
    content: Annotated[
        list[ContentPart] | None, BeforeValidator(_as_parts, json_schema_input_type=str | list[ContentPart] | None)
    ] = None
    name: str | None = None
    tool_call_id: str | None = Field(default=None, description="Of a `tool` message: the call it answers.")
    tool_calls: list[SentToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(default=None, description="The same as `reasoning_content`.")
    function_call: SentFunction | None = Field(default=None, description="The earlier form of `tool_calls`.")
    audio: Any = None
    refusal: str | None = None
    annotations: Any = None
    parsed: Any = None

    @field_validator("audio")
    @classmethod
    def _asks_for_nothing(cls, value: Any) -> Any:
        if value not in (None, []):
            raise ValueError("is not supported in messages")
        return value

    @property
    def text(self) -> str:
        """The content's parts, joined."""
        return "".join(part.text or part.refusal or "" for part in self.content or ())

    @property
    def message(self) -> ChatMessage:
        """The message in the words of the chat core."""
        calls = [
            PastToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in self.tool_calls or ()
        ]
        role, call_id = self.role, self.tool_call_id
        if self.function_call is not None:
            name = self.function_call.name
            calls.append(PastToolCall(id=_call_id(name), name=name, arguments=self.function_call.arguments))
        if role == "function":  # the earlier form of a tool's result, which names its call by the function
            role, call_id = "tool", call_id or _call_id(self.name or "")
        return ChatMessage(
            role=role,
            text=self.text,
            name=self.name,
            tool_calls=tuple(calls),
            tool_call_id=call_id,
            reasoning=self.reasoning if self.reasoning_content is None else self.reasoning_content,
        )


def _call_id(name: str) -> str:
    """The id of a call in the earlier form, which has none."""
    return f"call_{name}"
