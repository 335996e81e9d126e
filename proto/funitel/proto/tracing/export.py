"""Where spans go: to a collector, by OTLP over gRPC, from a thread of its own.

Whatever becomes of the collector, the process goes on: what it does not take in time is dropped.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from importlib import metadata
from urllib.parse import urlsplit

from funitel.proto.errors import SettingsError
from funitel.proto.tracing import spans

EXPORT_SECONDS = 5.0  # that a collector may take for one batch
END_SECONDS = 1.5  # that it may take for all that is left at the end of the process
COMPLAINT_SECONDS = 60.0  # between two lines of the log about a collector that takes nothing

_EXPORTER_LOGGER = "opentelemetry.exporter.otlp.proto.grpc.exporter"


def export(endpoint: str, service_name: str, **attributes: str | int) -> Callable[[], None]:
    """Send this process's spans to a collector; call the result at the end.

    `https://` is TLS. Certificates, headers, sampling and sizes are what the standard variables `OTEL_*` say.

    Args:
        endpoint: such as `http://localhost:4317`.
        service_name: what the spans are from.
        attributes: what else is true of all of this process's spans.

    Raises:
        SettingsError: it is no endpoint, or the exporter is not installed.
    """
    _check(endpoint)
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise SettingsError(
            "--otlp-endpoint needs the package opentelemetry-exporter-otlp-proto-grpc, which is not installed"
        ) from error
    _quieten()
    facts = {"service.name": service_name, "service.version": _version(), "process.pid": os.getpid(), **attributes}
    provider = TracerProvider(resource=Resource.create(facts), shutdown_on_exit=False)
    is_plain = urlsplit(endpoint).scheme != "https"
    try:
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=is_plain, timeout=EXPORT_SECONDS)
    except Exception as error:  # whatever it makes of a variable that only it knows
        raise SettingsError(f"--otlp-endpoint {endpoint}: a variable OTEL_* is wrong: {error}") from error
    provider.add_span_processor(BatchSpanProcessor(exporter))
    spans.use(provider.get_tracer("funitel", _version()))

    def finish() -> None:
        spans.use(None)
        ending = threading.Thread(target=provider.shutdown, name="last-spans", daemon=True)
        ending.start()
        ending.join(END_SECONDS)
        if ending.is_alive():
            exporter.shutdown()  # gives up the batch under way, and those behind it

    return finish


def _check(endpoint: str) -> None:
    """Raise SettingsError unless an endpoint has a host; `host:port` alone is taken too."""
    try:
        parts = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right:
        raise SettingsError(f"--otlp-endpoint must be like http://host:4317, given {endpoint!r}")


def _version() -> str:
    try:
        return metadata.version("funitel")
    except metadata.PackageNotFoundError:
        return "0.0.0"


def _quieten() -> None:
    """Have OpenTelemetry log what an operator must know and no more: clients choose what its warnings would quote."""
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    exporter = logging.getLogger(_EXPORTER_LOGGER)
    if not any(isinstance(filter, _Seldom) for filter in exporter.filters):
        exporter.addFilter(_Seldom())


class _Seldom(logging.Filter):
    """Lets a line pass now and then."""

    def __init__(self) -> None:
        super().__init__()
        self._last = -COMPLAINT_SECONDS

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the last line was long ago."""
        now = time.monotonic()
        is_due = now - self._last >= COMPLAINT_SECONDS
        if is_due:
            self._last = now
        return is_due
