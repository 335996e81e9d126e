"""Build the text and log-probabilities of one completion, as OpenAI's completions show them. Knows no HTTP."""

from collections.abc import Iterator
from dataclasses import dataclass

from funitel.proto.errors import InvalidRequest
from funitel.proto.step import GeneratedText, Generation, Tokens
from funitel.router.api.openai.schema_completions import CompletionLogprobs
from funitel.router.chat.parts import ScoredToken
from funitel.router.chat.transcript import PlacedToken, Transcript

MIN_LOGPROB = -9999.0  # OpenAI's, for a token that could not be drawn; JSON has no infinity

NO_PROMPT_LOGPROBS = "`logprobs` with `echo` need shards started with --enable-prefill-logprobs"


@dataclass(slots=True)
class Addition:
    """What one step adds to a completion."""

    text: str
    logprobs: CompletionLogprobs | None
    finished: GeneratedText | None = None


class CompletionText:
    """Feed generations of one sequence; get what a client may see. Streamed and whole texts are made of the same."""

    def __init__(
        self,
        stop_sequences: tuple[str, ...],
        *,
        echo: str | None = None,
        num_top: int | None = None,
        is_prompt_only: bool = False,
    ) -> None:
        """Prepare for one sequence.

        Args:
            stop_sequences: what ends it.
            echo: the prompt, where it begins the text.
            num_top: so many likeliest tokens at each place; None: no tokens at all.
            is_prompt_only: nothing is to be generated; the token that was all the same is not shown.
        """
        self._transcript = Transcript(stop_sequences, num_top or 0, keeps_tokens=num_top is not None)
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
        logprobs = None if self._num_top is None else CompletionLogprobs(top_logprobs=[] if self._num_top else None)
        text = ""
        if self._echo is not None:
            text, self._echo = self._echo, None
            if logprobs is not None:
                if generation.prefill_tokens is None:
                    raise InvalidRequest(NO_PROMPT_LOGPROBS, "logprobs")
                _add_prompt(logprobs, generation.prefill_tokens)
        if not self._is_prompt_only:
            shown = self._transcript.feed(generation)
            text += shown
            if logprobs is not None:
                self._length += len(shown)
                for placed in self._transcript.placed_before(self._length):
                    _add(logprobs, placed, self._offset)
        return Addition(text, logprobs, generation.finished)


def _add(logprobs: CompletionLogprobs, placed: PlacedToken, offset: int) -> None:
    token = placed.token
    logprobs.tokens.append(token.text)
    logprobs.token_logprobs.append(max(token.logprob, MIN_LOGPROB))
    logprobs.text_offset.append(offset + placed.start)
    if logprobs.top_logprobs is not None:
        logprobs.top_logprobs.append(dict(_likeliest(token)))


def _likeliest(token: ScoredToken) -> Iterator[tuple[str, float]]:
    """The likeliest tokens, and the one that was taken if it is not among them; two of one text are one."""
    for each in (token, *reversed(token.top)):
        yield each.text, max(each.logprob, MIN_LOGPROB)


def _add_prompt(logprobs: CompletionLogprobs, tokens: Tokens) -> None:
    """The first token of a prompt follows nothing; the likeliest at its places are not known."""
    place = 0
    for text, logprob in zip(tokens.texts, tokens.logprobs, strict=True):
        logprobs.tokens.append(text)
        logprobs.token_logprobs.append(None if logprob != logprob else max(logprob, MIN_LOGPROB))
        logprobs.text_offset.append(place)
        if logprobs.top_logprobs is not None:
            logprobs.top_logprobs.append(None)
        place += len(text)


def joined(additions: list[Addition]) -> Addition:
    """One addition made of several."""
    whole = Addition("".join(addition.text for addition in additions), None, additions[-1].finished)
    entries = [addition.logprobs for addition in additions if addition.logprobs is not None]
    if entries:
        tops = [top for entry in entries for top in entry.top_logprobs or ()]
        whole.logprobs = CompletionLogprobs(
            tokens=[token for entry in entries for token in entry.tokens],
            token_logprobs=[logprob for entry in entries for logprob in entry.token_logprobs],
            top_logprobs=None if entries[0].top_logprobs is None else tops,
            text_offset=[place for entry in entries for place in entry.text_offset],
        )
    return whole
