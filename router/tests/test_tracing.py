"""Spans: what is recorded below whose, and that a collector gets it over OTLP."""

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from fake_shards import fake_shards
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from funitel.proto import tracing
from funitel.proto.errors import SettingsError
from funitel.proto.step import SamplingParams, StoppingParams
from funitel.router.fleet import connect
from funitel.router.metrics import Metrics
from funitel.router.sequence import Request
from funitel.router.settings import RouterSettings

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"
PATIENCE_SECONDS = 20.0


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """What is recorded while the test runs."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider.get_tracer("test"))
    yield exporter
    tracing.use(None)


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


async def generate(tmp_path: Path) -> list[dict[str, str]]:
    """Run one request below a span over a fake shard; return the metadata of its calls."""
    async with fake_shards(tmp_path, 1) as (fake,):
        settings = RouterSettings(master_shard_uds_path=f"{tmp_path}/shard-0", max_batch_prefill_tokens=32)
        engine = await connect(settings, Metrics())
        request = Request(
            input_ids=(1, 2, 3), sampling=SamplingParams(), stopping=StoppingParams(max_new_tokens=3), inputs="abc"
        )
        with tracing.span("request"):
            async with engine.submit(request) as stream:
                await stream.last()
        await asyncio.wait_for(engine.close(), 10)
        return fake.metadata


async def test_a_request_is_queued_and_inferred_below_its_caller(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    await generate(tmp_path)
    (caller,) = named(spans, "request")
    for name in ("queued", "infer"):
        (span,) = named(spans, name)
        assert span.parent is not None
        assert span.parent.span_id == caller.context.span_id
    (queued,), (infer,) = named(spans, "queued"), named(spans, "infer")
    assert abs(queued.end_time - infer.start_time) < 1e6  # type: ignore[operator]
    assert 0 < infer.end_time - infer.start_time < 10e9  # type: ignore[operator]


async def test_each_step_is_a_batch_of_its_own_and_known_to_the_shards(
    tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    metadata = await generate(tmp_path)
    (prefill,) = named(spans, "prefill")
    decodes = named(spans, "decode")
    assert prefill.attributes == {"size": 1}
    assert len(decodes) >= 2
    batches = {batch.context.span_id: batch for batch in named(spans, "batch")}
    told = [call["traceparent"].rpartition("-")[0] for call in metadata]
    for step in (prefill, *decodes):
        assert step.parent is not None
        assert batches[step.parent.span_id].parent is None
        assert f"00-{step.context.trace_id:032x}-{step.context.span_id:016x}" in told


async def test_without_a_collector_nothing_is_sent_along(tmp_path: Path) -> None:
    assert not any("traceparent" in call for call in await generate(tmp_path))
    assert tracing.inject() == {}
    assert tracing.current() is None


def test_an_exporter_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(SettingsError, match="--otlp-endpoint needs the package opentelemetry-exporter-otlp-proto-grpc"):
        tracing.export("http://localhost:4317", "test")


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.has_some = threading.Event()

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            attributes = {a.key: a.value.string_value for a in resource.resource.attributes}
            self.services.add(attributes["service.name"])
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.has_some.set()
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    """A collector and its endpoint."""
    keeper = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(keeper, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield keeper, f"http://127.0.0.1:{port}"
    server.stop(None)


def test_a_router_sends_its_requests_to_the_collector(model: Path, collector: tuple[Collector, str]) -> None:
    keeper, endpoint = collector
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    script = Path(__file__).with_name("fake_router.py")
    environ = {
        "PYTHONPATH": ":".join(entry for entry in sys.path if entry),
        "TOKENIZER_NAME": str(model),
        "HOSTNAME": "127.0.0.1",
        "PORT": str(port),
        "OTLP_ENDPOINT": endpoint,
        "OTLP_SERVICE_NAME": "my-router",
    }
    with subprocess.Popen([sys.executable, str(script)], env=environ, stderr=subprocess.PIPE) as process:
        _wait_until_healthy(port)
        answer = httpx.post(
            f"http://127.0.0.1:{port}/generate",
            json={"inputs": "Hi", "parameters": {"seed": 7, "do_sample": True}},
            headers={"traceparent": TRACEPARENT},
        )
        assert answer.status_code == 200
        process.terminate()
        process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert keeper.has_some.wait(PATIENCE_SECONDS)
    ours = {span.name: span for span in keeper.spans if span.trace_id.hex() == TRACE}
    assert keeper.services == {"my-router"}
    assert ours.keys() == {"POST /generate", "queued", "infer"}
    request = ours["POST /generate"]
    assert request.parent_span_id.hex() == "b7ad6b7169203331"
    attributes = {a.key: a.value for a in request.attributes}
    assert attributes["http.response.status_code"].int_value == 200
    assert attributes["seed"].string_value == "7"
    times = {"total_time", "validation_time", "queue_time", "inference_time", "time_per_token"}
    assert times <= attributes.keys()
    assert attributes["inference_time"].double_value > 0


def test_a_collector_that_is_gone_does_not_hold_up_the_end() -> None:
    finish = tracing.export("http://127.0.0.1:9", "test")
    try:
        with tracing.span("lost"):
            pass
        began = time.monotonic()
        finish()
        assert time.monotonic() - began < tracing.EXPORT_SECONDS + 3
    finally:
        tracing.use(None)


def _wait_until_healthy(port: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.02)
    raise AssertionError("the router did not start")
