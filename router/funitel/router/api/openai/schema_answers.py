"""Answer records of OpenAI's chat route, whole and in chunks."""

from typing import Literal

from pydantic import Field

from funitel.router.api.common.schema_base import ApiModel, CachedByTier, is_none
from funitel.router.serving.timings import AnswerTimings


class TokenLogprob(ApiModel):
    """A token with its log-probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    """A token of the answer, with the likeliest ones at its place."""

    top_logprobs: list[TokenLogprob]


class Logprobs(ApiModel):
    """Log-probabilities of the answer's tokens, the model's own."""

    content: list[ContentLogprob]


class CalledFunction(ApiModel):
    """The function a model calls; `arguments` is JSON text, cut off where the answer was."""

    name: str
    arguments: str


class AnsweredToolCall(ApiModel):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AnswerMessage(ApiModel):
    """The answer; `reasoning` and `reasoning_content`, two names of the same, are what the model thought before it."""

    role: Literal["assistant"] = "assistant"
    content: str | None = Field(description="Null when there is nothing but tool calls.")
    reasoning_content: str | None = Field(default=None, exclude_if=is_none)
    reasoning: str | None = Field(default=None, exclude_if=is_none)
    tool_calls: list[AnsweredToolCall] | None = Field(default=None, exclude_if=is_none)
    function_call: CalledFunction | None = Field(
        default=None, exclude_if=is_none, description="The call, where the request has `functions`."
    )


class PromptLogprob(ApiModel):
    """A token at one place of the prompt; the likeliest has rank 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""At each place of a prompt, its token and the likeliest ones by id; null at the first, and where it is not known."""


class ChatChoice(ApiModel):
    """The answer and why it ended."""

    index: int = 0
    message: AnswerMessage
    logprobs: Logprobs | None
    finish_reason: str = Field(description="`stop`, `length`, `tool_calls`, `function_call` or `abort`.")
    token_ids: list[int] | None = Field(default=None, exclude_if=is_none)


class PromptTokensDetails(ApiModel):
    """What is known of the prompt's tokens."""

    cached_tokens: int = Field(default=0, description="Tokens that were not computed again.")
    cached_tokens_by_tier: CachedByTier | None = Field(default=None, exclude_if=is_none)


class CompletionTokensDetails(ApiModel):
    """What is known of the completion's tokens."""

    reasoning_tokens: int = 0


class Usage(ApiModel):
    """Tokens of the prompt, and of all the answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = Field(default_factory=PromptTokensDetails)
    completion_tokens_details: CompletionTokensDetails = Field(default_factory=CompletionTokensDetails)


class AnswerHead(ApiModel):
    """What every answer and every chunk begins with."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: Literal["default"] | None = Field(
        default=None, exclude_if=is_none, description="Where the request asks for one."
    )
    timings: AnswerTimings | None = Field(
        default=None, exclude_if=is_none, description="Where the request asks for them; of a stream in the last chunk."
    )


class ChatCompletion(AnswerHead):
    """An answered chat."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = Field(default=None, exclude_if=is_none)
    prompt_token_ids: list[int] | None = Field(default=None, exclude_if=is_none)


class FunctionDelta(ApiModel):
    """The name of a called function, once, and more of the JSON text of its arguments."""

    name: str | None = Field(default=None, exclude_if=is_none)
    arguments: str


class ToolCallDelta(ApiModel):
    """More of a tool call; its first delta has id, type and name."""

    index: int
    id: str | None = Field(default=None, exclude_if=is_none)
    type: Literal["function"] | None = Field(default=None, exclude_if=is_none)
    function: FunctionDelta


class Delta(ApiModel):
    """What a chunk adds to the answer."""

    role: Literal["assistant"] | None = Field(default=None, exclude_if=is_none)
    content: str | None = Field(default=None, exclude_if=is_none)
    reasoning_content: str | None = Field(default=None, exclude_if=is_none)
    reasoning: str | None = Field(default=None, exclude_if=is_none)
    tool_calls: list[ToolCallDelta] | None = Field(default=None, exclude_if=is_none)
    function_call: FunctionDelta | None = Field(default=None, exclude_if=is_none)


class ChunkChoice(ApiModel):
    """One step of the answer; the last says why it ended."""

    index: int = 0
    delta: Delta
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = Field(default=None, exclude_if=is_none, description="Those since the chunk before.")


class ChatCompletionChunk(AnswerHead):
    """One event of a streamed answer."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = Field(default=None, exclude_if=is_none, description="In the first chunk.")
