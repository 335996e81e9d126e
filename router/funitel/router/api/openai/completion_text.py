"""Build the text and log-probabilities of one completion, as OpenAI's completions show them. Knows no HTTP."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from funitel.proto.errors import InvalidRequest
from funitel.proto.step import FinishReason, GeneratedText, Generation, PromptTop, Tokens
from funitel.router.api.openai.prompt_scores import ended_early
from funitel.router.api.openai.schema_completions import CompletionLogprobs
from funitel.router.chat.transcript import PlacedToken, Transcript

MIN_LOGPROB = -9999.0  # OpenAI's, for a token that could not be drawn; JSON has no infinity

NO_PROMPT_LOGPROBS = "`logprobs` with `echo` need shards started with --enable-prefill-logprobs"


@dataclass(slots=True)
class Addition:
    """What one step adds to a completion."""

    text: str
    logprobs: CompletionLogprobs | None
    finished: GeneratedText | None = None
    token_ids: tuple[int, ...] = ()


class CompletionText:
    """Feed generations of one sequence; get what a client may see. Streamed and whole texts are made of the same."""

    def __init__(
        self,
        stop_sequences: tuple[str, ...],
        *,
        echo: str | None = None,
        num_top: int | None = None,
        is_prompt_only: bool = False,
        shows_special: bool = False,
        shows_stop: bool = False,
    ) -> None:
        """Prepare for one sequence.

        Args:
            stop_sequences: what ends it.
            echo: the prompt, where it begins the text.
            num_top: so many likeliest tokens at each place; None: no tokens at all.
            is_prompt_only: nothing is to be generated; the token that was all the same is not shown.
            shows_special: special tokens are part of the text.
            shows_stop: the stop that ended it is part of the text.
        """
        keeps = num_top is not None
        self._transcript = Transcript(
            stop_sequences,
            num_top or 0,
            keeps_tokens=keeps,
            keeps_special=keeps,
            shows_special=shows_special,
            shows_stop=shows_stop,
        )
        self._num_top = num_top
        self._echo = echo
        self._offset = 0 if echo is None else len(echo)
        self._length = 0
        self._is_prompt_only = is_prompt_only

    def feed(self, generation: Generation) -> Addition:
        """Take what one step generated.

        Raises:
            InvalidRequest: log-probabilities of the prompt are wanted, and the shards give none.
        """
        logprobs = None if self._num_top is None else CompletionLogprobs()
        text = ""
        if self._echo is not None:
            text, self._echo = self._echo, None
            if logprobs is not None and generation.prefill_tokens is not None:
                _add_prompt(logprobs, text, generation.prefill_tokens, generation.prompt_top)
            elif logprobs is not None and not ended_early(generation):
                raise InvalidRequest(NO_PROMPT_LOGPROBS, "logprobs")
        if not self._is_prompt_only:
            shown = self._transcript.feed(generation)
            text += shown
            if logprobs is not None:
                self._length += len(shown)
                end = math.inf if _is_whole(generation.finished) else self._length
                for placed in self._transcript.placed_before(end):
                    _add(logprobs, placed, self._offset)
        return Addition(text, logprobs, generation.finished, () if self._is_prompt_only else generation.tokens.ids)


def _is_whole(finished: GeneratedText | None) -> bool:
    """Whether a text has ended and no stop was cut off it: then its last tokens count, also those without text."""
    if finished is None:
        return False
    return finished.stop_start is None and finished.finish_reason is not FinishReason.STOP_SEQUENCE


def _add(logprobs: CompletionLogprobs, placed: PlacedToken, offset: int) -> None:
    token = placed.token
    logprobs.tokens.append(token.text)
    logprobs.token_logprobs.append(max(token.logprob, MIN_LOGPROB))
    logprobs.text_offset.append(offset + placed.start)
    likeliest = [(each.id, each.text, each.logprob) for each in token.top]
    logprobs.top_logprobs.append(named_logprobs(token.id, token.text, token.logprob, likeliest))


def named_logprobs(
    token_id: int, text: str, logprob: float, likeliest: Iterable[tuple[int, str, float]]
) -> dict[str, float]:
    """Log-probabilities by text of the token at a place and of the likeliest ones there: ids, texts, values.

    Of tokens of one text, others than the first are named `token_id:<id>`.
    """
    named = {text: max(logprob, MIN_LOGPROB)}
    for each, name, value in likeliest:
        if each != token_id:
            named[name if name not in named else f"token_id:{each}"] = value if value > MIN_LOGPROB else MIN_LOGPROB
    return named


def _add_prompt(logprobs: CompletionLogprobs, text: str, tokens: Tokens, top: PromptTop | None) -> None:
    """Add the tokens of a prompt's text. The first one follows nothing; without `top` the likeliest are not known."""
    at = 0
    for place, (piece, logprob) in enumerate(zip(tokens.texts, tokens.logprobs, strict=True)):
        is_known = logprob == logprob
        logprobs.tokens.append(piece)
        logprobs.token_logprobs.append(max(logprob, MIN_LOGPROB) if is_known else None)
        logprobs.text_offset.append(at)
        likeliest = None
        if is_known and top is not None:
            likeliest = named_logprobs(tokens.ids[place], piece, logprob, top.at(place - 1))
        logprobs.top_logprobs.append(likeliest)
        is_special = bool(tokens.is_special) and tokens.is_special[place]
        if text.startswith(piece, at) or not is_special:  # special tokens that were added are no part of the text
            at = min(at + len(piece), len(text))


def joined(additions: list[Addition]) -> Addition:
    """One addition made of several."""
    whole = Addition("".join(addition.text for addition in additions), None, additions[-1].finished)
    whole.token_ids = tuple(token_id for addition in additions for token_id in addition.token_ids)
    entries = [addition.logprobs for addition in additions if addition.logprobs is not None]
    if entries:
        whole.logprobs = CompletionLogprobs(
            tokens=[token for entry in entries for token in entry.tokens],
            token_logprobs=[logprob for entry in entries for logprob in entry.token_logprobs],
            top_logprobs=[top for entry in entries for top in entry.top_logprobs],
            text_offset=[place for entry in entries for place in entry.text_offset],
        )
    return whole
