"""Request and answer records of TGI's native routes.

Knows no HTTP and no limit that depends on settings: those are in `validation`.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from funitel.proto.step import FinishReason, GeneratedText, Tokens
from funitel.router.api.common.schema_base import (
    ABOVE_0,
    CLAMPED,
    F32,
    F32_MAX,
    I32,
    MODEL_NAME,
    TARGET_LANGUAGE,
    U32,
    U64,
    WITH_TIMINGS,
    WITHIN_0_AND_1,
    ApiModel,
    ApiRootModel,
    CachedByTier,
    Documented,
    ModelBody,
    Priority,
    StopList,
    TargetLanguage,
    is_none,
)
from funitel.router.api.common.schema_beams import BeamFields
from funitel.router.api.common.schema_strategies import StrategyFields
from funitel.router.api.native.schema_grammar import GrammarType, grammar_of
from funitel.router.serving.sampling_request import SamplingRequest
from funitel.router.serving.strategies import with_algorithm
from funitel.router.serving.timings import AnswerTimings

# Requests


NAMES = {"min_new_tokens": "min_tokens"}
"""What the native routes call otherwise than `SamplingRequest` does."""


class GenerateParameters(StrategyFields, BeamFields):
    """How to generate; an absent parameter is off."""

    best_of: Annotated[U32, ABOVE_0] | None = Field(
        default=None, description="Sequences to generate, or beams to search; the likeliest is the answer."
    )
    temperature: Annotated[F32, ABOVE_0] | None = Field(default=None, description="Above 0; logits are divided by it.")
    repetition_penalty: Annotated[F32, ABOVE_0] | None = Field(default=None, description="Above 0; 1.0 is none.")
    frequency_penalty: Annotated[F32, Documented(minimum=-2, maximum=2)] | None = Field(
        default=None, description="Within -2.0..2.0; times a token's share of the text."
    )
    top_k: Annotated[I32, ABOVE_0] | None = Field(
        default=None, description="Above 0; sample from that many likeliest tokens."
    )
    top_p: Annotated[F32, WITHIN_0_AND_1] | None = Field(
        default=None, description="Between 0 and 1; sample from the likeliest tokens that sum to it."
    )
    typical_p: Annotated[F32, WITHIN_0_AND_1] | None = Field(
        default=None, description="Between 0 and 1; typical decoding's mass."
    )
    do_sample: bool = Field(default=False, description="Sample; true by default only when `parameters` is absent.")
    max_new_tokens: Annotated[U32, ABOVE_0] | None = Field(
        default=None, description=f"Most completion tokens; up to the context's end if absent. {CLAMPED}"
    )
    return_full_text: bool | None = Field(default=None, description="Whether the prompt begins the generated text.")
    stop: StopList = Field(default_factory=list, description="Texts that end the completion.")
    truncate: Annotated[U32, ABOVE_0] | None = Field(default=None, description="Keep the last so many prompt tokens.")
    watermark: bool = Field(default=False, description="Mark the text statistically (arXiv 2301.10226).")
    details: bool = Field(default=False, description="Whether to return tokens and how the sequence ended.")
    decoder_input_details: bool = Field(
        default=False, description="Whether to return the prompt's tokens; implies details."
    )
    timings: bool | None = Field(default=None, description=f"{WITH_TIMINGS} Implies details.")
    seed: U64 | None = Field(default=None, description="Makes sampling repeatable; random if absent.")
    top_n_tokens: U32 | None = Field(default=None, description="Return so many likeliest tokens at each position.")
    grammar: GrammarType | None = Field(default=None, description="What the text shall look like.")
    adapter_id: str | None = Field(default=None, description="Name of an adapter that computes beside the model.")
    # Beyond TGI's.
    cache_salt: Annotated[str, Field(max_length=256)] | None = Field(
        default=None, description="Only requests of the same salt share computed prefixes."
    )
    priority: Priority | None = Field(
        default=None, description="Lower is sooner; a step is worth ten seconds of waiting. Wins over the header."
    )
    min_p: Annotated[F32, Documented(minimum=0, maximum=1)] | None = Field(
        default=None, description="Within 0..1; drop tokens less likely than this share of the likeliest."
    )
    logit_bias: dict[str, Annotated[F32, Documented(minimum=-100, maximum=100)]] | None = Field(
        default=None, description="Token id to what is added to its score, within -100..100."
    )
    target_language: TargetLanguage | None = Field(default=None, description=TARGET_LANGUAGE)
    ignore_eos: bool = Field(default=False, description="Go on after the end token, up to the token limit.")
    ignore_eos_token: bool = Field(default=False, description="The same; TGI's word for it.")

    @property
    def sampling(self) -> SamplingRequest:
        """The same for the engine; what is said of the answer's shape stays here."""
        sampling = SamplingRequest(
            do_sample=self.do_sample,
            best_of=None if self.use_beam_search else self.best_of,
            beams=self.beam_request(self.best_of or 1, self.best_of or 1, "best_of"),
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            typical_p=self.typical_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias or {},
            seed=self.seed,
            watermark=self.watermark,
            strategy=self.strategy,
            min_new_tokens=self.min_tokens or 0,
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            bad_words=tuple(self.bad_words or ()),
            grammar=None if self.grammar is None else grammar_of(self.grammar),
            target_language=self.target_language,
            max_new_tokens=self.max_new_tokens,
            stop=tuple(self.stop),
            ignore_eos=self.ignore_eos or self.ignore_eos_token,
            truncate=self.truncate,
            top_n_tokens=self.top_n_tokens,
            decoder_input_details=self.decoder_input_details,
            adapter_id=self.adapter_id,
            cache_salt=self.cache_salt or "",
            priority=self.priority,
            speculate=self.speculate,
        )
        return sampling if self.decoding_alg is None else with_algorithm(sampling, self.decoding_alg)

    @property
    def wants_details(self) -> bool:
        """Whether the answer shall say more than its text."""
        return self.details or self.decoder_input_details or bool(self.timings)


class GenerateRequest(ModelBody):
    """A prompt and how to go on from it."""

    inputs: str = Field(description="The prompt.")
    parameters: GenerateParameters | None = None

    @property
    def effective_parameters(self) -> GenerateParameters:
        """The parameters, or what TGI assumes without any: sampling, all else off."""
        return self.parameters or GenerateParameters(do_sample=True)


class CompatGenerateRequest(GenerateRequest):
    """A prompt for `POST /`, which streams or not by a flag."""

    stream: bool = Field(default=False, description="Whether to answer with Server-Sent Events.")


# Answers


def _finite(logprob: float) -> float | None:
    """JSON has no NaN and no infinity; TGI writes null."""
    return logprob if -F32_MAX <= logprob <= F32_MAX else None


class PrefillToken(ApiModel):
    """A prompt token; the first has no log-probability."""

    id: int
    text: str
    logprob: float | None

    @classmethod
    def list_of(cls, tokens: Tokens) -> list[Self]:
        """All of `tokens`."""
        rows = zip(tokens.ids, tokens.texts, tokens.logprobs, strict=True)
        return [cls(id=id, text=text, logprob=_finite(logprob)) for id, text, logprob in rows]


class Token(ApiModel):
    """A completion token."""

    id: int
    text: str
    logprob: float | None
    special: bool

    @classmethod
    def list_of(cls, tokens: Tokens) -> list[Self]:
        """All of `tokens`."""
        return [
            cls(id=i, text=text, logprob=logprob, special=special) for i, text, logprob, special in cls.rows_of(tokens)
        ]

    @staticmethod
    def rows_of(tokens: Tokens) -> Iterator[tuple[int, str, float | None, bool]]:
        """The fields of all of `tokens`, in their order."""
        specials = tokens.is_special or (False,) * len(tokens.ids)
        return zip(tokens.ids, tokens.texts, map(_finite, tokens.logprobs), specials, strict=True)


_CACHED = "Prompt tokens that were not computed again, where a tier of the prefix cache lies below the KV pool."


class _Ending(ApiModel):
    finish_reason: Literal["length", "eos_token", "stop_sequence", "abort"]
    generated_tokens: int
    seed: int | None = Field(description="null unless tokens were sampled.")


class _SequenceDetails(_Ending):
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | None = Field(default=None, exclude_if=is_none)


class BestOfSequence(_SequenceDetails):
    """One of the sequences that were not the best."""

    generated_text: str


class Details(_SequenceDetails):
    """How a completion came about."""

    timings: AnswerTimings | None = Field(default=None, exclude_if=is_none)
    cached_tokens: int | None = Field(default=None, exclude_if=is_none, description=_CACHED)
    cached_tokens_by_tier: CachedByTier | None = Field(default=None, exclude_if=is_none)
    best_of_sequences: list[BestOfSequence] | None = Field(default=None, exclude_if=is_none)


class GenerateResponse(ApiModel):
    """A completion."""

    generated_text: str
    details: Details | None = Field(default=None, exclude_if=is_none)


class StreamDetails(_Ending):
    """How a streamed completion ended."""

    input_length: int
    timings: AnswerTimings | None = Field(default=None, exclude_if=is_none)
    cached_tokens: int | None = Field(default=None, exclude_if=is_none, description=_CACHED)
    cached_tokens_by_tier: CachedByTier | None = Field(default=None, exclude_if=is_none)


class StreamResponse(ApiModel):
    """One token of a streamed completion; the last has the whole text."""

    index: int = Field(description="From 1.")
    token: Token
    top_tokens: list[Token] | None = Field(default=None, exclude_if=is_none)
    generated_text: str | None
    details: StreamDetails | None


class SimpleToken(ApiModel):
    """A token of a text; `start` and `stop` count bytes."""

    id: int
    text: str
    start: int
    stop: int


class TokenizeResponse(ApiRootModel[list[SimpleToken]]):
    """The tokens of a text, in order."""


class ChatTokenizeResponse(ApiModel):
    """The prompt made of a chat, and its tokens."""

    tokenize_response: TokenizeResponse
    templated_text: str


class InfoQuery(ApiModel):
    """Which model a page is about."""

    model: str | None = Field(default=None, description=MODEL_NAME)


class Info(ApiModel):
    """What is served, and its limits."""

    model_id: str
    model_sha: str | None = None
    model_pipeline_tag: str | None = None
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    speculate: int | None = Field(
        default=None, exclude_if=is_none, description="Most draft tokens of a step; absent without speculation."
    )
    router: str
    version: str
    sha: str | None = None
    docker_label: str | None = None
    lora_adapters: list[str] | None = Field(
        default=None, exclude_if=is_none, description="Names of adapters that requests can ask for."
    )
    layer_parts: str | None = Field(
        default=None,
        exclude_if=is_none,
        description="Device and precision of ranges of layers, such as 0-9=cpu:int8; absent where all are alike.",
    )
    modalities: list[str] | None = Field(
        default=None,
        exclude_if=is_none,
        description="What a prompt may have, such as `text` and `image`; absent where it is text alone.",
    )
    # Of encoders, in text-embeddings-inference's words.
    model_type: dict[str, dict[str, Any]] | None = Field(default=None, exclude_if=is_none)
    model_dtype: str | None = Field(default=None, exclude_if=is_none)
    max_input_length: int | None = Field(default=None, exclude_if=is_none, description="Tokens of a text.")
    max_batch_tokens: int | None = Field(default=None, exclude_if=is_none)
    max_client_texts: int | None = Field(default=None, exclude_if=is_none, description="Texts of a request.")


class AnyObject(ApiRootModel[dict[str, Any]]):
    """A JSON object that a standard describes."""


def ending(finished: GeneratedText) -> dict[str, Any]:
    """The fields that say how a sequence ended."""
    return {
        "finish_reason": FinishReason(finished.finish_reason).native,
        "generated_tokens": finished.num_tokens,
        "seed": finished.seed,
    }


def top_token_lists(top_tokens: Sequence[Tokens]) -> list[list[Token]] | None:
    """The likeliest tokens of each position, or None when none were asked for."""
    return [Token.list_of(tokens) for tokens in top_tokens] or None
