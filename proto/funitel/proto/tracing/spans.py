"""Spans of OpenTelemetry, and how their context crosses from one process to the next (W3C Trace Context).

Until `use` is called every function here returns at once and nothing is recorded. Spans never carry words of a request:
of an error that quotes its client only the kind is told.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from funitel.proto.errors import FunitelError

Attribute = str | int | float | bool | Sequence[str]

ROOT = Context()  # the parent of a span that begins a trace of its own
PARENT, STATE = "traceparent", "tracestate"
MAX_HEADER_BYTES = 512  # of either header; W3C asks for as many
# Headers of one call. gRPC refuses metadata beyond 8 KiB, and clients choose how long theirs are.
MAX_CONTEXT_BYTES = 4096
HEADER_OVERHEAD_BYTES = 32  # of a header, by HTTP/2's count

_PROPAGATOR = TraceContextTextMapPropagator()
_tracer: Tracer | None = None


def use(tracer: Tracer | None) -> None:
    """Record spans by `tracer`; None records nothing."""
    global _tracer
    _tracer = tracer


def is_recording() -> bool:
    """Whether spans are recorded at all; to be asked where even a call that returns at once is too many."""
    return _tracer is not None


class OpenSpan:
    """A span that is ended by hand: what it measures goes on while the caller turns to something else.

    Instants are of the monotonic clock, in seconds. One that was ended takes no notice of anything.
    """

    def __init__(self, span: Span) -> None:
        self.span = span
        self.place = trace.set_span_in_context(span, ROOT)  # what is begun there is below this span

    @property
    def trace_id(self) -> str:
        """Of the trace it belongs to, recorded or not; hexadecimal."""
        return trace.format_trace_id(self.span.get_span_context().trace_id)

    def note(self, **attributes: Attribute) -> None:
        """Add attributes."""
        if self.span.is_recording():
            self.span.set_attributes(attributes)

    def event(self, name: str, **attributes: Attribute) -> None:
        """Note that something happened now."""
        if self.span.is_recording():
            self.span.add_event(name, attributes)

    def end(self, **attributes: Attribute) -> None:
        """End the span now."""
        if self.span.is_recording():
            self.span.set_attributes(attributes)
            self.span.end()

    def blame(self, error: Exception) -> None:
        """Note that what the span measures has failed, and why."""
        if self.span.is_recording():
            self.span.set_attribute("error.type", type(error).__name__)
            self.span.set_status(Status(StatusCode.ERROR, _words(error)))

    def fail(self, error: Exception, **attributes: Attribute) -> None:
        """End the span now; what it measures has failed."""
        self.blame(error)
        self.end(**attributes)


def _words(error: Exception) -> str:
    """What may be said of an error: messages to clients quote them."""
    return error.message if isinstance(error, FunitelError) and error.is_ours else type(error).__name__


NO_SPAN = OpenSpan(trace.INVALID_SPAN)


def begin(
    name: str,
    parent: Context,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Mapping[str, Attribute] | None = None,
) -> OpenSpan:
    """A span below `parent` that lasts until it is ended."""
    return NO_SPAN if _tracer is None else OpenSpan(_tracer.start_span(name, parent, kind, attributes))


def record(name: str, parent: OpenSpan, begin: float, end: float) -> None:
    """Record a span after the fact; both instants are of the monotonic clock."""
    if _tracer is not None:
        offset = time.time_ns() - time.monotonic_ns()
        span = _tracer.start_span(name, parent.place, start_time=offset + int(begin * 1e9))
        span.end(offset + int(end * 1e9))


@contextmanager
def within(span: OpenSpan) -> Iterator[None]:
    """Be below a span for the length of a `with`; it goes on afterwards."""
    with trace.use_span(span.span, record_exception=False, set_status_on_exception=False):
        yield


def current() -> OpenSpan | None:
    """The span of the caller; None unless it is recorded: clients decide by the flag of their `traceparent`."""
    if _tracer is None:
        return None
    span = trace.get_current_span()
    return OpenSpan(span) if span.is_recording() else None


# Across processes


_told: ContextVar[tuple[OpenSpan, ...]] = ContextVar("told", default=())


@contextmanager
def telling(spans: Sequence[OpenSpan]) -> Iterator[None]:
    """Let a call made within the `with` be continued below each of `spans`: it is made for all of them."""
    token = _told.set(tuple(spans))
    try:
        yield
    finally:
        _told.reset(token)


def inject() -> dict[str, str]:
    """Headers by which another process goes on below the caller's span, or below those it is `telling`.

    The first has W3C's names; the names of further ones end in their number. What would make them too long is left
    out: those spans then have nothing of that call below them.
    """
    headers: dict[str, str] = {}
    if _tracer is None:
        return headers
    num_bytes = 0
    places: Sequence[Context | None] = [span.place for span in _told.get()] or (None,)
    for number, place in enumerate(places):
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, place)
        suffix = f"-{number}" if number else ""
        found = {name + suffix: value for name, value in carrier.items()}
        num_bytes += sum(len(name) + len(value) + HEADER_OVERHEAD_BYTES for name, value in found.items())
        if num_bytes > MAX_CONTEXT_BYTES:
            break
        headers |= found
    return headers


def extract(headers: Mapping[str, str]) -> Context:
    """The place that W3C's headers name; the root where there are none, or they are malformed or too long."""
    parent, state = headers.get(PARENT, ""), headers.get(STATE, "")
    if len(parent) > MAX_HEADER_BYTES:
        return ROOT
    kept = {PARENT: parent, STATE: state} if len(state) <= MAX_HEADER_BYTES else {PARENT: parent}
    return _PROPAGATOR.extract(kept, ROOT)


def extract_all(headers: Mapping[str, str]) -> list[Context]:
    """Every place that `inject` wrote."""
    places = []
    number, suffix = 0, ""
    while (parent := headers.get(PARENT + suffix)) is not None:
        places.append(extract({PARENT: parent, STATE: headers.get(STATE + suffix, "")}))
        number += 1
        suffix = f"-{number}"
    return places
