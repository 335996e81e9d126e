"""The fields that chats and completions share: how tokens are chosen, in the words of OpenAI, TGI and vLLM."""

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from funitel.proto.errors import InvalidRequest
from funitel.router.api.common.schema_base import (
    CLAMPED,
    F32,
    TARGET_LANGUAGE,
    U32,
    WITH_TIMINGS,
    Body,
    ModelName,
    Priority,
    StopList,
    TargetLanguage,
)
from funitel.router.api.common.schema_beams import BeamFields
from funitel.router.api.common.schema_strategies import StrategyFields
from funitel.router.api.openai.schema_structured import StructuredOutputs
from funitel.router.api.openai.schema_tools import ResponseFormat
from funitel.router.api.openai.unsupported_fields import SAMPLING
from funitel.router.core.grammar import Grammar
from funitel.router.serving.sampling_request import U64_RANGE, BeamRequest, SamplingRequest
from funitel.router.serving.strategies import with_algorithm

MAX_CHOICES = 128  # OpenAI's
MAX_STOP_TOKENS = 1024

GRAMMAR_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)

# What both call otherwise than `SamplingRequest` does.
SAMPLING_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "truncate": "truncate_prompt_tokens",
    "grammar": "response_format",
    "count_penalty": "frequency_penalty",
}


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


class SamplingFields(StrategyFields, BeamFields):
    """What chats and completions say alike of how tokens are chosen."""

    unsupported: ClassVar = SAMPLING

    model: ModelName | None = Field(
        default=None, description="The name of an adapter, or any other for the model itself; echoed."
    )
    max_tokens: U32 | None = Field(default=None, description=CLAMPED)
    temperature: Annotated[F32, Field(ge=0)] | None = Field(default=None, description="0 takes the likeliest token.")
    top_p: Annotated[F32, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(default=None, description="-1 and 0 are off.")
    min_p: Annotated[F32, Field(ge=0, le=1)] | None = Field(
        default=None, description="Least probability of a token, as a share of the likeliest one's."
    )
    frequency_penalty: Annotated[F32, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[F32, Field(ge=-2, le=2)] | None = None
    typical_p: Annotated[F32, Field(gt=0, le=1)] | None = Field(default=None, description="1 is off.")
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
    # vLLM's.
    stop_token_ids: Annotated[list[U32], Field(max_length=MAX_STOP_TOKENS)] | None = Field(
        default=None, description="Tokens that end the answer, too."
    )
    include_stop_str_in_output: bool | None = Field(
        default=None, description="Whether the stop that ended it is part of the text."
    )
    skip_special_tokens: bool | None = Field(
        default=None, description="False makes special tokens part of the text, save the end token."
    )
    spaces_between_special_tokens: Any = Field(default=None, description="Accepted; there are none.")
    add_special_tokens: bool | None = Field(
        default=None, description="Whether special tokens are added to the prompt; to a text by default, to a chat not."
    )
    prompt_logprobs: U32 | None = Field(
        default=None, description="So many of the likeliest tokens at each place of the prompt; not in streams."
    )
    return_token_ids: bool | None = Field(
        default=None, description="Whether the answer has the tokens of the prompt and of the text."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**32)] | None = Field(
        default=None, description="Keep the last so many tokens of the prompt; -1: as many as fit."
    )
    timings: bool | None = Field(default=None, description=WITH_TIMINGS)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = Field(default=None, description="A JSON schema, or the text of one.")
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = Field(default=None, description="A context-free grammar, as Lark or GBNF.")
    n: Annotated[U32, Field(ge=1, le=MAX_CHOICES)] | None = Field(default=None, description="Answers to generate.")
    user: str | None = Field(default=None, description="Accepted.")
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

    def check_stream(self) -> None:
        """Raise InvalidRequest for options of streams without one, and for what streams do not have."""
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("`prompt_logprobs` is not available when `stream` is true", "prompt_logprobs")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("`stream_options` needs `stream` to be true", "stream_options")

    @property
    def _beams(self) -> BeamRequest | None:
        """The beam search: vLLM's `n` is its width."""
        return self.beam_request(self.n or 1, self.n or 1, "n")

    @property
    def grammar(self) -> Grammar | None:
        """What the answer must follow; None when any text will do.

        Raises:
            InvalidRequest: it is said in more than one field, or a field makes no sense.
        """
        guided = StructuredOutputs.model_construct(
            json_=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )
        given = (
            None if self.response_format is None else self.response_format.grammar(),
            None if self.structured_outputs is None else self.structured_outputs.grammar_of("structured_outputs."),
            guided.grammar_of("guided_"),
        )
        found = [grammar for grammar in given if grammar is not None]
        if len(found) > 1:
            names = self._grammar_fields
            raise InvalidRequest(f"`{names[1]}` and `{names[0]}` exclude each other", names[1])
        return found[0] if found else None

    @property
    def _grammar_fields(self) -> list[str]:
        return [name for name in GRAMMAR_FIELDS if getattr(self, name) is not None]

    @property
    def names(self) -> dict[str, str]:
        """What the request calls otherwise than `SamplingRequest` does."""
        fields = self._grammar_fields
        return SAMPLING_NAMES | {"grammar": fields[0]} if fields else SAMPLING_NAMES

    def sampling(self, *, max_tokens: int | None, top_logprobs: int | None) -> SamplingRequest:
        """The same for the engine; `top_logprobs` is None where no log-probabilities are wanted."""
        sampling = SamplingRequest(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k if (self.top_k or 0) > 0 else None,
            min_p=self.min_p,
            typical_p=None if self.typical_p == 1 else self.typical_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            count_penalty=self.frequency_penalty or 0.0,
            logit_bias={str(int(token_id)): bias for token_id, bias in (self.logit_bias or {}).items()},
            seed=self.seed,
            max_new_tokens=max_tokens,
            stop=tuple(self.stop),
            ignore_eos=bool(self.ignore_eos),
            min_new_tokens=self.min_tokens or 0,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            bad_words=tuple(self.bad_words or ()),
            shows_special=self.skip_special_tokens is False,
            shows_stop=bool(self.include_stop_str_in_output),
            truncate=self.truncate_prompt_tokens,
            grammar=self.grammar,
            prompt_logprobs=self.prompt_logprobs,
            cache_salt=self.cache_salt or "",
            priority=self.priority,
            target_language=self.target_language,
            top_n_tokens=top_logprobs,
            raw_logprobs=top_logprobs is not None,
            strategy=self.strategy,
            model=self.model,
            speculate=self.speculate,
            beams=self._beams,
        )
        return sampling if self.decoding_alg is None else with_algorithm(sampling, self.decoding_alg)
