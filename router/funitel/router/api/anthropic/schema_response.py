"""Answers and stream events of Anthropic's Messages API as typed records."""

from typing import Any, Literal

from pydantic import Field

from funitel.router.api.common.schema_base import ApiModel, ApiRootModel, is_none


class TextContent(ApiModel):
    """Text of the answer."""

    type: Literal["text"] = "text"
    text: str


class ThinkingContent(ApiModel):
    """What the model thought before it answered."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = Field(description="A digest of the text; nothing checks it.")


class ToolUseContent(ApiModel):
    """A call of a tool."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


Content = TextContent | ThinkingContent | ToolUseContent
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageTokensDetails(ApiModel):
    """What the answer's tokens were spent on."""

    thinking_tokens: int


class MessageUsage(ApiModel):
    """Tokens of the prompt and of the answer."""

    input_tokens: int = Field(description="Of the prompt, those that were computed.")
    output_tokens: int
    cache_creation_input_tokens: int = Field(default=0, description="Always 0: every prefix is kept.")
    cache_read_input_tokens: int = Field(default=0, description="Of the prompt, computed for an earlier request.")
    output_tokens_details: MessageTokensDetails | None = Field(default=None, exclude_if=is_none)


class MessageAnswer(ApiModel):
    """An answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(ApiModel):
    """Tokens of a prompt."""

    input_tokens: int


# Events of a stream


class MessageStart(ApiModel):
    """The answer begins; its content is empty."""

    type: Literal["message_start"] = "message_start"
    message: MessageAnswer


class ContentBlockStart(ApiModel):
    """A block begins; its text or input is empty."""

    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: Content


class TextAddition(ApiModel):
    """More text."""

    type: Literal["text_delta"] = "text_delta"
    text: str


class ThinkingAddition(ApiModel):
    """More of a thought."""

    type: Literal["thinking_delta"] = "thinking_delta"
    thinking: str


class SignatureAddition(ApiModel):
    """The signature of a thought that is complete."""

    type: Literal["signature_delta"] = "signature_delta"
    signature: str


class InputAddition(ApiModel):
    """More JSON text of a call's input."""

    type: Literal["input_json_delta"] = "input_json_delta"
    partial_json: str


class ContentBlockDelta(ApiModel):
    """More of a block."""

    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: TextAddition | ThinkingAddition | SignatureAddition | InputAddition


class ContentBlockStop(ApiModel):
    """A block is complete."""

    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class MessageEnding(ApiModel):
    """Why the answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(ApiModel):
    """How the answer ended, and what it took."""

    type: Literal["message_delta"] = "message_delta"
    delta: MessageEnding
    usage: MessageUsage


class MessageStop(ApiModel):
    """The answer is complete."""

    type: Literal["message_stop"] = "message_stop"


class Ping(ApiModel):
    """Sent while nothing else is."""

    type: Literal["ping"] = "ping"


class MessageEvent(
    ApiRootModel[
        MessageStart | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop | Ping
    ]
):
    """An event of a streamed answer; its name is its type."""
