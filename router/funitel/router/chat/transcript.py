"""From generated tokens to the text a client may see: no special tokens, no part of the stop that ends it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from funitel.proto.step import Generation, Tokens
from funitel.router.chat.parts import ScoredToken
from funitel.router.stops import StopHoldback


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token and where its text begins, in characters of the transcript."""

    start: int
    token: ScoredToken


class Transcript:
    """The text of one answer before it is parsed. Whole and streamed answers are both made of what it returns."""

    def __init__(self, stop_sequences: Sequence[str], num_top: int = 0) -> None:
        self._holdback = StopHoldback(stop_sequences)
        self._num_top = num_top
        self._length = 0  # characters of the tokens fed so far
        self.pending: deque[PlacedToken] = deque()  # not yet taken by `tokens_before`

    def feed(self, generation: Generation) -> str:
        """Take what one step generated; return the text that can be shown now."""
        text, finished = self._take(generation), generation.finished
        return self._holdback.feed(text) if finished is None else self._holdback.finish(finished)

    def _take(self, generation: Generation) -> str:
        tokens = generation.tokens
        specials = tokens.is_special or (False,) * len(tokens.ids)
        pieces = []
        for place, (text, special) in enumerate(zip(tokens.texts, specials, strict=True)):
            if special:
                continue
            self.pending.append(PlacedToken(self._length, self._scored(generation, place)))
            self._length += len(text)
            pieces.append(text)
        return "".join(pieces)

    def _scored(self, generation: Generation, place: int) -> ScoredToken:
        tokens = generation.tokens
        top = _scored_tokens(generation.top_tokens[place])[: self._num_top] if generation.top_tokens else ()
        return ScoredToken(tokens.texts[place], tokens.logprobs[place], top)

    def tokens_before(self, end: int) -> list[PlacedToken]:
        """Take the tokens that begin before a character and were not taken yet."""
        taken = []
        while self.pending and self.pending[0].start < end:
            taken.append(self.pending.popleft())
        return taken


def _scored_tokens(tokens: Tokens) -> tuple[ScoredToken, ...]:
    return tuple(ScoredToken(text, logprob) for text, logprob in zip(tokens.texts, tokens.logprobs, strict=True))
