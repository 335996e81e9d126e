"""One choice of an answer: what a sequence generates, step by step, becomes parts."""

from funitel.proto.step import FinishReason, GeneratedText, Generation
from funitel.router.chat.parts import ChatUsage, EndReason, Finished, Part, ScoredToken, Started, TextDelta
from funitel.router.chat.transcript import Transcript
from funitel.router.sequence import Request


class Choice:
    """Feed generations of one sequence; get parts."""

    def __init__(self, request: Request, top_logprobs: int | None) -> None:
        self._request = request
        self._wants_tokens = top_logprobs is not None
        self._transcript = Transcript(request.stopping.stop_sequences, top_logprobs or 0)
        self._num_shown = 0  # characters of the transcript turned into parts
        self._has_started = False

    def feed(self, generation: Generation) -> list[Part]:
        """Take what one step generated; return what there is to say now."""
        parts: list[Part] = []
        if not self._has_started:
            self._has_started = True
            parts.append(Started())
        text = self._transcript.feed(generation)
        if text:
            self._num_shown += len(text)
            parts.append(TextDelta(text, self._tokens()))
        if generation.finished is not None:
            parts.append(self._finished(generation.finished))
        return parts

    def _tokens(self) -> tuple[ScoredToken, ...]:
        placed = self._transcript.tokens_before(self._num_shown)
        return tuple(entry.token for entry in placed) if self._wants_tokens else ()

    def _finished(self, finished: GeneratedText) -> Finished:
        usage = ChatUsage(len(self._request.input_ids), finished.num_tokens)
        return Finished(_end_reason(finished), usage, _stop_found(finished, self._request.stopping.stop_sequences))


def _end_reason(finished: GeneratedText) -> EndReason:
    """A stop found with the last token allowed is a stop."""
    if finished.stop_start is not None or finished.finish_reason is FinishReason.STOP_SEQUENCE:
        return EndReason.STOP_SEQUENCE
    return EndReason.LENGTH if finished.finish_reason is FinishReason.LENGTH else EndReason.END


def _stop_found(finished: GeneratedText, stops: tuple[str, ...]) -> str | None:
    """Which stop ended the text; a shard that speaks plain TGI does not say."""
    if _end_reason(finished) is not EndReason.STOP_SEQUENCE:
        return None
    if finished.stop_index is not None:
        return stops[finished.stop_index]
    return max((stop for stop in stops if finished.text.endswith(stop)), key=len, default=None)
