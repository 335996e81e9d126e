"""Bodies of Anthropic's Messages API, in and out, as typed records; a request in the words of the chat core.

As under all of `/v1`, unknown fields are errors; fields that only concern Anthropic's service are accepted; known
fields that would change the answer and are not supported are refused by name unless they ask for nothing.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, RootModel, Tag

from funitel.router.api.common.schema_base import F32, U32, ClosedBody, Refused, by_type, is_none

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


# Content of messages


class CacheControl(ClosedBody):
    """Accepted: every prefix is cached anyway."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(ClosedBody):
    """Text of a message, of the system prompt or of a tool's result."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Refused = None


class ToolUseBlock(ClosedBody):
    """A call the assistant made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = Field(default=None, description="Accepted as it was answered.")


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


TextBlocks = Annotated[
    list[Annotated[Annotated[TextBlock, Tag("<text>")], by_type("text")]],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock]),
]


class ToolResultBlock(ClosedBody):
    """What a call the assistant made has brought."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: TextBlocks = Field(default_factory=list)
    is_error: bool = False
    cache_control: CacheControl | None = None

    @property
    def text(self) -> str:
        """The result as the model reads it; a failure says that it is one."""
        text = joined(self.content)
        return f"Error: {text}" if self.is_error else text


class ThinkingBlock(ClosedBody):
    """What the assistant thought; its signature is not looked at."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock
Blocks = Annotated[
    list[
        Annotated[
            Annotated[TextBlock, Tag("<text>")]
            | Annotated[ToolUseBlock, Tag("<tool_use>")]
            | Annotated[ToolResultBlock, Tag("<tool_result>")]
            | Annotated[ThinkingBlock, Tag("<thinking>")],
            by_type("text", "tool_use", "tool_result", "thinking"),
        ]
    ],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block]),
]


class Message(ClosedBody):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


def joined(blocks: list[TextBlock]) -> str:
    """Texts that stand beside each other, a line each."""
    return "\n".join(block.text for block in blocks)


# Requests


class Tool(ClosedBody):
    """A tool of the client's that the model may call."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="JSON schema of the input, an object.")
    strict: bool | None = Field(default=None, description="Accepted: a call that is forced always fits its schema.")
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = Field(default=None, description="Accepted: input is always streamed.")
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    input_examples: Refused = None


class _ParallelChoice(ClosedBody):
    disable_parallel_tool_use: bool = False


class ToolChoiceAuto(_ParallelChoice):
    """The model may call tools."""

    type: Literal["auto"]


class ToolChoiceAny(_ParallelChoice):
    """The model must call a tool."""

    type: Literal["any"]


class ToolChoiceTool(_ParallelChoice):
    """The model must call this tool."""

    type: Literal["tool"]
    name: str


class ToolChoiceNone(ClosedBody):
    """The model must not call a tool."""

    type: Literal["none"]


ToolChoice = Annotated[
    Annotated[ToolChoiceAuto, Tag("<auto>")]
    | Annotated[ToolChoiceAny, Tag("<any>")]
    | Annotated[ToolChoiceTool, Tag("<tool>")]
    | Annotated[ToolChoiceNone, Tag("<none>")],
    by_type("auto", "any", "tool", "none"),
]


class _Display(ClosedBody):
    display: Literal["summarized", "omitted"] | None = Field(
        default=None, description="`omitted` leaves the text of thinking blocks out; it is never summarized."
    )


class ThinkingEnabled(_Display):
    """The model thinks before it answers."""

    type: Literal["enabled"]
    budget_tokens: Annotated[U32, Field(ge=1024)]


class ThinkingAdaptive(_Display):
    """The model thinks before it answers, as it is wont to."""

    type: Literal["adaptive"]


class ThinkingDisabled(ClosedBody):
    """The model answers at once, if its template can say so."""

    type: Literal["disabled"]


Thinking = Annotated[
    Annotated[ThinkingEnabled, Tag("<enabled>")]
    | Annotated[ThinkingAdaptive, Tag("<adaptive>")]
    | Annotated[ThinkingDisabled, Tag("<disabled>")],
    by_type("enabled", "adaptive", "disabled"),
]


class OutputFormat(ClosedBody):
    """The answer's text shall be JSON of this schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(ClosedBody):
    """What the answer shall be like."""

    effort: Literal["high"] | None = Field(default=None, description="No other effort is supported.")
    format: OutputFormat | None = None


class Metadata(ClosedBody):
    """Accepted; nothing is made of it."""

    user_id: str | None = None


class CountTokensRequest(ClosedBody):
    """A conversation whose tokens are to be counted, and the part of a request that makes the prompt."""

    model: str = Field(description="Any name; echoed in the answer.")
    messages: list[Message] = Field(min_length=1)
    system: TextBlocks | None = None
    tools: list[Annotated[Annotated[Tool, Tag("<custom>")], by_type("custom", default="custom")]] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None
    user_profile_id: str | None = Field(default=None, description="Accepted; concerns Anthropic's service.")
    workspace_id: str | None = Field(default=None, description="Accepted; concerns Anthropic's service.")


class MessagesRequest(CountTokensRequest):
    """A conversation to answer."""

    max_tokens: Annotated[U32, Field(ge=1)]
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = None
    stream: bool = False
    temperature: Annotated[F32, Field(ge=0, le=1)] | None = Field(default=None, description="0 takes the likeliest.")
    top_p: Annotated[F32, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    # Refused when they ask for something.
    container: Refused = None
    diagnostics: Refused = None
    inference_geo: Refused = None
    context_management: Refused = None
    mcp_servers: Refused = None


# Answers


class TextContent(BaseModel):
    """Text of the answer."""

    type: Literal["text"] = "text"
    text: str


class ThinkingContent(BaseModel):
    """What the model thought before it answered."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = Field(description="A digest of the text; nothing checks it.")


class ToolUseContent(BaseModel):
    """A call of a tool."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


Content = TextContent | ThinkingContent | ToolUseContent
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class OutputTokensDetails(BaseModel):
    """What the answer's tokens were spent on."""

    thinking_tokens: int


class MessageUsage(BaseModel):
    """Tokens of the prompt and of the answer."""

    input_tokens: int = Field(description="Of the prompt, those that were computed.")
    output_tokens: int
    cache_creation_input_tokens: int = Field(default=0, description="Always 0: every prefix is kept.")
    cache_read_input_tokens: int = Field(default=0, description="Of the prompt, computed for an earlier request.")
    output_tokens_details: OutputTokensDetails | None = Field(default=None, exclude_if=is_none)


class MessageAnswer(BaseModel):
    """An answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    """Tokens of a prompt."""

    input_tokens: int


class AnthropicErrorDetail(BaseModel):
    """What went wrong."""

    type: str
    message: str


class AnthropicErrorResponse(BaseModel):
    """Any failure of these routes, and the event that ends a stream which fails."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail
    request_id: str
    queue_position: int | None = Field(default=None, exclude_if=is_none, description="Where it would have stood.")
    estimated_wait_seconds: float | None = Field(default=None, exclude_if=is_none)


# Events of a stream


class MessageStart(BaseModel):
    """The answer begins; its content is empty."""

    type: Literal["message_start"] = "message_start"
    message: MessageAnswer


class ContentBlockStart(BaseModel):
    """A block begins; its text or input is empty."""

    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: Content


class TextAddition(BaseModel):
    """More text."""

    type: Literal["text_delta"] = "text_delta"
    text: str


class ThinkingAddition(BaseModel):
    """More of a thought."""

    type: Literal["thinking_delta"] = "thinking_delta"
    thinking: str


class SignatureAddition(BaseModel):
    """The signature of a thought that is complete."""

    type: Literal["signature_delta"] = "signature_delta"
    signature: str


class InputAddition(BaseModel):
    """More JSON text of a call's input."""

    type: Literal["input_json_delta"] = "input_json_delta"
    partial_json: str


class ContentBlockDelta(BaseModel):
    """More of a block."""

    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: TextAddition | ThinkingAddition | SignatureAddition | InputAddition


class ContentBlockStop(BaseModel):
    """A block is complete."""

    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class MessageEnding(BaseModel):
    """Why the answer ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(BaseModel):
    """How the answer ended, and what it took."""

    type: Literal["message_delta"] = "message_delta"
    delta: MessageEnding
    usage: MessageUsage


class MessageStop(BaseModel):
    """The answer is complete."""

    type: Literal["message_stop"] = "message_stop"


class Ping(BaseModel):
    """Sent while nothing else is."""

    type: Literal["ping"] = "ping"


class MessageEvent(
    RootModel[
        MessageStart | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop | Ping
    ]
):
    """An event of a streamed answer; its name is its type."""
