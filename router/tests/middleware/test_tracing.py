"""Spans of requests: what is recorded below whose, what they say, and that a collector gets it."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fake_shards import FakeShard, fake_shards
from fakes import FakeEngine, Serve, eventually
from starlette.types import Message, Receive, Scope

from funitel.proto.errors import NotReady, ShardFailed
from funitel.proto.step import SamplingParams, StoppingParams
from funitel.proto.tracing import spans as tracing
from funitel.router.app import build_app
from funitel.router.connect import connect
from funitel.router.core.request import Request
from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics
from funitel_testing.servers import free_port, wait_until
from funitel_testing.spans import Recorded, collecting, facts_of, parent_of, recording

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"
PATIENCE_SECONDS = 20.0
SECRET = "xyzzy"  # of a prompt: no span may hold it


@pytest.fixture
def spans() -> Iterator[Recorded]:
    """What is recorded while the test runs; nothing of it quotes a prompt."""
    with recording() as recorded:
        yield recorded
    assert SECRET not in "".join(span.to_json() for span in recorded.all)


# The engine


async def generate(tmp_path: Path, count: int = 1, **settings: object) -> list[FakeShard]:
    """Run requests, each below a span of its own, over two fake shards."""
    async with fake_shards(tmp_path, 2, has_step_sockets=True) as shards:
        flags = {"master_shard_uds_path": f"{tmp_path}/shard-0", "max_batch_prefill_tokens": 32} | settings
        engine = await connect(RouterSettings(**flags), Metrics())  # type: ignore[arg-type]
        await asyncio.gather(*(_generate(engine, index) for index in range(count)))
        await asyncio.wait_for(engine.close(), 10)
        return shards


async def _generate(engine: object, index: int) -> None:
    request = Request(
        input_ids=(1, 2, 3, index), sampling=SamplingParams(), stopping=StoppingParams(max_new_tokens=6), inputs=SECRET
    )
    span = tracing.begin("request", tracing.ROOT)
    with tracing.activate(span):
        async with engine.submit(request) as stream:  # type: ignore[attr-defined]
            await stream.last()
    span.end()


def told(shard: FakeShard) -> list[str]:
    """Ids of the spans that a shard was told of."""
    contexts = [context for end in shard.step_ends for context in end.contexts]
    return [value.split("-")[2] for context in contexts for name, value in context.items() if name[5:6] == "p"]


async def test_each_of_several_requests_has_a_whole_tree_and_every_shard_knows_of_it(
    tmp_path: Path, spans: Recorded
) -> None:
    shards = await generate(tmp_path, 3, otlp_decode_tokens=2)
    for request in spans.named("request"):
        below = [span for span in spans.all if parent_of(span) == request.context.span_id]
        assert {span.context.trace_id for span in below} == {request.context.trace_id}
        assert {span.name for span in below} == {"queue", "prefill", "decode"}
        tokens = [facts_of(span)["funitel.tokens"] for span in below if span.name == "decode"]
        assert sum(tokens) == 5
        assert max(tokens) == 2
        expected = {f"{span.context.span_id:016x}" for span in below if span.name != "queue"}
        for shard in shards:
            assert expected <= set(told(shard))
    assert told(shards[0]) == told(shards[1])


async def test_without_a_collector_nothing_is_sent_along(tmp_path: Path) -> None:
    assert [told(shard) for shard in await generate(tmp_path)] == [[], []]


# HTTP


async def ask(
    serve: Serve, path: str, body: dict[str, object], engine: FakeEngine | None = None, **headers: str
) -> httpx.Response:
    async with serve(engine or FakeEngine(), otlp_endpoint="http://localhost:1") as client:
        return await client.post(path, json=body, headers=headers)


async def test_a_request_continues_the_trace_of_its_client(serve: Serve, spans: Recorded) -> None:
    headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}
    body: dict[str, object] = {"inputs": SECRET, "parameters": {"seed": 7, "do_sample": True, "max_new_tokens": 4}}
    answer = await ask(serve, "/generate", body, **headers)
    assert answer.status_code == 200
    request = spans.one("POST /generate")
    assert f"{parent_of(request):016x}" == SPAN
    assert request.context.trace_state.to_header() == "vendor=1"
    facts = facts_of(request)
    assert facts["http.response.status_code"] == 200
    assert facts["http.route"] == "/generate"
    assert facts["seed"] == "7"
    times = {"total_time", "validation_time", "queue_time", "inference_time", "time_per_token"}
    assert times <= facts.keys()
    ours = [span for span in spans.all if f"{span.context.trace_id:032x}" == TRACE]
    assert {span.name for span in ours} == {"POST /generate", "queue", "prefill", "decode"}


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/generate", {"inputs": SECRET, "parameters": {"max_new_tokens": 3}}, "text_completion"),
        ("/v1/completions", {"prompt": SECRET, "max_tokens": 3, "model": "mine"}, "text_completion"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 3}, "chat"),
        ("/v1/messages", {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 3, "model": "m"}, "chat"),
        ("/v1/responses", {"input": SECRET, "max_output_tokens": 16, "model": "m"}, "chat"),
    ],
)
async def test_a_request_is_told_in_the_words_of_generative_ai(
    serve: Serve, spans: Recorded, path: str, body: dict[str, object], operation: str
) -> None:
    answer = (await ask(serve, path, body)).json()
    facts = facts_of(spans.one(f"POST {path}"))
    assert facts["gen_ai.operation.name"] == operation
    assert facts["gen_ai.request.model"] == body.get("model", facts["gen_ai.response.model"])
    assert facts["gen_ai.request.max_tokens"] == (16 if "max_output_tokens" in body else 3)
    assert facts["gen_ai.usage.output_tokens"] >= 3
    assert facts["gen_ai.usage.input_tokens"] >= len(SECRET)
    assert facts["gen_ai.response.finish_reasons"] in (("length",), ("stop",))
    assert facts["gen_ai.server.time_to_first_token"] > 0
    assert facts.get("gen_ai.response.id") == answer.get("id")


async def test_a_streamed_answer_is_a_span_of_its_own(serve: Serve, spans: Recorded) -> None:
    await ask(serve, "/generate_stream", {"inputs": SECRET})
    stream, request = spans.one("stream"), spans.one("POST /generate_stream")
    assert parent_of(stream) == request.context.span_id
    assert facts_of(stream)["funitel.tokens"] == 5


async def test_choices_are_counted_together(serve: Serve, spans: Recorded) -> None:
    body = {"messages": [{"role": "user", "content": SECRET}], "n": 2, "max_tokens": 2}
    await ask(serve, "/v1/chat/completions", body)
    facts = facts_of(spans.one("POST /v1/chat/completions"))
    assert facts["gen_ai.request.choice.count"] == 2
    assert facts["gen_ai.usage.output_tokens"] == 4
    assert facts["gen_ai.response.finish_reasons"] == ("length", "length")
    assert len(spans.named("prefill")) == 2


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_a_failure_is_on_the_request_and_on_what_failed(serve: Serve, spans: Recorded, path: str) -> None:
    await ask(serve, path, {"inputs": SECRET}, FakeEngine(error=ShardFailed("rank 1 died"), fails_at=2))
    for name in (f"POST {path}", "decode"):
        span = spans.named(name)[-1]
        assert span.status.description == "rank 1 died", name
        assert facts_of(span)["error.type"] == "ShardFailed"


async def test_choices_whose_sibling_has_failed_were_not_cancelled(serve: Serve, spans: Recorded) -> None:
    body = {"messages": [{"role": "user", "content": SECRET}], "n": 2}
    await ask(serve, "/v1/chat/completions", body, FakeEngine(error=ShardFailed("rank 1 died"), fails_at=2))
    request = spans.one("POST /v1/chat/completions")
    assert [event.name for event in request.events] == []
    assert {span.status.description for span in spans.named("decode")} == {"rank 1 died"}


async def test_what_the_client_did_wrong_is_no_error_of_ours(serve: Serve, spans: Recorded) -> None:
    answer = await ask(serve, "/generate", {"inputs": "x", "parameters": {"top_p": 7.5}})
    assert answer.status_code == 422
    request = spans.one("POST /generate")
    assert facts_of(request)["http.response.status_code"] == 422
    assert request.status.is_ok


async def test_a_path_no_route_has_gives_no_name(serve: Serve, spans: Recorded) -> None:
    await ask(serve, "/nowhere/1234", {})
    assert "http.route" not in facts_of(spans.one("POST"))


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_a_client_that_leaves_ends_its_spans(model: Path, spans: Recorded, path: str) -> None:
    engine = FakeEngine(pause=0.05)
    settings = RouterSettings(tokenizer_name=str(model), otlp_endpoint="http://localhost:1")
    app = build_app(settings, engine.connect)
    async with app.router.lifespan_context(app), asyncio.timeout(PATIENCE_SECONDS):

        async def is_ready() -> bool:
            try:
                await app.state.service.check_ready()
            except NotReady:
                return False
            return True

        await eventually(is_ready, "ready")
        await app(_scope(path), _leaver(json.dumps({"inputs": SECRET}).encode()), _unheard)
    request = spans.one(f"POST {path}")
    assert "cancelled" in [event.name for event in request.events]
    assert request.status.is_ok
    assert facts_of(request)["gen_ai.usage.output_tokens"] < 5
    names = [span.name for span in spans.all]
    assert "decode" in names or "prefill" in names


def _scope(path: str) -> Scope:
    headers = [(b"content-type", b"application/json")]
    return {"type": "http", "method": "POST", "path": path, "scheme": "http", "headers": headers, "query_string": b""}


def _leaver(body: bytes) -> Receive:
    """A client that sends a body and leaves a little later."""
    messages: list[Message] = [{"type": "http.request", "body": body}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.sleep(0.12)
        return {"type": "http.disconnect"}

    return receive


async def _unheard(message: Message) -> None:
    """Send to nobody."""


async def test_a_client_that_samples_nothing_is_not_traced(serve: Serve, spans: Recorded) -> None:
    await ask(serve, "/generate", {"inputs": SECRET}, traceparent=TRACEPARENT[:-1] + "0")
    assert [span.name for span in spans.all if f"{span.context.trace_id:032x}" == TRACE] == []


# The program


def test_a_router_sends_its_requests_to_the_collector(model: Path) -> None:
    port = free_port()
    script = Path(__file__).parents[1] / "fake_router.py"
    with collecting() as (collector, place):
        environ = {
            "PYTHONPATH": ":".join(entry for entry in sys.path if entry),
            "TOKENIZER_NAME": str(model),
            "HOSTNAME": "127.0.0.1",
            "PORT": str(port),
            "OTLP_ENDPOINT": f"http://{place}",
            "OTLP_SERVICE_NAME": "my-router",
        }
        with subprocess.Popen([sys.executable, str(script)], env=environ, stderr=subprocess.PIPE) as process:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: _is_healthy(url), PATIENCE_SECONDS)
            answer = httpx.post(f"{url}/generate", json={"inputs": "Hi"}, headers={"traceparent": TRACEPARENT})
            assert answer.status_code == 200
            process.terminate()
            process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    ours = {span.name: span for span in collector.of_trace(TRACE)}
    assert ours.keys() == {"POST /generate", "queue", "prefill", "decode"}
    assert ours["POST /generate"].parent_id == SPAN
    assert {span.resource["service.name"] for span in collector.spans} == {"my-router"}


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False
