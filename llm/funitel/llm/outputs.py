"""Result types of a prompt that is completed."""

import time
from dataclasses import dataclass
from typing import Literal, Self

from funitel.router.core.stream import Timings


@dataclass(frozen=True, slots=True)
class Logprob:
    """A candidate token at one position.

    Attributes:
        logprob: its log-probability under the model, before temperature, penalties and filters.
        rank: 1 for the likeliest; None for a chosen token outside the reported ones.
        decoded_token: its text.
    """

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: which of the `n`.
        text: without special tokens, and without the stop text unless it was requested.
        token_ids: all generated tokens, with end of text and stop.
        cumulative_logprob: sum of the tokens' log-probabilities under the model.
        logprobs: at each position, the likeliest tokens and the chosen one, by token id; None if not requested.
        finish_reason: `stop` at the model's end of text or a stop text, `length` at `max_tokens` or the context's end,
            `abort` where the request was stopped; None while it goes on.
        stop_reason: the stop text or the stop token that occurred.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float
    logprobs: tuple[dict[int, Logprob], ...] | None
    finish_reason: Literal["stop", "length", "abort"] | None
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """The times of a request; instants in seconds since the epoch, None for what has not happened.

    Attributes:
        arrival_time: it was queued.
        first_scheduled_time: the first step with it was planned.
        first_token_time: its first token came.
        last_token_time: its latest token came.
        finished_time: it ended.
        time_in_queue: seconds from arrival to the first step.
        num_generation_tokens: of all its completions.
    """

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    last_token_time: float | None
    finished_time: float | None
    time_in_queue: float | None
    num_generation_tokens: int

    @classmethod
    def of(cls, timings: Timings, num_tokens: int) -> Self:
        """Convert instants of the monotonic clock."""
        offset = time.time() - time.monotonic()

        def instant(at: float | None) -> float | None:
            return None if at is None else at + offset

        return cls(
            arrival_time=timings.submitted + offset,
            first_scheduled_time=instant(timings.started),
            first_token_time=instant(timings.first_token),
            last_token_time=instant(timings.latest),
            finished_time=instant(timings.finished),
            time_in_queue=None if timings.started is None else timings.started - timings.submitted,
            num_generation_tokens=num_tokens,
        )

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens a second, from the first step to the latest token."""
        first, last = self.first_scheduled_time, self.last_token_time
        return None if first is None or last is None or last <= first else self.num_generation_tokens / (last - first)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its `n` completions.

    Attributes:
        prompt: None where token ids were given.
        outputs: the completions; of a delta only those with something new.
        request_id: of a request that was started; empty otherwise.
        finished: whether every completion has ended.
        metrics: the times of the request; None before it was queued.
        num_cached_tokens: of the prompt, in the cached prefix.
        prompt_logprobs: at each position of the prompt, as `CompletionOutput.logprobs`; None at the first, and where
            not requested.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    request_id: str = ""
    finished: bool = True
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None


# Of encoders


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of a text, of length 1."""

    embedding: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A text as tokens, and its vector."""

    outputs: EmbeddingOutput
    prompt_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The probabilities of the classes, and the names of these, in the model's order."""

    probs: tuple[float, ...]
    labels: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        """How many classes the model has."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ClassificationRequestOutput:
    """A text or pair as tokens, and its classes."""

    outputs: ClassificationOutput
    prompt_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How well two texts go together: within 0..1 of a cross-encoder, within -1..1 of an embedding model."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """A pair of texts as tokens, and its score."""

    outputs: ScoringOutput
    prompt_token_ids: tuple[int, ...]
