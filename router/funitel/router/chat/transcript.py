"""Turn generated tokens into the text a client may see: without the stop that ends it, and without special tokens.

Special tokens that mark tool calls or reasoning are kept, for parsers need them.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from funitel.proto.step import FinishReason, Generation, Tokens
from funitel.router.chat.parts import ScoredToken
from funitel.router.text.stop_holdback import StopHoldback

REPLACEMENT = "\ufffd"  # of a character that never became whole


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token and where its text begins, in characters of the transcript."""

    start: int
    token: ScoredToken


@dataclass(frozen=True, slots=True)
class _Marker:
    """A special token to keep; `place` counts the characters before it without any such."""

    place: int
    text: str


class Transcript:
    """The text of one answer before it is parsed. Whole and streamed answers are both made of what it returns."""

    def __init__(
        self,
        stop_sequences: Sequence[str],
        num_top: int = 0,
        markers: Sequence[str] = (),
        *,
        keeps_tokens: bool = True,
        keeps_special: bool = False,
        shows_special: bool = False,
        shows_stop: bool = False,
    ) -> None:
        """Prepare for one answer.

        Args:
            stop_sequences: what ends it.
            num_top: likeliest tokens at each place.
            markers: special tokens to keep in the text.
            keeps_tokens: whether the tokens will be taken.
            keeps_special: whether the special ones will, too.
            shows_special: whether all special tokens but the last, which ended it, are part of the text.
            shows_stop: whether what ended it is part of the text.
        """
        self._shows_special = shows_special
        self._shows_stop = shows_stop
        self._keeps_tokens = keeps_tokens
        self._keeps_special = keeps_special
        self._holdback = StopHoldback(stop_sequences, shows_stop=shows_stop)
        self._num_top = num_top
        self._markers = tuple(markers)
        self._kept: deque[_Marker] = deque()
        self._num_plain = 0  # characters of the tokens fed so far, without markers
        self._num_marked = 0  # characters of the markers among them
        self._pending: deque[PlacedToken] = deque()  # not yet taken
        # Text is shown as it comes: most answers, and cheaper by far.
        self._is_plain = not (keeps_tokens or stop_sequences or markers or shows_special)

    def feed(self, generation: Generation) -> str:
        """Take what one step generated; return the text that can be shown now."""
        tokens, finished = generation.tokens, generation.finished
        if self._is_plain and finished is None and not any(tokens.is_special):
            return self._holdback.feed("".join(tokens.texts))
        text = self._take(generation)
        before = self._holdback.num_shown
        shown = self._holdback.feed(text) if finished is None else self._holdback.finish(finished)
        return self._with_markers(shown, before)

    def _take(self, generation: Generation) -> str:
        tokens = generation.tokens
        if not self._keeps_tokens and not any(tokens.is_special):
            text = "".join(tokens.texts)
            self._num_plain += len(text)
            return text
        specials = tokens.is_special or (False,) * len(tokens.ids)
        pieces = []
        for place, (text, special) in enumerate(zip(tokens.texts, specials, strict=True)):
            if special:
                marker = self._marker(generation, place)
                if marker is None and self._keeps_special:
                    self._keep(generation, place)
                text = text[: len(text) - len(text.lstrip(REPLACEMENT))]
                self._num_plain += len(text)
                if marker is not None:
                    self._kept.append(_Marker(self._num_plain, marker))
                    self._num_marked += len(marker)
            else:
                if self._keeps_tokens:
                    self._keep(generation, place)
                self._num_plain += len(text)
            pieces.append(text)
        return "".join(pieces)

    def _marker(self, generation: Generation, place: int) -> str | None:
        """The text of a special token that is to be kept."""
        text = generation.tokens.texts[place]
        if self._shows_special and (self._shows_stop or not _is_ending(generation, place)):
            return text.lstrip(REPLACEMENT)
        return next((marker for marker in self._markers if text.endswith(marker)), None)

    def _keep(self, generation: Generation, place: int) -> None:
        self._pending.append(PlacedToken(self._num_plain + self._num_marked, self._scored(generation, place)))

    def _with_markers(self, text: str, place: int) -> str:
        """Put back the markers that stand before the end of a text, which begins at `place`."""
        if not self._kept:
            return text
        pieces = []
        end = place + len(text)
        while self._kept and self._kept[0].place <= end:
            marker = self._kept.popleft()
            pieces += [text[: marker.place - place], marker.text]
            text, place = text[marker.place - place :], marker.place
        return "".join((*pieces, text))

    def _scored(self, generation: Generation, place: int) -> ScoredToken:
        tokens = generation.tokens
        top = _scored_tokens(generation.top_tokens[place])[: self._num_top] if generation.top_tokens else ()
        return ScoredToken(tokens.texts[place], tokens.logprobs[place], top, tokens.ids[place])

    def placed_before(self, end: float) -> list[PlacedToken]:
        """Take the tokens that begin before a character and were not taken yet."""
        taken = []
        while self._pending and self._pending[0].start < end:
            taken.append(self._pending.popleft())
        return taken

    def tokens_before(self, end: int) -> list[ScoredToken]:
        """The same without their places."""
        return [placed.token for placed in self.placed_before(end)]


def _is_ending(generation: Generation, place: int) -> bool:
    """Whether a token is what ended the sequence."""
    finished = generation.finished
    is_last = finished is not None and place == len(generation.tokens.ids) - 1
    return is_last and finished is not None and finished.finish_reason not in _CUT


_CUT = (FinishReason.LENGTH, FinishReason.ABORT)  # nothing of the model ended it


def _scored_tokens(tokens: Tokens) -> tuple[ScoredToken, ...]:
    return tuple(
        ScoredToken(text, logprob, id=token_id)
        for token_id, text, logprob in zip(tokens.ids, tokens.texts, tokens.logprobs, strict=True)
    )
