"""Spans of OpenTelemetry, and how their context crosses from one process to the next (W3C Trace Context).

Until `export` is called every function here returns at once and nothing is recorded.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context, get_current
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from funitel.proto.errors import SettingsError

Attribute = str | int | float | bool

EXPORT_SECONDS = 5  # that a collector may take; longer would hold up the end of a process whose collector is gone

ROOT = Context()  # the parent of a span that begins a trace of its own

_PROPAGATOR = TraceContextTextMapPropagator()
_tracer: Tracer | None = None


def export(endpoint: str, service_name: str) -> Callable[[], None]:
    """Send this process's spans to a collector, by OTLP over gRPC without TLS; call the result at the end.

    Args:
        endpoint: such as `http://localhost:4317`.
        service_name: what the spans are from.

    Raises:
        SettingsError: the exporter is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise SettingsError(
            "--otlp-endpoint needs the package opentelemetry-exporter-otlp-proto-grpc, which is not installed"
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": service_name}))
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=True, timeout=EXPORT_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    use(provider.get_tracer("funitel"))
    return provider.shutdown


def use(tracer: Tracer | None) -> None:
    """Record spans by `tracer`; None records nothing."""
    global _tracer
    _tracer = tracer


@contextmanager
def span(
    name: str,
    parent: Context | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Mapping[str, Attribute] | None = None,
) -> Iterator[Span]:
    """A span for the length of a `with`; below `parent`, or below the span of the caller."""
    if _tracer is None:
        yield INVALID_SPAN
        return
    with _tracer.start_as_current_span(name, parent, kind, attributes) as begun:
        yield begun


class OpenSpan:
    """A span that is ended by hand: what it measures goes on while the caller turns to something else."""

    def __init__(self, span: Span | None) -> None:
        self._span = span

    @contextmanager
    def within(self) -> Iterator[None]:
        """Be below this span for the length of a `with`; it goes on afterwards."""
        if self._span is None:
            yield
            return
        with trace.use_span(self._span):
            yield

    def end(self, **attributes: Attribute) -> None:
        """End the span now."""
        if self._span is not None:
            self._span.set_attributes(attributes)
            self._span.end()

    def fail(self, error: Exception) -> None:
        """End the span now; what it measures has failed."""
        if self._span is not None:
            self._span.record_exception(error)
            self._span.set_status(Status(StatusCode.ERROR, str(error)))
            self._span.end()


NO_SPAN = OpenSpan(None)


def is_recording() -> bool:
    """Whether spans are recorded at all; to be asked where even a call that returns at once is too many."""
    return _tracer is not None


def begin(
    name: str,
    parent: Context | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Mapping[str, Attribute] | None = None,
) -> OpenSpan:
    """A span that lasts until it is ended; below `parent`, or below the span of the caller."""
    return NO_SPAN if _tracer is None else OpenSpan(_tracer.start_span(name, parent, kind, attributes))


def record(name: str, parent: Context | None, begin: float, end: float, **attributes: Attribute) -> None:
    """Record a span after the fact; `begin` and `end` are instants of the monotonic clock in seconds."""
    if _tracer is None:
        return
    offset = time.time_ns() - time.monotonic_ns()
    begun = _tracer.start_span(name, parent, attributes=attributes, start_time=offset + int(begin * 1e9))
    begun.end(offset + int(end * 1e9))


def annotate(**attributes: Attribute) -> None:
    """Add attributes to the span of the caller."""
    if _tracer is not None:
        trace.get_current_span().set_attributes(attributes)


def current() -> Context | None:
    """The caller's place among the spans, to hand to another task."""
    return None if _tracer is None else get_current()


def inject() -> dict[str, str]:
    """The caller's place among the spans, as headers for another process."""
    headers: dict[str, str] = {}
    if _tracer is not None:
        _PROPAGATOR.inject(headers)
    return headers


def extract(headers: Mapping[str, str]) -> Context:
    """The place among the spans that another process has sent; the root where it sent none."""
    return _PROPAGATOR.extract(headers, ROOT)
