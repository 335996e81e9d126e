"""OpenAI's completions, in and out, as typed records."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from funitel.proto.errors import InvalidRequest, SuffixNotSupported
from funitel.router.schema_openai import SamplingFields
from funitel.router.schema_openai_answers import AnswerHead, Usage
from funitel.router.schema_types import U32

TokenIds = Annotated[list[U32], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """One prompt, as text or as tokens."""

    text: str = ""
    ids: tuple[int, ...] | None = None


class CompletionRequest(SamplingFields):
    """One prompt or several to go on from."""

    prompt: (
        str | Annotated[list[str], Field(min_length=1)] | TokenIds | Annotated[list[TokenIds], Field(min_length=1)]
    ) = Field(description="A text, texts, the tokens of a prompt, or those of several.")
    max_tokens: U32 | None = Field(default=None, description="Up to the context's end if absent; 0 with `echo` only.")
    best_of: Annotated[U32, Field(ge=1)] | None = Field(
        default=None, description="Sequences to generate for each prompt; the `n` likeliest are answered."
    )
    echo: bool | None = Field(default=None, description="Whether the prompt begins the text.")
    logprobs: U32 | None = Field(default=None, description="So many of the likeliest tokens at each place.")
    suffix: str | None = Field(default=None, description="Not supported.")
    # Accepted: it concerns OpenAI's service.
    user: Any = None

    @property
    def prompts(self) -> list[GivenPrompt]:
        """The prompts, one or more."""
        if isinstance(self.prompt, str):
            return [GivenPrompt(self.prompt)]
        if isinstance(self.prompt[0], int):
            return [_given(self.prompt)]
        return [_given(prompt) for prompt in self.prompt]

    @property
    def num_sequences(self) -> int:
        """Sequences generated for each prompt."""
        return max(self.n or 1, self.best_of or 1)

    def check(self, max_best_of: int) -> None:
        """Raise InvalidRequest for fields that are not supported or contradict each other."""
        if self.suffix is not None:
            raise SuffixNotSupported("`suffix` is not supported by this model", "suffix")
        self.check_stream_options()
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


class CompletionLogprobs(BaseModel):
    """Lists with an entry for each token of the text; `text_offset` is where it begins, in characters."""

    tokens: list[str] = Field(default_factory=list)
    token_logprobs: list[float | None] = Field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int] = Field(default_factory=list)


class CompletionChoice(BaseModel):
    """One text and why it ended; in a stream, more of it, and null until it ends."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = Field(default=None, description="`stop` or `length`.")


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
