"""Request bodies of Anthropic's Messages API as typed records.

Fields that only concern Anthropic's service are accepted; known fields that would change the answer and are not
supported are refused by name unless they ask for nothing; `FieldPolicy` decides on unknown ones.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag

from funitel.router.api.common.field_policy import Unsupported
from funitel.router.api.common.schema_base import CLAMPED, F32, U32, Body, ModelName, by_type

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]


# Content of messages


class CacheControl(Body):
    """Accepted: every prefix is cached anyway."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Body):
    """Text of a message, of the system prompt or of a tool's result."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Any = Field(default=None, description="Accepted as they were answered.")


class Base64Source(Body):
    """The bytes of an image as base64."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(Body):
    """The URL of an image."""

    type: Literal["url"]
    url: str


class ImageBlock(Body):
    """An image of a message of the user, or of a tool's result."""

    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source, Tag("<base64>")] | Annotated[UrlSource, Tag("<url>")], by_type("base64", "url")
    ]
    cache_control: CacheControl | None = None

    @property
    def url(self) -> str:
        """Its URL; one that has its bytes, where these were given."""
        source = self.source
        return source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"


class ToolUseBlock(Body):
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


class ToolReferenceBlock(Body):
    """The name of a tool that a search of the client's has found; from here on the model is shown the tool."""

    type: Literal["tool_reference"]
    tool_name: str
    cache_control: CacheControl | None = None

    @property
    def text(self) -> str:
        """What the model reads."""
        return f"Found the tool {self.tool_name}."


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ToolReferenceBlock, Tag("<tool_reference>")],
    by_type("text", "image", "tool_reference"),
]


class ToolResultBlock(Body):
    """What a call the assistant made has brought."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        list[ResultBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[ResultBlock])
    ] = Field(default_factory=list)
    is_error: bool = False
    cache_control: CacheControl | None = None


class ThinkingBlock(Body):
    """What the assistant thought; its signature is not looked at."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


Block = TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock
Blocks = Annotated[
    list[
        Annotated[
            Annotated[TextBlock, Tag("<text>")]
            | Annotated[ImageBlock, Tag("<image>")]
            | Annotated[ToolUseBlock, Tag("<tool_use>")]
            | Annotated[ToolResultBlock, Tag("<tool_result>")]
            | Annotated[ThinkingBlock, Tag("<thinking>")],
            by_type("text", "image", "tool_use", "tool_result", "thinking"),
        ]
    ],
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block]),
]


class InputMessage(Body):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


def joined(blocks: Sequence[TextBlock]) -> str:
    """Texts that stand beside each other, a line each."""
    return "\n".join(block.text for block in blocks)


# Requests


class Tool(Body):
    """A tool of the client's that the model may call."""

    unsupported: ClassVar = {"input_examples": Unsupported("the model is not shown examples of inputs")}

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="JSON schema of the input, an object.")
    strict: bool | None = Field(
        default=None, description="Input follows the schema; that of a forced call does in any case."
    )
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = Field(default=None, description="Accepted: input is always streamed.")
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: bool | None = Field(
        default=None, description="Whether the model is shown the tool only once the conversation refers to it."
    )


class _ParallelChoice(Body):
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


class ToolChoiceNone(Body):
    """The model must not call a tool."""

    type: Literal["none"]


ToolChoice = Annotated[
    Annotated[ToolChoiceAuto, Tag("<auto>")]
    | Annotated[ToolChoiceAny, Tag("<any>")]
    | Annotated[ToolChoiceTool, Tag("<tool>")]
    | Annotated[ToolChoiceNone, Tag("<none>")],
    by_type("auto", "any", "tool", "none"),
]


class _Display(Body):
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


class ThinkingDisabled(Body):
    """The model answers at once, if its template can say so."""

    type: Literal["disabled"]


Thinking = Annotated[
    Annotated[ThinkingEnabled, Tag("<enabled>")]
    | Annotated[ThinkingAdaptive, Tag("<adaptive>")]
    | Annotated[ThinkingDisabled, Tag("<disabled>")],
    by_type("enabled", "adaptive", "disabled"),
]


class OutputFormat(Body):
    """The answer's text shall be JSON of this schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """What the answer shall be like."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="Accepted: a hint, which the model is not shown."
    )
    format: OutputFormat | None = None


class Metadata(Body):
    """Accepted; nothing is made of it."""

    user_id: str | None = None


class CountTokensRequest(Body):
    """A conversation to count the tokens of, and the part of a request that makes the prompt."""

    model: ModelName = Field(
        description="Name of the model, any where there is one; echoed in the answer.", examples=["tgi"]
    )
    messages: list[InputMessage] = Field(min_length=1, examples=[[{"role": "user", "content": "Hello"}]])
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

    unsupported: ClassVar = {
        "container": Unsupported("no code is run here"),
        "mcp_servers": Unsupported("tools are called by the client"),
    }

    max_tokens: Annotated[U32, Field(ge=1)] = Field(description=CLAMPED)
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = None
    stream: bool = False
    temperature: Annotated[F32, Field(ge=0, le=1)] | None = Field(default=None, description="0 takes the likeliest.")
    top_p: Annotated[F32, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    # Accepted: they concern Anthropic's service, or shorten conversations that are longer than ours can be.
    diagnostics: Any = None
    inference_geo: Any = None
    context_management: Any = None
