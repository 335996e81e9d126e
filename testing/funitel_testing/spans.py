"""Spans as tests see them: recorded in this process, or gathered by a collector that speaks OTLP over gRPC."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from funitel.proto.tracing import spans as tracing


class Recorded:
    """What was recorded so far."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    @property
    def all(self) -> tuple[ReadableSpan, ...]:
        """Spans in the order they ended."""
        return self._exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        """Those of a name, in the order they ended."""
        return [span for span in self.all if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        """The only one of a name."""
        (span,) = self.named(name)
        return span


@contextmanager
def recording() -> Iterator[Recorded]:
    """Record the spans of this process for the length of a `with`."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.set_tracer(provider.get_tracer("test"))
    try:
        yield Recorded(exporter)
    finally:
        tracing.set_tracer(None)


def parent_of(span: ReadableSpan) -> int:
    """The id of the span above; 0 for a root."""
    return span.parent.span_id if span.parent is not None else 0


def facts_of(span: ReadableSpan) -> dict[str, Any]:
    """The attributes of a span."""
    return dict(span.attributes or {})


@dataclass(frozen=True)
class GatheredSpan:
    """A span as it came to a collector; ids are hexadecimal, the parent of a root is empty."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin: int  # nanoseconds
    end: int
    is_error: bool
    state: str
    attributes: dict[str, Any]
    events: tuple[str, ...]
    resource: dict[str, Any]


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent; `answers` once it is set, so that a slow one can be had too."""

    spans: list[GatheredSpan] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    answers: threading.Event = field(default_factory=threading.Event)

    def Export(self, request: Any, context: Any) -> Any:
        """Take spans."""
        self.answers.wait()
        self.metadata.append({key: str(value) for key, value in context.invocation_metadata()})
        for resource in request.resource_spans:
            facts = _values(resource.resource.attributes)
            self.spans += [_gathered(span, facts) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of_trace(self, trace_id: str) -> list[GatheredSpan]:
        """The spans of one trace, in the order they began."""
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.begin)


def _gathered(span: Any, resource: dict[str, Any]) -> GatheredSpan:
    return GatheredSpan(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == 2,
        span.trace_state,
        _values(span.attributes),
        tuple(event.name for event in span.events),
        resource,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def collecting(credentials: grpc.ServerCredentials | None = None) -> Iterator[tuple[Collector, str]]:
    """A collector, and where it listens: `host:port`; by TLS with credentials."""
    collector = Collector()
    collector.answers.set()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    place = "127.0.0.1:0"
    port = server.add_insecure_port(place) if credentials is None else server.add_secure_port(place, credentials)
    server.start()
    try:
        yield collector, f"127.0.0.1:{port}"
    finally:
        collector.answers.set()
        server.stop(None).wait()
