"""Export spans to a collector by OTLP over gRPC from a background thread.

A collector that is slow or unreachable does not delay the process: spans that it does not accept in time are dropped.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from funitel.proto.errors import SettingsError, translating
from funitel.proto.extras import check_extra
from funitel.proto.process.version import version
from funitel.proto.tracing import spans

EXPORT_SECONDS = 5.0  # timeout of one batch
END_SECONDS = 1.5  # timeout of the remaining spans at the end of the process
MIN_LOG_SECONDS = 60.0  # between two log lines about a failing collector

_EXPORTER_LOGGER = "opentelemetry.exporter.otlp.proto.grpc.exporter"


def export(endpoint: str, service_name: str, **attributes: str | int) -> Callable[[], None]:
    """Export this process's spans to a collector; the result flushes and ends the export.

    `https://` means TLS. The standard variables `OTEL_*` set certificates, headers, sampling and sizes.

    Args:
        endpoint: such as `http://localhost:4317`.
        service_name: of the spans' resource.
        attributes: further attributes of that resource.

    Raises:
        SettingsError: the endpoint is invalid.
        MissingPackage: the extra `otlp` is not installed.
    """
    _check(endpoint)
    check_extra("otlp", "--otlp-endpoint")
    from funitel.proto.tracing.otlp import build_provider

    _limit_logs()
    facts = {"service.name": service_name, "service.version": version(), "process.pid": os.getpid(), **attributes}
    is_plain = urlsplit(endpoint).scheme != "https"
    with translating(lambda error: SettingsError(f"--otlp-endpoint {endpoint}: a variable OTEL_* is wrong: {error}")):
        provider, abort = build_provider(endpoint, facts, is_plain=is_plain, timeout=EXPORT_SECONDS)
    spans.set_tracer(provider.get_tracer("funitel", version()))

    def finish() -> None:
        spans.set_tracer(None)
        ending = threading.Thread(target=provider.shutdown, name="last-spans", daemon=True)
        ending.start()
        ending.join(END_SECONDS)
        if ending.is_alive():
            abort()  # drops the batch in flight and those queued

    return finish


def _check(endpoint: str) -> None:
    """Raise SettingsError unless an endpoint has a host; `host:port` alone is accepted."""
    try:
        parts = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right:
        raise SettingsError(f"--otlp-endpoint must be like http://host:4317, given {endpoint!r}")


def _limit_logs() -> None:
    """Log errors of OpenTelemetry only, and seldom: its warnings quote text that clients choose."""
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    exporter = logging.getLogger(_EXPORTER_LOGGER)
    if not any(isinstance(filter, _RateLimit) for filter in exporter.filters):
        exporter.addFilter(_RateLimit())


class _RateLimit(logging.Filter):
    """Passes one line per interval."""

    def __init__(self) -> None:
        super().__init__()
        self._last = -MIN_LOG_SECONDS

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the interval since the last line has passed."""
        now = time.monotonic()
        is_due = now - self._last >= MIN_LOG_SECONDS
        if is_due:
            self._last = now
        return is_due
