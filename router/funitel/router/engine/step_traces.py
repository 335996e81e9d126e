"""Report steps to the traces of requests. Event loop only."""

from collections.abc import Iterable, Mapping

from funitel.proto.tracing import spans as tracing
from funitel.router.core.request import Sequence
from funitel.router.core.stream import TokenStream
from funitel.router.scheduler.plan import StepPlan


class StepTraces:
    """The traces of the requests of one engine; `decode_tokens` are what one `decode` span is for."""

    def __init__(self, streams: Mapping[int, TokenStream], decode_tokens: int) -> None:
        self._streams = streams
        self._decode_tokens = decode_tokens

    def send(self, plan: StepPlan, running: Mapping[int, Sequence]) -> list[tracing.OpenSpan]:
        """Note that a step is about to be sent; returns the spans that the shards go on below."""
        for start in plan.starts:
            trace = self._streams[start.request_id].trace
            if trace is not None:
                trace.enter(running[start.request_id].num_known - start.cache_len, start.cache_len)
        spans = []
        for sequence_id, num_tokens in plan.computed.items():
            stream = self._streams.get(sequence_id)  # a row of a beam has none
            trace = None if stream is None else stream.trace
            if trace is not None and (span := trace.send(num_tokens, self._decode_tokens)) is not None:
                spans.append(span)
        return spans

    def wait_again(self, waiting: Iterable[Sequence], reason: str) -> None:
        """Note that sequences were taken out of the steps, among all that wait."""
        if not tracing.is_recording():
            return
        for sequence in waiting:
            stream = self._streams.get(sequence.id)
            if sequence.was_started and stream is not None and stream.trace is not None:
                stream.trace.wait_again(reason)
