"""A shard records the calls it answers below the step the router names."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from funitel.model_server.server import make_server
from funitel.proto import generate_pb2 as pb
from funitel.proto import generate_pb2_grpc, tracing

HEALTH = "/generate.v3.TextGenerationService/Health"
TRACE = "0af7651916cd43dd8448eb211c80319c"


class Healthy(generate_pb2_grpc.TextGenerationServiceServicer):
    """Answers Health; fails Info."""

    async def Health(self, request: Any, context: Any) -> pb.HealthResponse:
        return pb.HealthResponse()

    async def Info(self, request: Any, context: Any) -> pb.InfoResponse:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not now")
        raise AssertionError


@pytest.mark.parametrize("is_traced", [True, False])
async def test_calls_are_spans_below_the_routers(tmp_path: Path, is_traced: bool) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider.get_tracer("test"))
    server = make_server(Healthy(), f"unix:{tmp_path}/s", is_traced=is_traced)  # type: ignore[arg-type]
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
            stub = generate_pb2_grpc.TextGenerationServiceStub(channel)  # type: ignore[no-untyped-call]
            await stub.Health(pb.HealthRequest(), metadata=[("traceparent", f"00-{TRACE}-b7ad6b7169203331-01")])
            with pytest.raises(grpc.aio.AioRpcError, match="not now"):
                await stub.Info(pb.InfoRequest())
    finally:
        await server.stop(None)
        tracing.use(None)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    if not is_traced:
        assert spans == {}
        return
    health = spans[HEALTH]
    assert f"{health.context.trace_id:032x}" == TRACE
    assert health.attributes is not None
    assert health.attributes["rpc.system"] == "grpc"
    assert health.attributes["rpc.service"] == "generate.v3.TextGenerationService"
    assert health.attributes["rpc.method"] == "Health"
    assert health.attributes["rpc.grpc.status_code"] == 0
    info = spans["/generate.v3.TextGenerationService/Info"]
    assert not info.status.is_ok
