"""What comes back for each prompt, made from what the engine delivered."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from funitel.llm.sampling import SamplingParams
from funitel.proto.step import GeneratedText, Generation
from funitel.router.text.stop_holdback import stop_start


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token that could stand at one place of a completion.

    Attributes:
        logprob: its log-probability under the model, before temperature, penalties and filters.
        rank: 1 for the likeliest; None for a token taken from beyond those reported.
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
        text: without special tokens, and without the stop text unless that was asked for.
        token_ids: everything that was generated, end of text and stop included.
        cumulative_logprob: sum of the tokens' log-probabilities under the model.
        logprobs: at each place the likeliest tokens and the one taken, by token id; None if not asked for.
        finish_reason: `stop` at the model's end of text or a stop text, `length` at `max_tokens` or the context's end.
        stop_reason: the stop text that was found.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float
    logprobs: tuple[dict[int, Logprob], ...] | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its `n` completions; `prompt` is None where token ids were given."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]


def completion(
    index: int, generations: Sequence[Generation], finished: GeneratedText, params: SamplingParams
) -> CompletionOutput:
    """Put a finished completion together from all its steps."""
    stop = None if finished.stop_index is None else params.stops[finished.stop_index]
    end = stop_start(finished, params.stops)
    if stop is not None and params.include_stop_str_in_output:
        end += len(stop)
    logprobs = [logprob for generation in generations for logprob in generation.tokens.logprobs]
    return CompletionOutput(
        index=index,
        text=finished.text[:end],
        token_ids=tuple(token_id for generation in generations for token_id in generation.tokens.ids),
        cumulative_logprob=sum(logprobs),
        logprobs=None if params.logprobs is None else _logprobs(generations, params.logprobs),
        finish_reason="stop" if finished.openai_reason == "stop" else "length",
        stop_reason=stop,
    )


def _logprobs(generations: Sequence[Generation], num_top: int) -> tuple[dict[int, Logprob], ...]:
    return tuple(
        _at_place(generation, place, num_top)
        for generation in generations
        for place in range(len(generation.tokens.ids))
    )


def _at_place(generation: Generation, place: int, num_top: int) -> dict[int, Logprob]:
    """The likeliest tokens, best first, then the one taken if it is none of them."""
    found = {}
    if generation.top_tokens:
        top = generation.top_tokens[place]
        ranked = zip(top.ids, top.logprobs, top.texts, strict=True)
        found = {
            token_id: Logprob(logprob, rank, text)
            for rank, (token_id, logprob, text) in enumerate(ranked, 1)
            if rank <= num_top
        }
    tokens = generation.tokens
    taken = Logprob(tokens.logprobs[place], None, tokens.texts[place])
    return found if tokens.ids[place] in found else found | {tokens.ids[place]: taken}
