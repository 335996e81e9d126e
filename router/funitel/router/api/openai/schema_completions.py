"""Request and answer records of OpenAI's completions."""

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from funitel.proto.errors import InvalidRequest, SuffixNotSupported
from funitel.router.api.common.schema_base import CLAMPED, U32, ApiModel, is_none
from funitel.router.api.openai.schema_answers import AnswerHead, PromptLogprobs, Usage
from funitel.router.api.openai.schema_sampling import SamplingFields
from funitel.router.serving.sampling_request import BeamRequest

TokenIds = Annotated[list[U32], Field(min_length=1)]
_MAX_ID = 2**32 - 1


def _check_prompt(value: Any) -> Any:
    """Say in one line what a prompt must be: the errors of a union speak of one of its branches."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        kinds = "a string, an array of strings, an array of token ids or an array of such arrays"
        raise ValueError(f"must be {kinds}. Given: {reprlib.repr(value)}")
    if not value:
        raise ValueError("must not be empty. Given: []")
    if isinstance(value[0], list):
        for place, item in enumerate(value):
            if not isinstance(item, list) or not item:
                raise ValueError(f"item {place} must be an array of token ids. Given: {reprlib.repr(item)}")
            _check_ids(item, f"{place}.")
    elif isinstance(value[0], str):
        wrong = next((place for place, item in enumerate(value) if not isinstance(item, str)), None)
        if wrong is not None:
            raise ValueError(f"item {wrong} must be a string, as item 0 is. Given: {reprlib.repr(value[wrong])}")
    else:
        _check_ids(value, "")
    return value


def _check_ids(ids: Sequence[Any], path: str) -> None:
    for place, item in enumerate(ids):
        if type(item) is not int or not 0 <= item <= _MAX_ID:
            rule = f"must be a token id, an integer >= 0 and <= {_MAX_ID}"
            raise ValueError(f"item {path}{place} {rule}. Given: {reprlib.repr(item)}")


Prompts = Annotated[
    str | Annotated[list[str], Field(min_length=1)] | TokenIds | Annotated[list[TokenIds], Field(min_length=1)],
    BeforeValidator(_check_prompt),
]


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """One prompt, as text or as tokens."""

    text: str = ""
    ids: tuple[int, ...] | None = None


def given_prompts(prompts: Any) -> list[GivenPrompt]:
    """`Prompts` as a list of one or more."""
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        return [_given(prompts)]
    return [_given(prompt) for prompt in prompts]


class CompletionRequest(SamplingFields):
    """One prompt or several to go on from."""

    prompt: Prompts = Field(description="A text, texts, the tokens of a prompt, or those of several.")
    max_tokens: U32 | None = Field(
        default=None, description=f"Up to the context's end if absent; 0 with `echo` only. {CLAMPED}"
    )
    best_of: Annotated[U32, Field(ge=1)] | None = Field(
        default=None, description="Sequences to generate for each prompt; the `n` likeliest are answered."
    )
    echo: bool | None = Field(default=None, description="Whether the prompt begins the text.")
    logprobs: U32 | None = Field(
        default=None, description="So many of the likeliest tokens at each place, beside the one that is there."
    )
    suffix: str | None = Field(default=None, description="Not supported.")

    @property
    def prompts(self) -> list[GivenPrompt]:
        """The prompts, one or more."""
        return given_prompts(self.prompt)

    @property
    def num_sequences(self) -> int:
        """Sequences generated for each prompt."""
        return max(self.n or 1, self.best_of or 1)

    @property
    def _beams(self) -> BeamRequest | None:
        """The beam search: `best_of` is its width where it is given."""
        if self.best_of is None:
            return super()._beams
        return self.beam_request(self.best_of, self.n or 1, "best_of")

    def check(self, max_best_of: int) -> None:
        """Raise InvalidRequest for fields that are not supported or contradict each other."""
        if self.suffix is not None:
            raise SuffixNotSupported("`suffix` is not supported by this model", "suffix")
        self.check_stream()
        n, best_of = self.n or 1, self.best_of
        if best_of is not None and best_of < n:
            raise InvalidRequest(f"`best_of` must be >= `n`, which is {n}. Given: {best_of}", "best_of")
        if best_of is not None and n < best_of:
            if self.stream:
                raise InvalidRequest(f"`best_of` must be `n` when streaming. Given: {best_of}", "best_of")
            if best_of > max_best_of:
                raise InvalidRequest(f"`best_of` must be <= {max_best_of} or `n`. Given: {best_of}", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest("`max_tokens` must be > 0 without `echo`. Given: 0", "max_tokens")


def _given(prompt: Any) -> GivenPrompt:
    return GivenPrompt(prompt) if isinstance(prompt, str) else GivenPrompt(ids=tuple(prompt))


class CompletionLogprobs(ApiModel):
    """Lists with an entry for each token of the text; `text_offset` is where it begins, in characters."""

    tokens: list[str] = Field(default_factory=list)
    token_logprobs: list[float | None] = Field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = Field(
        default_factory=list, description="Of tokens of one text, others than the first are named `token_id:<id>`."
    )
    text_offset: list[int] = Field(default_factory=list)


class CompletionChoice(ApiModel):
    """One text and why it ended; in a stream, more of it, and null until it ends."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = Field(default=None, description="`stop`, `length` or `abort`.")
    prompt_logprobs: PromptLogprobs | None = Field(default=None, exclude_if=is_none)
    prompt_token_ids: list[int] | None = Field(default=None, exclude_if=is_none, description="In the first chunk.")
    token_ids: list[int] | None = Field(default=None, exclude_if=is_none)


class Completion(AnswerHead):
    """Texts that go on from the prompts: those of the first prompt, then those of the second."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(AnswerHead):
    """One event of streamed completions."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = None
