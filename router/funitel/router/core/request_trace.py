"""The trace of one sequence: the spans `queue`, `prefill`, then `decode` for each so many tokens, below its request.

`prefill` and `decode` begin when their first step is sent and end when their last token is delivered. With two steps in
flight the next one therefore begins a little before the last one ends. The shards' spans of a step are below the span
that begins with the step; those of each chunk of a prompt are below `prefill`. Event loop only.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from funitel.proto.errors import Cancelled, FunitelError
from funitel.proto.tracing import spans


@dataclass(slots=True)
class _Decode:
    """Decode steps under one span."""

    span: spans.OpenSpan
    max_tokens: int
    num_tokens: int = 0
    num_steps: int = 0  # sent
    num_in_flight: int = 0  # of them, and not yet answered

    @property
    def is_full(self) -> bool:
        """Whether those sent bring all the tokens it is for."""
        return self.num_tokens + self.num_in_flight >= self.max_tokens

    @property
    def facts(self) -> Mapping[str, int]:
        """What the span says at its end."""
        return {"funitel.tokens": self.num_tokens, "funitel.steps": self.num_steps}


class RequestTrace:
    """The open spans of a sequence, between its submission and its end."""

    def __init__(self, request: spans.OpenSpan) -> None:
        """Begin in the queue, below the span of the request."""
        self._request = request
        self._queue: spans.OpenSpan | None = spans.begin("queue", request.context)
        self._prefill: spans.OpenSpan | None = None
        self._num_prompt_left = 0  # tokens to be computed before it decodes
        self._num_chunks = 0
        self._decodes: deque[_Decode] = deque()  # oldest first

    @classmethod
    def of_caller(cls) -> "RequestTrace | None":
        """The trace of a sequence that the caller submits; None unless the caller is traced."""
        request = spans.current()
        return None if request is None else cls(request)

    def enter(self, num_tokens: int, num_cached: int) -> None:
        """Note that the sequence leaves the queue: so many tokens are to be computed, those cached are not."""
        self.wait_again("preempted")  # unless it was known to wait
        if self._queue is not None:
            self._queue.end()
            self._queue = None
        self._num_prompt_left, self._num_chunks = num_tokens, 0
        facts = {"funitel.tokens": num_tokens, "funitel.cached_tokens": num_cached}
        self._prefill = spans.begin("prefill", self._request.context, attributes=facts)

    def send(self, num_tokens: int, decode_tokens: int) -> spans.OpenSpan | None:
        """Note a step that computes so many tokens; return the span it begins, as the parent of the shards' spans.

        Args:
            num_tokens: of this sequence.
            decode_tokens: that one `decode` span is for.
        """
        if self._prefill is not None and self._num_prompt_left > 0:
            self._num_prompt_left -= num_tokens
            self._num_chunks += 1
            self._prefill.event("chunk", **{"funitel.tokens": num_tokens})
            return self._prefill
        decodes = self._decodes
        is_new = not decodes or decodes[-1].is_full
        if is_new:
            decodes.append(_Decode(spans.begin("decode", self._request.context), decode_tokens))
        newest = decodes[-1]
        newest.num_steps += 1
        newest.num_in_flight += 1
        return newest.span if is_new else None

    def deliver(self, num_tokens: int) -> None:
        """Note that the oldest step that brings tokens has brought so many."""
        if self._prefill is not None:
            self._prefill.end(**{"funitel.chunks": self._num_chunks})
            self._prefill = None
        elif self._decodes:
            oldest = self._decodes[0]
            oldest.num_tokens += num_tokens
            oldest.num_in_flight -= 1
            if oldest.is_full and not oldest.num_in_flight:
                oldest.span.end(**oldest.facts)
                self._decodes.popleft()

    def wait_again(self, reason: str) -> None:
        """Note that the sequence is back in the queue, by `preempted`, `restarted` or `moved`; steps sent are void."""
        if self._queue is not None:
            return
        self._request.event(reason)
        self._close(None)
        self._queue = spans.begin("queue", self._request.context)

    def end(self, error: FunitelError | None = None) -> None:
        """End whatever is open: the sequence has finished, has failed, or its client has left."""
        self._close(error)
        if isinstance(error, Cancelled):
            self._request.event("cancelled")

    def _close(self, error: FunitelError | None) -> None:
        for span, facts in self._open():
            if error is None or isinstance(error, Cancelled):
                span.end(**facts)
            else:
                span.fail(error, **facts)
        self._queue = self._prefill = None
        self._decodes.clear()

    def _open(self) -> Iterator[tuple[spans.OpenSpan, Mapping[str, int]]]:
        if self._queue is not None:
            yield self._queue, {}
        if self._prefill is not None:
            yield self._prefill, {"funitel.chunks": self._num_chunks}
        for decode in self._decodes:
            yield decode.span, decode.facts
