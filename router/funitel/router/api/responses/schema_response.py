"""Answer records of OpenAI's Responses API: a response, its items, and the events of a stream."""

from typing import Any, Literal

from pydantic import Field

from funitel.router.api.common.schema_base import ApiModel, ApiRootModel, Body, CachedByTier, is_none
from funitel.router.api.responses.schema_request import AnyTool, Choice, Item, Status, TextConfig

# Output items


class TokenLogprob(ApiModel):
    """A token with its log-probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class Logprob(TokenLogprob):
    """A token of the answer, with the likeliest ones at its place."""

    top_logprobs: list[TokenLogprob]


class OutputText(ApiModel):
    """Text of the answer."""

    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = Field(default_factory=list, description="Always empty.")
    logprobs: list[Logprob] = Field(default_factory=list)


class OutputMessage(ApiModel):
    """The answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status = "in_progress"
    content: list[OutputText] = Field(default_factory=list)


class ReasoningPart(ApiModel):
    """Text of reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = ""


class OutputReasoning(ApiModel):
    """What the model thought before it answered; never summarized."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: Status = "in_progress"
    summary: list[Any] = Field(default_factory=list, description="Always empty.")
    content: list[ReasoningPart] = Field(default_factory=list)


class OutputFunctionCall(ApiModel):
    """A call of a function."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: Status = "in_progress"
    call_id: str
    name: str
    namespace: str | None = Field(default=None, exclude_if=is_none)
    arguments: str = ""


OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall


# The response


class InputTokensDetails(ApiModel):
    """Where the prompt's tokens came from."""

    cached_tokens: int = 0
    cached_tokens_by_tier: CachedByTier | None = Field(default=None, exclude_if=is_none)
    cache_write_tokens: int = 0


class OutputTokensDetails(ApiModel):
    """What the answer's tokens were spent on."""

    reasoning_tokens: int


class ResponseUsage(ApiModel):
    """Tokens of the prompt and of the answer."""

    input_tokens: int
    input_tokens_details: InputTokensDetails = Field(default_factory=InputTokensDetails)
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(ApiModel):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(ApiModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseReasoning(Body):
    """How the model was asked to reason."""

    effort: str | None
    summary: str | None


class ModelResponse(ApiModel):
    """An answer, and what was asked for it."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"] = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = Field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: str | Choice
    tools: list[AnyTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes."""
        return self.status not in ("queued", "in_progress")


class DeletedResponse(ApiModel):
    """A response that is stored no more."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(ApiModel):
    """Items of the conversation a response answered."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokenCount(ApiModel):
    """Tokens of a prompt."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


# Events of a stream


class _Event(ApiModel):
    sequence_number: int = Field(default=0, description="From 0, one more with each event.")


class ResponseEvent(_Event):
    """The response begins, or has ended."""

    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ModelResponse


class ItemEvent(_Event):
    """An item begins, or is complete."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class _InItem(_Event):
    item_id: str
    output_index: int


class PartEvent(_InItem):
    """A part of an item begins, or is complete."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int = 0
    part: OutputText | ReasoningPart


class TextDeltaEvent(_InItem):
    """More text."""

    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    content_index: int = 0
    delta: str
    logprobs: list[Logprob]


class TextDoneEvent(_InItem):
    """A text is complete."""

    type: Literal["response.output_text.done"] = "response.output_text.done"
    content_index: int = 0
    text: str
    logprobs: list[Logprob]


class ReasoningDeltaEvent(_InItem):
    """More reasoning."""

    type: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"
    content_index: int = 0
    delta: str


class ReasoningDoneEvent(_InItem):
    """Reasoning is complete."""

    type: Literal["response.reasoning_text.done"] = "response.reasoning_text.done"
    content_index: int = 0
    text: str


class ArgumentsDeltaEvent(_InItem):
    """More JSON text of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
    delta: str


class ArgumentsDoneEvent(_InItem):
    """The arguments of a call are complete."""

    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    name: str
    arguments: str


AnyEvent = (
    ResponseEvent
    | ItemEvent
    | PartEvent
    | TextDeltaEvent
    | TextDoneEvent
    | ReasoningDeltaEvent
    | ReasoningDoneEvent
    | ArgumentsDeltaEvent
    | ArgumentsDoneEvent
)


class ResponseStreamEvent(ApiRootModel[AnyEvent]):
    """An event of a streamed response; its name is its type."""
