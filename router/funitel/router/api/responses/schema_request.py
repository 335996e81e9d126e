"""Request records of OpenAI's Responses API: items of a conversation and how to continue it.

Fields that only concern OpenAI's service are accepted; known fields that would change the answer and are not supported
are refused by name unless they ask for nothing; `FieldPolicy` decides on unknown ones.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, Tag, ValidationInfo, model_validator

from funitel.router.api.common.field_policy import FieldPolicy, Unsupported
from funitel.router.api.common.schema_base import (
    CLAMPED,
    F32,
    U32,
    ApiModel,
    Body,
    Metadata,
    ModelName,
    ServiceTier,
    by_type,
)

Status = Literal["in_progress", "completed", "incomplete"]

# Items of a conversation: what clients send, and what is kept of what was sent and answered


class InputText(Body):
    """Text that was given."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = Field(default=None, description="Accepted.")


class InputImage(Body):
    """An image that was given: its URL, or its bytes as one, `data:image/png;base64,...`."""

    unsupported: ClassVar = {"file_id": Unsupported("files are not kept for it here; send the image in `image_url`")}

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high", "original"] | None = Field(
        default=None, description="How finely the image is looked at, where the model's processor knows it."
    )
    prompt_cache_breakpoint: dict[str, Any] | None = Field(default=None, description="Accepted.")


class OutputTextPart(Body):
    """Text that was answered."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(default_factory=list, description="Accepted as they were answered.")
    logprobs: list[Any] | None = Field(default=None, description="Accepted as they were answered.")


class RefusalPart(Body):
    """A refusal that was answered elsewhere."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """What it says."""
        return self.refusal


def _as_parts(content: Any) -> Any:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


Part = Annotated[
    Annotated[InputText, Tag("<input_text>")]
    | Annotated[InputImage, Tag("<input_image>")]
    | Annotated[OutputTextPart, Tag("<output_text>")]
    | Annotated[RefusalPart, Tag("<refusal>")],
    by_type("input_text", "input_image", "output_text", "refusal"),
]
Parts = Annotated[list[Part], BeforeValidator(_as_parts, json_schema_input_type=str | list[Part])]


class _Item(Body):
    id: str | None = None
    status: Status | None = None


class MessageItem(_Item):
    """A message; the assistant's too."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    phase: Literal["commentary", "final_answer"] | None = Field(default=None, description="Accepted.")


class FunctionCallItem(_Item):
    """A call of a function; `arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = Field(default=None, description="Of the function.")
    arguments: str
    caller: dict[str, Any] | None = Field(default=None, description="Accepted as it was answered.")


class FunctionCallOutputItem(_Item):
    """What a call has brought."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts
    name: str | None = None
    namespace: str | None = None
    caller: dict[str, Any] | None = Field(default=None, description="Accepted as it was answered.")


class SummaryText(Body):
    """A summary of reasoning."""

    type: Literal["summary_text"]
    text: str


class ReasoningText(Body):
    """The text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_Item):
    """What the model thought before it went on."""

    unsupported: ClassVar = {"encrypted_content": Unsupported("it cannot be read here")}

    type: Literal["reasoning"]
    summary: list[SummaryText] = Field(default_factory=list)
    content: list[ReasoningText] | None = None

    @property
    def text(self) -> str:
        """The reasoning, or if there is none its summary."""
        return "".join(part.text for part in self.content or self.summary)


class ItemReference(Body):
    """An item of a response that is stored."""

    type: Literal["item_reference"]
    id: str


Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
AnyItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<item_reference>")],
    by_type("message", "function_call", "function_call_output", "reasoning", "item_reference", default="message"),
]


def _as_items(value: Any) -> Any:
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


# How to go on


class FunctionTool(Body):
    """A function the model may call."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="JSON schema of the arguments, an object.")
    strict: bool | None = Field(default=None, description="Calls follow the schema; forced ones do in any case.")
    defer_loading: bool | None = Field(default=None, description="Accepted: the model is shown every function at once.")
    allowed_callers: list[Literal["direct"]] | None = None
    output_schema: dict[str, Any] | None = Field(default=None, description="Accepted; the model is not shown it.")


class NamespaceTool(Body):
    """Functions of one namespace."""

    type: Literal["namespace"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = Field(default=None, description="Shown to the model with each function.")
    tools: list[Annotated[Annotated[FunctionTool, Tag("<function>")], by_type("function")]]


HOSTED = ("web_search", "web_search_preview", "image_generation", "tool_search")


class HostedTool(Body):
    """A tool that OpenAI runs: not shown to the model, with a warning; refused by a strict policy."""

    model_config = ConfigDict(extra="allow")

    type: Literal[HOSTED]  # type: ignore[valid-type]

    @model_validator(mode="before")
    @classmethod
    def _take_known_fields(cls, content: Any, info: ValidationInfo) -> Any:
        if isinstance(info.context, FieldPolicy):
            if info.context.is_strict:
                raise ValueError(f"type `{content['type']}` is not supported: the server has no such tool")
            info.context.note("tools", {content["type"]: None}, ())
        return content


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[HostedTool, Tag("<web_search>")]
    | Annotated[HostedTool, Tag("<web_search_preview>")]
    | Annotated[HostedTool, Tag("<image_generation>")]
    | Annotated[HostedTool, Tag("<tool_search>")],
    by_type("function", "namespace", *HOSTED),
]


class FunctionChoice(Body):
    """This function must be called."""

    type: Literal["function"]
    name: str


class AllowedToolsChoice(Body):
    """Which functions may be called, and whether one must be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FunctionChoice] = Field(min_length=1)


def _as_choice(value: Any) -> Any:
    """A choice that is a word, as an object."""
    return {"type": value} if isinstance(value, str) else value


class ModeChoice(Body):
    """Whether a function may, must or must not be called."""

    type: Literal["auto", "none", "required"]


Choice = Annotated[
    Annotated[ModeChoice, Tag("<auto>")]
    | Annotated[ModeChoice, Tag("<none>")]
    | Annotated[ModeChoice, Tag("<required>")]
    | Annotated[FunctionChoice, Tag("<function>")]
    | Annotated[AllowedToolsChoice, Tag("<allowed_tools>")],
    by_type("auto", "none", "required", "function", "allowed_tools"),
    BeforeValidator(
        _as_choice, json_schema_input_type=Literal["auto", "none", "required"] | FunctionChoice | AllowedToolsChoice
    ),
]


class PlainFormat(Body):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(Body):
    """A JSON object."""

    type: Literal["json_object"]


class SchemaFormat(Body):
    """JSON of a schema; the text always follows it, whatever `strict` says."""

    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


Format = Annotated[
    Annotated[PlainFormat, Tag("<text>")]
    | Annotated[ObjectFormat, Tag("<json_object>")]
    | Annotated[SchemaFormat, Tag("<json_schema>")],
    by_type("text", "json_object", "json_schema"),
]


class TextConfig(Body):
    """What the text of the answer shall be like."""

    format: Format = Field(default_factory=lambda: PlainFormat(type="text"))
    verbosity: Literal["low", "medium", "high"] | None = Field(
        default=None, description="A hint, given to the model's template as a variable."
    )


class ReasoningConfig(Body):
    """How the model shall reason."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="Given to the model's template; refused if that knows none."
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        default=None, description="Accepted: reasoning is answered as it is, never summarized."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(default=None, description="The same.")
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(Body):
    """What a stream carries besides."""

    include_obfuscation: bool | None = Field(default=None, description="Accepted; events are never padded.")


Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


class InputTokensRequest(Body):
    """A conversation to count the tokens of, and the part of a request that makes the prompt."""

    unsupported: ClassVar = {
        "conversation": Unsupported("conversations are not stored here; use `previous_response_id`")
    }

    input: Annotated[
        list[AnyItem], BeforeValidator(_as_items, json_schema_input_type=str | list[AnyItem]), Field(min_length=1)
    ]
    model: ModelName | None = Field(
        default=None, description="Name of the model, any where there is one; echoed in the answer."
    )
    instructions: str | None = None
    previous_response_id: str | None = Field(default=None, description="Of a response that is stored.")
    tools: list[AnyTool] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None, description="`auto` drops the first turns of a conversation that is too long."
    )


class ResponsesRequest(InputTokensRequest):
    """A conversation to go on with."""

    unsupported: ClassVar = {
        **InputTokensRequest.unsupported,
        "prompt": Unsupported("prompts are not stored here"),
        "moderation": Unsupported("answers are not moderated here"),
        "image": Unsupported("no images are made here"),
    }

    max_output_tokens: Annotated[U32, Field(ge=1)] | None = Field(
        default=None, description=f"Up to the context's end if absent. {CLAMPED}"
    )
    temperature: Annotated[F32, Field(ge=0, le=2)] | None = Field(default=None, description="0 takes the likeliest.")
    top_p: Annotated[F32, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[Includable] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = Field(default=None, description="Whether the response can be retrieved; yes by default.")
    metadata: Metadata | None = None
    background: bool | None = Field(
        default=None, description="Whether to answer at once and go on without the client; needs `store`."
    )
    # Accepted: they concern OpenAI's service, tools that are not there, or conversations longer than ours can be.
    access_programs: Any = None
    context_management: Any = None
    max_tool_calls: U32 | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: ServiceTier | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer shall say how likely its tokens were."""
        return "message.output_text.logprobs" in (self.include or ())


class InputItemsQuery(ApiModel):
    """Which items of a stored response to list."""

    limit: int = Field(default=20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"
    after: str | None = Field(default=None, description="The id of the last item listed before.")
    include: list[str] | None = Field(default=None, description="Accepted.")


class RetrieveQuery(ApiModel):
    """How to retrieve a stored response."""

    stream: bool = Field(default=False, description="Whether to send its events, those to come included.")
    starting_after: int | None = Field(
        default=None, ge=0, description="The number of the last event that was received; for a stream."
    )
