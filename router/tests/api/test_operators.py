"""Health, facts, documentation, keys, CORS, and what is no route at all."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import LIMITS, FakeEngine, Serve, eventually, write_model

from funitel.proto.errors import ShardFailed, StartupError
from funitel.proto.step import ShardInfo
from funitel.router.api.routes import OPERATIONS, document
from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics
from funitel.router.text.model_files import ModelOrigin

PROTECTED = [("POST", "/"), ("POST", "/generate"), ("POST", "/generate_stream"), ("POST", "/tokenize")]
PROTECTED += [("POST", "/v1/chat/completions"), ("POST", "/chat_tokenize"), ("POST", "/invocations")]
PROTECTED += [("POST", "/vertex"), ("POST", "/v2/models/m/versions/1/infer")]
OPEN = ["/", "/health", "/health/live", "/health/ready", "/v2", "/v2/health/live", "/v2/models/m/versions/1", "/info"]
OPEN += ["/ping", "/metrics", "/docs", "/openapi.json", "/api-doc/openapi.json"]


@pytest.mark.parametrize("path", ["/", "/health", "/ping", "/health/ready", "/v2/health/ready"])
async def test_health_is_that_of_the_shards(serve: Serve, path: str) -> None:
    engine = FakeEngine()
    async with serve(engine) as client:
        assert (await client.get(path)).status_code == 200
        engine.sick = ShardFailed("rank 1 does not answer")
        response = await client.get(path)
    assert response.status_code == 503
    assert response.json() == {"error": "unhealthy: rank 1 does not answer", "error_type": "healthcheck"}


async def test_while_starting_everything_is_503(serve: Serve) -> None:
    release = asyncio.Event()
    engine = FakeEngine()

    async def connect(settings: RouterSettings, metrics: Metrics) -> FakeEngine:
        await release.wait()
        return engine

    async with serve(engine, connect=connect, ready=False) as client:
        for path in ("/", "/health", "/info"):
            response = await client.get(path)
            assert response.status_code == 503
            assert response.json()["error"].startswith("unhealthy: starting")
            assert response.json()["error_type"] == "healthcheck"
        for path in ("/", "/generate", "/generate_stream", "/tokenize"):
            response = await client.post(path, json={"inputs": "Hi"})
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "server_error"
        assert (await client.get("/metrics")).status_code == 200
        release.set()

        async def is_healthy() -> bool:
            return (await client.get("/health")).status_code == 200

        await eventually(is_healthy, "ready")
        assert (await client.post("/generate", json={"inputs": "Hi"})).status_code == 200


async def test_a_start_that_fails_is_told(serve: Serve) -> None:
    async def connect(settings: RouterSettings, metrics: Metrics) -> FakeEngine:
        raise StartupError("no shard answers")

    async with serve(FakeEngine(), connect=connect, ready=False) as client:

        async def has_failed() -> bool:
            return "failed" in (await client.get("/health")).text

        await eventually(has_failed, "failure")
        response = await client.get("/health")
    assert response.status_code == 503
    assert response.json()["error"] == "unhealthy: failed to start: no shard answers"


async def test_liveness_is_not_readiness(serve: Serve) -> None:
    """TGI has one probe for both: a pod whose shards still load, or hang, is killed (TGI's issue 3241)."""

    async def connect(settings: RouterSettings, metrics: Metrics) -> FakeEngine:
        await asyncio.Event().wait()
        raise AssertionError

    async with serve(FakeEngine(), connect=connect, ready=False) as client:
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.get("/v2/health/live")).json() == {"live": True}
        assert (await client.get("/health/ready")).status_code == 503
    engine = FakeEngine(sick=ShardFailed("rank 1 does not answer"))
    async with serve(engine) as client:
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.get("/v2/models/m/versions/1/ready")).status_code == 503


async def test_the_engine_is_closed_at_the_end(serve: Serve) -> None:
    engine = FakeEngine()
    async with serve(engine):
        pass
    assert engine.is_closed


async def test_info(serve: Serve) -> None:
    async with serve(FakeEngine(), served_model_name="served", max_best_of=3) as client:
        facts = (await client.get("/info")).json()
    assert facts["model_id"] == "served"
    assert facts["router"] == "text-generation-router"
    assert facts["max_best_of"] == 3
    assert facts["max_input_tokens"] == LIMITS.max_input_tokens
    assert facts["max_total_tokens"] == LIMITS.max_total_tokens
    assert facts["max_client_batch_size"] == 4
    assert facts["version"]
    for name in ("model_sha", "model_pipeline_tag", "sha", "docker_label"):
        assert facts[name] is None
    assert "layer_parts" not in facts


async def test_info_says_where_layers_are(serve: Serve) -> None:
    engine = FakeEngine()
    engine.layer_parts = ShardInfo(dtype="0-9=cpu:int8,10-29=cuda:bfloat16").layer_parts
    async with serve(engine) as client:
        facts = (await client.get("/info")).json()
    assert facts["layer_parts"] == "0-9=cpu:int8,10-29=cuda:bfloat16"
    assert ShardInfo(dtype="torch.bfloat16").layer_parts is None


async def test_info_tells_where_model_and_server_come_from(tmp_path: Path, serve: Serve) -> None:
    folder = tmp_path / "snapshots" / ("0123456789" * 4)
    folder.mkdir(parents=True)
    write_model(folder)
    (folder / "README.md").write_text("---\nlicense: mit\npipeline_tag: image-text-to-text\n---\n# A model\n")
    settings = {"tokenizer_name": str(folder), "git_sha": "abc", "docker_label": "sha-abc"}
    async with serve(FakeEngine(), **settings) as client:
        facts = (await client.get("/info")).json()
        answer = (await client.post("/", json={"inputs": "Hi "})).json()
    assert facts["model_sha"] == "0123456789" * 4
    assert facts["model_pipeline_tag"] == "image-text-to-text"
    assert (facts["sha"], facts["docker_label"]) == ("abc", "sha-abc")
    assert answer == [{"generated_text": "Hello world!"}], "the prompt begins the text only for text-generation"


@pytest.mark.parametrize(
    ("card", "tag"),
    [
        ("---\npipeline_tag: text-generation\n---\n", "text-generation"),
        ('---\ntags:\n- a\npipeline_tag: "fill-mask"\n---\n', "fill-mask"),
        ("# No header\npipeline_tag: text-generation\n", None),
        ("---\nlicense: mit\n---\npipeline_tag: text-generation\n", None),
        ("---\npipeline_tag: never closed\n", None),
    ],
)
def test_the_purpose_is_what_the_model_card_begins_with(card: str, tag: str | None, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(card)
    assert ModelOrigin.of(tmp_path) == ModelOrigin(None, tag)


async def test_a_key_is_asked_for_where_work_is_done(serve: Serve) -> None:
    async with serve(FakeEngine(), api_key="sécret") as client:
        for method, path in PROTECTED:
            for key in (None, "Bearer wrong", "sécret", "Basic sécret", "Bearer SÉCRET", "Bearer "):
                headers = {} if key is None else {"authorization": key.encode()}
                response = await client.request(method, path, content=b"{", headers=headers)
                assert response.status_code == 401, (path, key)
                assert response.headers["www-authenticate"] == "Bearer"
                if path.startswith("/v1/"):
                    assert response.json()["error_type"] == "unauthorized"
                else:
                    assert response.content == b"", "TGI's answer has no body"
        for path in [*OPEN, "/v1/models"]:
            assert (await client.get(path)).status_code == 200
        headers = {"authorization": "bearer sécret".encode()}
        assert (await client.post("/generate", json={"inputs": "Hi"}, headers=headers)).status_code == 200


async def test_cors_lets_a_browser_send_a_key(client: httpx.AsyncClient) -> None:
    headers = {
        "origin": "http://page",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    response = await client.options("/generate", headers=headers)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in response.headers
    refused = await client.post("/generate", json={}, headers={"origin": "http://page"})
    assert refused.headers["access-control-allow-origin"] == "*"


async def test_cors_lets_the_clients_of_openai_and_anthropic_run_in_a_browser(client: httpx.AsyncClient) -> None:
    for method, path in (("POST", "/v1/messages"), ("DELETE", "/v1/responses/resp_1")):
        headers = {
            "origin": "http://page",
            "access-control-request-method": method,
            "access-control-request-headers": "x-api-key,anthropic-version,x-stainless-lang,content-type",
        }
        assert (await client.options(path, headers=headers)).status_code == 200


async def test_cors_can_be_limited(serve: Serve) -> None:
    async with serve(FakeEngine(), cors_allow_origin=("http://mine",)) as client:
        allowed = await client.get("/health", headers={"origin": "http://mine"})
        assert allowed.headers["access-control-allow-origin"] == "http://mine"
        other = await client.get("/health", headers={"origin": "http://other"})
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("method", "path", "status", "error_type"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/v1/nowhere", 404, "not_found"),
        ("GET", "/generate", 405, "method_not_allowed"),
        ("PUT", "/v1/chat/completions", 405, "method_not_allowed"),
    ],
)
async def test_what_is_no_route(
    client: httpx.AsyncClient, method: str, path: str, status: int, error_type: str
) -> None:
    response = await client.request(method, path)
    assert response.status_code == status
    assert response.json()["error_type"] == error_type
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
async def test_an_exception_nobody_expected_is_logged_once_and_tells_nothing(
    serve: Serve, path: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("secret")

    engine = FakeEngine()
    monkeypatch.setattr(engine, "submit", broken)
    body = {"inputs": "Hi"} if path == "/generate" else {"messages": [{"role": "user", "content": "Hi"}]}
    async with serve(engine) as client:
        response = await client.post(path, json=body)
        metrics = (await client.get("/metrics")).text
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.json()["error_type"] == "internal"
    assert caplog.text.count("ZeroDivisionError: secret") == 1
    assert 'tgi_request_failure{err="generation"} 1.0' in metrics


async def test_the_document_lists_every_route(client: httpx.AsyncClient) -> None:
    described = (await client.get("/openapi.json")).json()
    assert described == (await client.get("/api-doc/openapi.json")).json() == document()
    listed = {(method.upper(), path) for path, methods in described["paths"].items() for method in methods}
    assert listed == {(operation.method, operation.documented_path) for operation in OPERATIONS}
    schemas = described["components"]["schemas"]
    references = set(_references(described))
    assert references == {f"#/components/schemas/{name}" for name in schemas}
    assert schemas["GenerateRequest"]["required"] == ["inputs"]


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [reference for part in value.values() for reference in _references(part)]
    if isinstance(value, list):
        return [reference for part in value for reference in _references(part)]
    return []


async def test_the_page_needs_nothing_from_elsewhere(client: httpx.AsyncClient) -> None:
    response = await client.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert "/v1/chat/completions" in response.text
    assert 'id="ChatRequest"' in response.text
    assert "http:" not in response.text
    assert "https:" not in response.text
    assert re.findall("<script[^>]*>", response.text) == ['<script type="module" src="ui/docs.js">']
    assert "<style" not in response.text
    assert "script-src 'self'" in response.headers["content-security-policy"]


@pytest.mark.parametrize("settings", [{"console": False}, {"protect_all_routes": True, "api_key": "k"}])
async def test_without_the_files_of_the_console_the_page_is_a_table(serve: Serve, settings: dict[str, Any]) -> None:
    async with serve(FakeEngine(), **settings) as client:
        response = await client.get("/docs", headers={"authorization": "Bearer k"})
    assert "/v1/chat/completions" in response.text
    assert "<script" not in response.text
    assert "<noscript" not in response.text
    assert "content-security-policy" not in response.headers


async def test_metrics_of_requests(client: httpx.AsyncClient) -> None:
    await client.post("/generate", json={"inputs": "Hi"})
    await client.post("/generate_stream", json={"inputs": "Hi"})
    await client.post("/generate", json={"inputs": ""})
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    lines = response.text.splitlines()
    assert "tgi_request_count 3.0" in lines
    assert "tgi_request_success 2.0" in lines
    assert 'tgi_request_failure{err="validation"} 1.0' in lines
    assert "tgi_request_duration_count 2.0" in lines
    assert "tgi_request_generated_tokens_sum 10.0" in lines
    assert "tgi_request_input_length_sum 6.0" in lines
    assert "funitel_time_to_first_token_seconds_count 2.0" in lines
    assert "funitel_inter_token_latency_seconds_count 8.0" in lines


async def test_answers_are_counted_by_route_and_status(serve: Serve) -> None:
    """TGI counts no statuses (its issue 2227)."""
    async with serve(FakeEngine(), api_key="k") as client:
        await client.get("/health")
        await client.post("/generate", json={"inputs": "Hi"})
        await client.get("/nowhere")
        await client.get("/generate")
        await client.get("/v2/models/a/versions/1")
        lines = (await client.get("/metrics")).text.splitlines()
    for route, status in (("/health", 200), ("/generate", 401), ("other", 404), ("other", 405)):
        assert f'funitel_responses_total{{route="{route}",status="{status}"}} 1.0' in lines
    assert 'funitel_responses_total{route="/v2/models/{name}/versions/{version}",status="200"} 1.0' in lines


def test_the_router_never_imports_torch() -> None:
    code = (
        "import sys, json, funitel.router.app, funitel.router.__main__;"
        "print(json.dumps([name for name in ('torch', 'transformers') if name in sys.modules]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": _paths()}
    )
    assert json.loads(result.stdout) == []


def _paths() -> str:
    return ":".join(path for path in sys.path if path)
