"""Hold back streamed text that may be the beginning of a stop string. Pure; knows no tokens and no HTTP.

The shard decides where a sequence stops. Until it says so, the longest end of the text that could begin a
stop is held back, so that a client never sees part of one.
"""

from collections.abc import Sequence

from funitel.proto.step import FinishReason, GeneratedText


class _Matcher:
    """Length of the longest beginning of `stop` that ends the text fed so far.

    Knuth, Morris and Pratt's automaton, built only as far as the text has matched: a huge stop is cheap.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._borders: list[int] = [0]  # [i]: longest proper beginning of stop[: i + 1] that also ends it

    def feed(self, character: str) -> None:
        self.matched = self._advance(self.matched, character)
        if self.matched > len(self._borders):
            self._borders.append(self._advance(self._borders[-1], self.stop[self.matched - 1]))
        if self.matched == len(self.stop):  # whole, yet the sequence goes on: hold what begins another
            self.matched = self._borders[self.matched - 1]

    def _advance(self, matched: int, character: str) -> int:
        while matched and self.stop[matched] != character:
            matched = self._borders[matched - 1]
        return matched + (self.stop[matched] == character)


class StopHoldback:
    """Feed text as it is generated; get back what is safe to show."""

    def __init__(self, stop_sequences: Sequence[str], *, shows_stop: bool = False) -> None:
        """`shows_stop`: what is returned ends with the stop that ended the text."""
        self._shows_stop = shows_stop
        self._stop_sequences = tuple(stop_sequences)
        self._matchers = [_Matcher(stop) for stop in stop_sequences]
        self._held = ""
        self.num_shown = 0  # characters returned so far

    def feed(self, text: str) -> str:
        """Take the next piece of a text that goes on; return what can no longer be part of a stop."""
        if not self._matchers:
            return self._show(text)
        for matcher in self._matchers:
            for character in text:
                matcher.feed(character)
        text = self._held + text
        safe = len(text) - max(matcher.matched for matcher in self._matchers)
        self._held = text[safe:]
        return self._show(text[:safe])

    def finish(self, finished: GeneratedText) -> str:
        """Return what was not shown yet of the whole text, up to the stop that ended it, or with it."""
        if finished.finish_reason is FinishReason.ABORT:  # its text is nowhere whole
            return self._show(self._held)
        end = stop_start(finished, self._stop_sequences)
        if self._shows_stop and end < len(finished.text):
            index = finished.stop_index
            end = len(finished.text) if index is None else end + len(self._stop_sequences[index])
        return self._show(finished.text[self.num_shown : end])

    def _show(self, text: str) -> str:
        self.num_shown += len(text)
        return text


def stop_start(finished: GeneratedText, stop_sequences: Sequence[str]) -> int:
    """Return the character at which the stop begins in the text, or the text's length.

    A shard that speaks plain TGI does not say where: the stop then ends the text.
    """
    if finished.stop_start is not None:
        return finished.stop_start
    if finished.finish_reason is not FinishReason.STOP_SEQUENCE:
        return len(finished.text)
    lengths = [len(stop) for stop in stop_sequences if finished.text.endswith(stop)]
    return len(finished.text) - max(lengths, default=0)
