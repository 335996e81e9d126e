"""A shard records the calls it answers below what the router names, and no others."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from funitel.model_server.rpc.servicer import make_server
from funitel.proto import generate_pb2 as pb
from funitel.proto import generate_pb2_grpc
from funitel_testing.spans import Recorded, facts_of, recording

SERVICE = "/generate.v3.TextGenerationService/"
TRACE = "0af7651916cd43dd8448eb211c80319c"
NAMED = [("traceparent", f"00-{TRACE}-b7ad6b7169203331-01")]


class Healthy(generate_pb2_grpc.TextGenerationServiceServicer):
    """Answers Health; fails Info."""

    async def Health(self, request: Any, context: Any) -> pb.HealthResponse:
        return pb.HealthResponse()

    async def Info(self, request: Any, context: Any) -> pb.InfoResponse:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not now")
        raise AssertionError


async def call(tmp_path: Path, *, is_traced: bool, metadata: list[tuple[str, str]] | None) -> Recorded:
    """Make both calls; return what was recorded."""
    with recording() as spans:
        server = make_server(Healthy(), f"unix:{tmp_path}/s", is_traced=is_traced)
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
                stub = generate_pb2_grpc.TextGenerationServiceStub(channel)  # type: ignore[no-untyped-call]
                await stub.Health(pb.HealthRequest(), metadata=metadata)
                with pytest.raises(grpc.aio.AioRpcError, match="not now"):
                    await stub.Info(pb.InfoRequest(), metadata=metadata)
        finally:
            await server.stop(None)
    return spans


async def test_calls_are_spans_below_the_routers(tmp_path: Path) -> None:
    spans = await call(tmp_path, is_traced=True, metadata=NAMED)
    health, info = spans.one(f"{SERVICE}Health"), spans.one(f"{SERVICE}Info")
    assert {f"{span.context.trace_id:032x}" for span in spans.all} == {TRACE}
    assert facts_of(health) == {
        "rpc.system": "grpc",
        "rpc.service": "generate.v3.TextGenerationService",
        "rpc.method": "Health",
        "rpc.grpc.status_code": 0,
    }
    assert not info.status.is_ok


@pytest.mark.parametrize(("is_traced", "metadata"), [(False, NAMED), (True, None)])
async def test_a_call_that_nobody_traces_is_no_span(
    tmp_path: Path, is_traced: bool, metadata: list[tuple[str, str]] | None
) -> None:
    assert (await call(tmp_path, is_traced=is_traced, metadata=metadata)).all == ()
