"""Record OpenTelemetry spans, and propagate their context between processes (W3C Trace Context).

Until `set_tracer` is called, every function here returns at once and records nothing. Spans never contain text of a
request: of an error that quotes its client, only the type is recorded.
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
MAX_HEADER_BYTES = 512  # of each header; the minimum by W3C
# Headers of one call. gRPC refuses metadata above 8 KiB, and clients choose the length of theirs.
MAX_CONTEXT_BYTES = 4096
HEADER_OVERHEAD_BYTES = 32  # per header, as HTTP/2 counts

_PROPAGATOR = TraceContextTextMapPropagator()
_tracer: Tracer | None = None


def set_tracer(tracer: Tracer | None) -> None:
    """Record spans by `tracer`; None records nothing."""
    global _tracer
    _tracer = tracer


def is_recording() -> bool:
    """Whether spans are recorded; for hot paths, where even a call without effect costs too much."""
    return _tracer is not None


class OpenSpan:
    """A span that is ended explicitly, for operations that outlast the caller's block.

    Instants are of the monotonic clock, in seconds. Methods have no effect once the span has ended.
    """

    def __init__(self, span: Span) -> None:
        self.span = span
        self.context = trace.set_span_in_context(span, ROOT)  # parent context for child spans

    @property
    def trace_id(self) -> str:
        """Id of its trace, recorded or not; hexadecimal."""
        return trace.format_trace_id(self.span.get_span_context().trace_id)

    def set_attributes(self, **attributes: Attribute) -> None:
        """Add attributes."""
        if self.span.is_recording():
            self.span.set_attributes(attributes)

    def event(self, name: str, **attributes: Attribute) -> None:
        """Add an event with the current time."""
        if self.span.is_recording():
            self.span.add_event(name, attributes)

    def end(self, **attributes: Attribute) -> None:
        """End the span now."""
        if self.span.is_recording():
            self.span.set_attributes(attributes)
            self.span.end()

    def set_error(self, error: Exception) -> None:
        """Set the error status and type."""
        if self.span.is_recording():
            self.span.set_attribute("error.type", type(error).__name__)
            self.span.set_status(Status(StatusCode.ERROR, _description(error)))

    def fail(self, error: Exception, **attributes: Attribute) -> None:
        """End the span now with an error."""
        self.set_error(error)
        self.end(**attributes)


def _description(error: Exception) -> str:
    """Description of an error; client errors give only their type, since their messages quote the request."""
    return error.message if isinstance(error, FunitelError) and error.is_ours else type(error).__name__


NO_SPAN = OpenSpan(trace.INVALID_SPAN)


def begin(
    name: str, parent: Context, kind: SpanKind = SpanKind.INTERNAL, attributes: Mapping[str, Attribute] | None = None
) -> OpenSpan:
    """Start a child span of `parent`."""
    return NO_SPAN if _tracer is None else OpenSpan(_tracer.start_span(name, parent, kind, attributes))


def record(name: str, parent: OpenSpan, begin: float, end: float) -> None:
    """Record a span that has ended; both instants are of the monotonic clock."""
    if _tracer is not None:
        offset = time.time_ns() - time.monotonic_ns()
        span = _tracer.start_span(name, parent.context, start_time=offset + int(begin * 1e9))
        span.end(offset + int(end * 1e9))


@contextmanager
def activate(span: OpenSpan) -> Iterator[None]:
    """Make a span the current one for the length of a `with`, without ending it."""
    with trace.use_span(span.span, record_exception=False, set_status_on_exception=False):
        yield


def current() -> OpenSpan | None:
    """The current span; None unless it is recorded, which clients decide by the flag of `traceparent`."""
    if _tracer is None:
        return None
    span = trace.get_current_span()
    return OpenSpan(span) if span.is_recording() else None


# Across processes


_propagated: ContextVar[tuple[OpenSpan, ...]] = ContextVar("told", default=())


@contextmanager
def propagate_to(spans: Sequence[OpenSpan]) -> Iterator[None]:
    """Propagate each of `spans` with a call made within the `with`, which serves all of them."""
    token = _propagated.set(tuple(spans))
    try:
        yield
    finally:
        _propagated.reset(token)


def inject() -> dict[str, str]:
    """Headers that propagate the current span, or those of `propagate_to`, to another process.

    The first has W3C's names; the names of further ones end in their number. Headers beyond the maximum are left out.
    """
    headers: dict[str, str] = {}
    if _tracer is None:
        return headers
    num_bytes = 0
    contexts: Sequence[Context | None] = [span.context for span in _propagated.get()] or (None,)
    for number, context in enumerate(contexts):
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, context)
        suffix = f"-{number}" if number else ""
        found = {name + suffix: value for name, value in carrier.items()}
        num_bytes += sum(len(name) + len(value) + HEADER_OVERHEAD_BYTES for name, value in found.items())
        if num_bytes > MAX_CONTEXT_BYTES:
            break
        headers |= found
    return headers


def extract(headers: Mapping[str, str]) -> Context:
    """The parent context in W3C's headers; the root if they are missing, malformed or too long."""
    parent, state = headers.get(PARENT, ""), headers.get(STATE, "")
    if len(parent) > MAX_HEADER_BYTES:
        return ROOT
    kept = {PARENT: parent, STATE: state} if len(state) <= MAX_HEADER_BYTES else {PARENT: parent}
    return _PROPAGATOR.extract(kept, ROOT)


def extract_all(headers: Mapping[str, str]) -> list[Context]:
    """Every context that `inject` wrote."""
    contexts = []
    number, suffix = 0, ""
    while (parent := headers.get(PARENT + suffix)) is not None:
        contexts.append(extract({PARENT: parent, STATE: headers.get(STATE + suffix, "")}))
        number += 1
        suffix = f"-{number}"
    return contexts
