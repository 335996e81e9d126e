"""Bodies of OpenAI's routes, in and out, as typed records.

Every field of OpenAI's chat request is known here and falls in one of three groups: it is honoured; it only
concerns OpenAI's service and is accepted; or it would change the answer and is refused by name, unless it
asks for nothing.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from funitel.proto.errors import InvalidRequest
from funitel.router.chat.call import ChatCall, ChatMessage
from funitel.router.chat.sampling import ChatSampling
from funitel.router.schema_types import F32, U32, Body, StopList, is_none

U64_RANGE = 2**64

# Fields that would change the answer, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "logit_bias": (None, {}, []),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, [], ["text"]),
    "audio": (None,),
    "reasoning_effort": (None, "none"),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
    "moderation": (None,),
}


class OpenAIBody(Body):
    """A body whose unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")


# Requests


class TextPart(OpenAIBody):
    """A part of a message's content; text is the only kind."""

    type: str
    text: str = ""
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: Any = None
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None

    @field_validator("type")
    @classmethod
    def _is_text(cls, value: str) -> str:
        if value != "text":
            raise ValueError(f"content of type `{value}` is not supported, only `text`")
        return value


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Message(OpenAIBody):
    """One message of a chat. Fields copied from answers are accepted where they ask for nothing."""

    role: str
    content: Annotated[
        list[TextPart] | None, BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart] | None)
    ] = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None
    refusal: str | None = None
    annotations: Any = None

    @field_validator("tool_calls", "function_call", "audio")
    @classmethod
    def _asks_for_nothing(cls, value: Any) -> Any:
        if value not in (None, []):
            raise ValueError("is not supported in messages")
        return value

    @property
    def text(self) -> str:
        """The content's parts, joined."""
        return "".join(part.text for part in self.content or ())

    @property
    def message(self) -> ChatMessage:
        """The message in the words of the chat core."""
        return ChatMessage(role=self.role, text=self.text, name=self.name, tool_call_id=self.tool_call_id)


class StreamOptions(OpenAIBody):
    """What a stream carries besides text."""

    include_usage: bool | None = Field(default=None, description="Whether the last chunk counts tokens.")
    include_obfuscation: bool | None = Field(default=None, description="Accepted; chunks are never padded.")


class ChatRequest(OpenAIBody):
    """A chat to answer."""

    messages: list[Message] = Field(min_length=1)
    model: str | None = Field(default=None, description="Any name; echoed in the answer.")
    max_tokens: Annotated[U32, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[U32, Field(ge=1)] | None = Field(
        default=None, description="Wins over `max_tokens`."
    )
    temperature: Annotated[F32, Field(ge=0)] | None = Field(default=None, description="0 takes the likeliest token.")
    top_p: Annotated[F32, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[F32, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[F32, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[F32, Field(gt=0)] | None = Field(default=None, description="As on `/generate`.")
    stop: StopList = Field(default_factory=list)
    seed: Annotated[int, Field(ge=-(2**63), lt=U64_RANGE)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: U32 | None = None
    # Refused when they ask for something.
    n: U32 | None = None
    logit_bias: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    moderation: Any = None
    # Accepted: they concern OpenAI's service, or help without changing the answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    parallel_tool_calls: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None
    tool_prompt: Any = Field(default=None, description="TGI's; concerns tools only.")

    def refuse_unsupported(self) -> None:
        """Raise InvalidRequest for the first field that asks for what is not there."""
        for name, neutral in _UNSUPPORTED.items():
            if getattr(self, name) not in neutral:
                raise InvalidRequest(f"`{name}` is not supported", name)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("`logprobs` must be true when `top_logprobs` is set", "top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("`stream_options` needs `stream` to be true", "stream_options")

    @property
    def include_usage(self) -> bool:
        """Whether a stream shall end with a count of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def call(self) -> ChatCall:
        """The same wishes in the words of the chat core."""
        return ChatCall(
            messages=tuple(message.message for message in self.messages),
            sampling=ChatSampling(
                temperature=self.temperature,
                top_p=self.top_p,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty or 0.0,
                frequency_penalty=self.frequency_penalty or 0.0,
                seed=self.seed,
                max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
                stop=tuple(self.stop),
                top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            ),
        )


# Answers


class TokenLogprob(BaseModel):
    """A token with its log-probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    """A token of the answer, with the likeliest ones at its place."""

    top_logprobs: list[TokenLogprob]


class Logprobs(BaseModel):
    """Log-probabilities of the answer's tokens."""

    content: list[ContentLogprob]


class AnswerMessage(BaseModel):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    """The answer and why it ended."""

    index: int = 0
    message: AnswerMessage
    logprobs: Logprobs | None
    finish_reason: str = Field(description="`stop` or `length`.")


class Usage(BaseModel):
    """Tokens of the prompt and of the answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class _ChatHead(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatCompletion(_ChatHead):
    """An answered chat."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class Delta(BaseModel):
    """What a chunk adds to the answer."""

    role: Literal["assistant"] | None = Field(default=None, exclude_if=is_none)
    content: str | None = Field(default=None, exclude_if=is_none)


class ChunkChoice(BaseModel):
    """One step of the answer; the last says why it ended."""

    index: int = 0
    delta: Delta
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class ChatCompletionChunk(_ChatHead):
    """One event of a streamed answer."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]
    usage: Usage | None = None


class Model(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str


class ModelList(BaseModel):
    """The models that are served."""

    object: Literal["list"] = "list"
    data: list[Model]


class OpenAIError(BaseModel):
    """What went wrong, in OpenAI's words; `param` is the field at fault."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIErrorResponse(BaseModel):
    """Any failure of an OpenAI route; `error_type` is TGI's word for it."""

    error: OpenAIError
    error_type: str
