"""Build the tracer provider of the OpenTelemetry SDK, which exports spans by OTLP over gRPC.

The SDK is imported here only, so that a process without `--otlp-endpoint` does not load it.
"""

from collections.abc import Callable, Mapping

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor


def build_provider(
    endpoint: str, resource: Mapping[str, str | int], *, is_plain: bool, timeout: float
) -> tuple[TracerProvider, Callable[[], None]]:
    """Return the provider, and a function that aborts its export.

    Args:
        endpoint: of the collector.
        resource: attributes of all spans.
        is_plain: without TLS.
        timeout: of one batch, in seconds.
    """
    provider = TracerProvider(resource=Resource.create(dict(resource)), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=is_plain, timeout=timeout)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider, exporter.shutdown
