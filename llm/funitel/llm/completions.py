"""Build completions from the output of the engine, step by step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from funitel.llm.outputs import CompletionOutput, Logprob
from funitel.llm.sampling import SamplingParams
from funitel.proto.step import FinishReason, GeneratedText, Generation
from funitel.router.chat.transcript import Transcript

FinishWord = Literal["stop", "length", "abort"]
_WORDS: dict[str, FinishWord] = {"length": "length", "abort": "abort"}


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a completion: pieces of text, and tokens, before it."""

    num_pieces: int = 0
    num_tokens: int = 0


class CompletionBuilder:
    """One completion, as it grows."""

    def __init__(self, index: int, params: SamplingParams) -> None:
        self._index = index
        self._params = params
        self._transcript = Transcript(
            params.stops,
            keeps_tokens=False,
            shows_special=not params.skip_special_tokens,
            shows_stop=params.include_stop_str_in_output,
        )
        self._pieces: list[str] = []
        self._ids: list[int] = []
        self._logprob = 0.0
        self._candidates: list[dict[int, Logprob]] = []
        self.prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
        self.finished: GeneratedText | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self._ids)

    @property
    def end(self) -> Mark:
        """The end of what is there."""
        return Mark(len(self._pieces), len(self._ids))

    def feed(self, generation: Generation) -> None:
        """Take the output of one step."""
        tokens = generation.tokens
        if text := self._transcript.feed(generation):
            self._pieces.append(text)
        self._ids.extend(tokens.ids)
        self._logprob += sum(tokens.logprobs)
        if self._params.logprobs is not None:
            places = range(len(tokens.ids))
            self._candidates.extend(_at_position(generation, place, self._params.logprobs) for place in places)
        if self._params.prompt_logprobs is not None and generation.prefill_tokens is not None:
            self.prompt_logprobs = _of_prompt(generation, self._params.prompt_logprobs)
        self.finished = generation.finished

    def output(self, since: Mark = Mark()) -> CompletionOutput:
        """What was completed since a mark; the sum of log-probabilities is always of all."""
        finished = self.finished
        return CompletionOutput(
            index=self._index,
            text="".join(self._pieces[since.num_pieces :]),
            token_ids=tuple(self._ids[since.num_tokens :]),
            cumulative_logprob=self._logprob,
            logprobs=None if self._params.logprobs is None else tuple(self._candidates[since.num_tokens :]),
            finish_reason=None if finished is None else _WORDS.get(finished.openai_reason, "stop"),
            stop_reason=None if finished is None else _stop_reason(self._ids, finished, self._params),
        )


def _stop_reason(ids: Sequence[int], finished: GeneratedText, params: SamplingParams) -> str | int | None:
    if finished.stop_index is not None:
        return params.stops[finished.stop_index]
    is_stop = finished.finish_reason is FinishReason.EOS_TOKEN and ids[-1] in params.stop_token_ids
    return ids[-1] if is_stop else None


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


def _of_prompt(generation: Generation, num_top: int) -> tuple[dict[int, Logprob] | None, ...]:
    """At each position of the prompt but the first, its token and the likeliest ones."""
    tokens, top = generation.prefill_tokens, generation.prompt_top
    assert tokens is not None, "the scores of a prompt come with its tokens"
    found: list[dict[int, Logprob] | None] = [None]
    for place in range(1, len(tokens.ids)):
        rank = None if top is None else top.ranks[place - 1]
        at = {tokens.ids[place]: Logprob(tokens.logprobs[place], rank, tokens.texts[place])}
        likeliest = [] if top is None else top.at(place - 1)[:num_top]
        for number, (token_id, text, logprob) in enumerate(likeliest, 1):
            at.setdefault(token_id, Logprob(logprob, number, text))
        found.append(at)
    return tuple(found)
