"""Draining: requests in flight finish, incoming ones are refused in the shape of their API, health is 503 at once."""

import asyncio
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, Serve, eventually
from starlette.routing import Route
from starlette.types import ASGIApp

from funitel.router.api.routes import OPERATIONS
from funitel.router.app import build_app
from funitel.router.auth.accounts import Accounts
from funitel.router.core.drain import Drain
from funitel.router.middleware.route_gate import RouteGate
from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics
from funitel.router.transport.stream_writer import DirectSend

NATIVE, CHAT = {"inputs": "Hi"}, {"model": "tgi", "messages": [{"role": "user", "content": "Hi"}]}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/", NATIVE),
    ("/generate", NATIVE),
    ("/generate_stream", NATIVE),
    ("/tokenize", NATIVE),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"stream": True}),
    ("/v1/completions", {"model": "tgi", "prompt": "Hi"}),
    ("/v1/responses", {"model": "tgi", "input": "Hi"}),
    ("/v1/messages", CHAT | {"max_tokens": 5}),
    ("/v1/embeddings", {"model": "tgi", "input": "Hi"}),
    ("/embed", {"inputs": "Hi"}),
    ("/invocations", NATIVE),
    ("/vertex", {"instances": [{"inputs": "Hi"}]}),
]


@pytest.fixture
def drain(monkeypatch: pytest.MonkeyPatch) -> Drain:
    """That of the application that is made next."""
    drain = Drain()
    monkeypatch.setattr("funitel.router.serving.service.Drain", lambda *_: drain)
    return drain


def _words(path: str, body: dict[str, Any]) -> tuple[str, str]:
    """Type and message of a failure, by the shape of its API."""
    if path == "/v1/messages":
        return body["error"]["type"], body["error"]["message"]
    if path.startswith("/v1/"):
        return body["error"]["code"], body["error"]["message"]
    return body["error_type"], body["error"]


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=[f"{path} {len(body)}" for path, body in REQUESTS])
async def test_whatever_comes_is_refused_and_told_when_to_come_again(
    drain: Drain, serve: Serve, path: str, body: dict[str, Any]
) -> None:
    async with serve(FakeEngine()) as client:
        drain.begin()
        answer = await client.post(path, json=body)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.headers["connection"] == "close"
        kind, message = _words(path, answer.json())
        assert kind == ("api_error" if path == "/v1/messages" else "shutting_down")
        assert message.startswith("Server is shutting down: ")


async def test_health_is_503_and_liveness_200(drain: Drain, serve: Serve) -> None:
    async with serve(FakeEngine()) as client:
        assert (await client.get("/health/ready")).status_code == 200
        drain.begin()
        for path in ("/health", "/health/ready", "/ping", "/v2/health/ready"):
            assert (await client.get(path)).status_code == 503, path
        for path in ("/health/live", "/metrics", "/info", "/v2/health/live"):
            assert (await client.get(path)).status_code == 200, path


async def test_an_announced_drain_is_not_ready_and_takes_requests(drain: Drain, serve: Serve) -> None:
    async with serve(FakeEngine()) as client:
        drain.announce()
        assert (await client.get("/health/ready")).status_code == 503
        answer = await client.post("/generate", json=NATIVE)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        drain.begin()
        assert (await client.post("/generate", json=NATIVE)).status_code == 503


async def test_what_has_begun_finishes_and_its_connection_ends(drain: Drain, serve: Serve) -> None:
    engine = FakeEngine(pause=0.02)
    async with serve(engine) as client:
        running = asyncio.create_task(client.post("/generate", json=NATIVE))

        async def is_running() -> bool:
            return bool(engine.requests)

        await eventually(is_running, "the request runs")
        assert drain.num_running == 1
        drain.begin()
        answer = await running
    assert answer.status_code == 200
    assert answer.headers["connection"] == "close"
    assert drain.num_running == 0


async def test_connections_live_on_before(drain: Drain, client: httpx.AsyncClient) -> None:
    assert "connection" not in (await client.post("/generate", json=NATIVE)).headers


async def test_a_request_that_fails_is_counted_off() -> None:
    async def failing(*_: Any) -> None:
        assert drain.num_running == 1
        raise RuntimeError

    drain = Drain()
    gate = RouteGate(failing, OPERATIONS[0], Accounts(None, None, Metrics()), drain, "m")
    with pytest.raises(RuntimeError):
        await gate({"type": "http"}, None, None)  # type: ignore[arg-type]
    assert drain.num_running == 0


def _layers(app: ASGIApp | None) -> list[str]:
    """The classes of ours that are called one by the other around an application."""
    names = []
    while app is not None:
        if type(app).__module__.startswith("funitel."):
            names.append(type(app).__name__)
        app = getattr(app, "_app", None) or getattr(app, "app", None)
    return names


def test_at_most_six_layers_are_around_a_route() -> None:
    settings = RouterSettings(
        tokenizer_name="m", api_key="sesame", otlp_endpoint="http://localhost:1", prometheus_port=9
    )
    app = build_app(settings, FakeEngine().connect)
    outside = _layers(DirectSend(app.build_middleware_stack()))
    assert outside == ["DirectSend", "AccessLog", "TracingMiddleware", "MetricsPort", "ErrorBoundary"]
    for route in app.routes:
        assert isinstance(route, Route)
        assert [*outside, *_layers(route.app)] == [*outside, "RouteGate"]
