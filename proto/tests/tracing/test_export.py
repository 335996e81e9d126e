"""Spans reach a collector, and one that is gone, slow or misnamed holds nothing up."""

import logging
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from funitel.proto.errors import MissingPackage, SettingsError
from funitel.proto.tracing import export, spans
from funitel_testing.certificates import Authority
from funitel_testing.spans import collecting

GONE = "http://127.0.0.1:9"
SLACK_SECONDS = 4.0  # of a busy machine; without a bound it is ten and more


@pytest.fixture(autouse=True)
def _nothing_is_recorded_afterwards() -> Iterator[None]:
    yield
    spans.set_tracer(None)


def one_span() -> None:
    spans.begin("one", spans.ROOT).end()


@pytest.mark.parametrize("scheme", ["http://", ""])
def test_a_collector_gets_the_spans_and_where_they_are_from(scheme: str) -> None:
    with collecting() as (collector, place):
        finish = export.export(scheme + place, "my-service", **{"funitel.rank": 1})
        one_span()
        finish()
    (span,) = collector.spans
    assert span.name == "one"
    assert {"service.name", "service.version", "process.pid", "funitel.rank"} <= span.resource.keys()
    assert (span.resource["service.name"], span.resource["funitel.rank"]) == ("my-service", 1)


def test_tls_and_headers_are_those_of_the_standard_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path)
    files = authority.sign("collector")
    credentials = grpc.ssl_server_credentials([(Path(files.key).read_bytes(), Path(files.cert).read_bytes())])
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", authority.ca)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=ours")
    with collecting(credentials) as (collector, place):
        finish = export.export(f"https://localhost:{place.rpartition(':')[2]}", "my-service")
        one_span()
        finish()
    assert [span.name for span in collector.spans] == ["one"]
    assert collector.metadata[0]["x-tenant"] == "ours"


def test_an_exporter_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(MissingPackage, match=r"--otlp-endpoint needs packages .*: pip install 'funitel\[otlp\]'"):
        export.export("http://localhost:4317", "test")


@pytest.mark.parametrize("endpoint", ["", "http://", "ftp://host:1", "http://host:0", "http://host:x", "http://[::1"])
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(SettingsError, match="--otlp-endpoint must be like http://host:4317, given"):
        export.export(endpoint, "test")


def test_a_variable_that_is_wrong_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "nonsense")
    with pytest.raises(SettingsError, match="nonsense"):
        export.export(GONE, "test")


def test_a_collector_that_is_gone_holds_up_neither_work_nor_end() -> None:
    finish = export.export(GONE, "test")
    for _ in range(20):
        one_span()
    began = time.monotonic()
    finish()
    assert time.monotonic() - began < export.END_SECONDS + SLACK_SECONDS


def test_a_collector_that_does_not_answer_holds_up_neither_work_nor_end() -> None:
    with collecting() as (collector, place):
        collector.answers.clear()
        finish = export.export(f"http://{place}", "test")
        for _ in range(5000):  # more than is kept for it
            one_span()
        began = time.monotonic()
        finish()
        assert time.monotonic() - began < export.END_SECONDS + SLACK_SECONDS
        one_span()  # not recorded


def test_what_is_kept_for_a_collector_has_a_bound() -> None:
    with collecting() as (collector, place):
        collector.answers.clear()
        finish = export.export(f"http://{place}", "test")
        for _ in range(10_000):
            one_span()
        threading.Timer(0.2, collector.answers.set).start()
        finish()
    assert len(collector.spans) <= 4096


def test_a_collector_that_is_gone_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter")
    logger.filters.clear()
    export.export(GONE, "test")()
    caplog.clear()
    logger.filters.clear()
    export._limit_logs()
    for _ in range(5):
        logger.warning("trying again")
        logger.error("failed to export")
    assert [record.message for record in caplog.records] == ["failed to export"]
