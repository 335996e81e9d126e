"""Result types of a prompt, built from the output of the engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from funitel.llm.sampling import SamplingParams
from funitel.proto.step import FinishReason, GeneratedText, Generation
from funitel.router.chat.transcript import Transcript


@dataclass(frozen=True, slots=True)
class Logprob:
    """A candidate token at one position of a completion.

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
        finish_reason: `stop` at the model's end of text or a stop text, `length` at `max_tokens` or the context's end.
        stop_reason: the stop text or the stop token that occurred.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float
    logprobs: tuple[dict[int, Logprob], ...] | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its `n` completions; `prompt` is None where token ids were given."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]


def completion(
    index: int, generations: Sequence[Generation], finished: GeneratedText, params: SamplingParams
) -> CompletionOutput:
    """Build a completion from the outputs of all its steps."""
    transcript = Transcript(
        params.stops,
        keeps_tokens=False,
        shows_special=not params.skip_special_tokens,
        shows_stop=params.include_stop_str_in_output,
    )
    logprobs = [logprob for generation in generations for logprob in generation.tokens.logprobs]
    return CompletionOutput(
        index=index,
        text="".join(map(transcript.feed, generations)),
        token_ids=tuple(token_id for generation in generations for token_id in generation.tokens.ids),
        cumulative_logprob=sum(logprobs),
        logprobs=None if params.logprobs is None else _logprobs(generations, params.logprobs),
        finish_reason="stop" if finished.openai_reason == "stop" else "length",
        stop_reason=_stop_reason(generations[-1].tokens.ids[-1], finished, params),
    )


def _stop_reason(last_token: int, finished: GeneratedText, params: SamplingParams) -> str | int | None:
    if finished.stop_index is not None:
        return params.stops[finished.stop_index]
    is_stop = finished.finish_reason is FinishReason.EOS_TOKEN and last_token in params.stop_token_ids
    return last_token if is_stop else None


def _logprobs(generations: Sequence[Generation], num_top: int) -> tuple[dict[int, Logprob], ...]:
    return tuple(
        _at_position(generation, position, num_top)
        for generation in generations
        for position in range(len(generation.tokens.ids))
    )


def _at_position(generation: Generation, position: int, num_top: int) -> dict[int, Logprob]:
    """The likeliest tokens, best first, then the chosen token if it is not among them."""
    found = {}
    if generation.top_tokens:
        top = generation.top_tokens[position]
        ranked = zip(top.ids, top.logprobs, top.texts, strict=True)
        found = {
            token_id: Logprob(logprob, rank, text)
            for rank, (token_id, logprob, text) in enumerate(ranked, 1)
            if rank <= num_top
        }
    tokens = generation.tokens
    chosen = Logprob(tokens.logprobs[position], None, tokens.texts[position])
    return found if tokens.ids[position] in found else found | {tokens.ids[position]: chosen}
