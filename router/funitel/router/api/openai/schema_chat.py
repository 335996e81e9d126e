"""OpenAI's chat request as a typed record, and the sampling fields it shares with completions.

Every field of OpenAI's chat request is known here and falls in one of three groups: it is honoured; it only
concerns OpenAI's service and is accepted; or it would change the answer and is refused by name, unless it
asks for nothing (`unsupported_fields`). `FieldPolicy` decides on unknown ones.
"""

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from funitel.proto.errors import InvalidRequest
from funitel.router.api.common.schema_base import F32, TARGET_LANGUAGE, U32, Body, Priority, StopList, TargetLanguage
from funitel.router.api.openai.schema_messages import Message
from funitel.router.api.openai.schema_tools import ResponseFormat, ToolChoiceObject, ToolDefinition, tools_and_choice
from funitel.router.api.openai.unsupported_fields import CHAT, SAMPLING
from funitel.router.chat.call import ChatCall
from funitel.router.serving.sampling_request import U64_RANGE, SamplingRequest

MAX_CHOICES = 128  # OpenAI's


def _no_list(value: Any) -> Any:
    """TGI's document says `logit_bias` is a list; an empty one asks for nothing."""
    return None if value == [] else value


TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
LogitBias = Annotated[
    dict[TokenId, Annotated[F32, Field(ge=-100, le=100)]] | None,
    BeforeValidator(_no_list, json_schema_input_type=dict[str, float] | None),
]


class StreamOptions(Body):
    """What a stream carries besides text."""

    include_usage: bool | None = Field(default=None, description="Whether the last chunk counts tokens.")
    continuous_usage_stats: bool | None = Field(
        default=None,
        description="Whether every chunk counts the tokens so far of its choice, unless `include_usage` is false.",
    )
    include_obfuscation: bool | None = Field(default=None, description="Accepted; chunks are never padded.")


class SamplingFields(Body):
    """What chats and completions say alike of how tokens are chosen."""

    unsupported: ClassVar = SAMPLING

    model: str | None = Field(default=None, description="Any name; echoed in the answer.")
    max_tokens: U32 | None = None
    temperature: Annotated[F32, Field(ge=0)] | None = Field(default=None, description="0 takes the likeliest token.")
    top_p: Annotated[F32, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(default=None, description="-1 and 0 are off.")
    min_p: Annotated[F32, Field(ge=0, le=1)] | None = Field(
        default=None, description="Least probability of a token, as a share of the likeliest one's."
    )
    frequency_penalty: Annotated[F32, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[F32, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[F32, Field(gt=0)] | None = Field(default=None, description="As on `/generate`.")
    logit_bias: LogitBias = Field(default=None, description="Token ids to what is added to their scores.")
    stop: StopList = Field(default_factory=list)
    ignore_eos: bool | None = Field(default=None, description="Whether to go on after the model's end token.")
    cache_salt: Annotated[str, Field(max_length=256)] | None = Field(
        default=None, description="Only requests of the same salt share computed prefixes."
    )
    priority: Priority | None = Field(
        default=None, description="Lower is sooner; a step is worth ten seconds of waiting. Wins over the header."
    )
    target_language: TargetLanguage | None = Field(default=None, description=TARGET_LANGUAGE)
    seed: Annotated[int, Field(ge=-(2**63), lt=U64_RANGE)] | None = None
    n: Annotated[U32, Field(ge=1, le=MAX_CHOICES)] | None = Field(default=None, description="Answers to generate.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream shall end with a count of tokens; one that counts in every chunk does unless told."""
        options = self.stream_options
        if options is None:
            return False
        return bool(options.continuous_usage_stats if options.include_usage is None else options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream shall count the tokens so far of its choice; vLLM's rule."""
        return (
            self.include_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
        )

    def check_stream_options(self) -> None:
        """Raise InvalidRequest when they are given without a stream."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("`stream_options` needs `stream` to be true", "stream_options")

    def sampling(self, *, max_tokens: int | None, top_logprobs: int | None) -> SamplingRequest:
        """The same for the engine; `top_logprobs` is None where no log-probabilities are wanted."""
        return SamplingRequest(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k if (self.top_k or 0) > 0 else None,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            count_penalty=self.frequency_penalty or 0.0,
            logit_bias={str(int(token_id)): bias for token_id, bias in (self.logit_bias or {}).items()},
            seed=self.seed,
            max_new_tokens=max_tokens,
            stop=tuple(self.stop),
            ignore_eos=bool(self.ignore_eos),
            cache_salt=self.cache_salt or "",
            priority=self.priority,
            target_language=self.target_language,
            top_n_tokens=top_logprobs,
            raw_logprobs=top_logprobs is not None,
        )


class ChatRequest(SamplingFields):
    """A chat to answer."""

    unsupported: ClassVar = CHAT

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Annotated[U32, Field(ge=1)] | None = Field(
        default=None, description="Wins over `max_tokens`."
    )
    max_tokens: Annotated[U32, Field(ge=1)] | None = None
    logprobs: bool | None = Field(default=None, description="The model's own, before any processing.")
    top_logprobs: U32 | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: str | ToolChoiceObject | None = Field(
        default=None, description="`auto`, `none`, `required`, or a function by its name."
    )
    parallel_tool_calls: bool | None = Field(default=None, description="Whether an answer may have several calls.")
    tool_prompt: str | None = Field(default=None, description="TGI's: what the model is told of the tools.")
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = Field(default=None, description="Where the model's template knows it.")
    continue_final_message: bool | None = Field(
        default=None, description="Whether to go on with the last message; by default if it is the assistant's."
    )
    add_generation_prompt: bool | None = Field(default=None, description="Whether the prompt begins the answer.")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Variables for the template.")
    # Accepted: they concern OpenAI's service, or help without changing the answer.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None

    def check(self) -> None:
        """Raise InvalidRequest for fields that contradict each other."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("`logprobs` must be true when `top_logprobs` is set", "top_logprobs")
        self.check_stream_options()

    @property
    def call(self) -> ChatCall:
        """The same for the chat core.

        Raises:
            InvalidRequest: `tool_choice` or `response_format` make no sense.
        """
        tools, choice = tools_and_choice(self.tools, self.tool_choice)
        return ChatCall(
            messages=tuple(message.message for message in self.messages),
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            tool_prompt=self.tool_prompt,
            grammar=None if self.response_format is None else self.response_format.grammar(),
            sampling=self.sampling(
                max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
                top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            ),
            n=self.n or 1,
            reasoning_effort=self.reasoning_effort,
            continue_final_message=self.continue_final_message,
            add_generation_prompt=self.add_generation_prompt,
            template_variables=self.chat_template_kwargs or {},
        )
