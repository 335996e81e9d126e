"""Keys over HTTP: every route, every shape of error, what is charged."""

import asyncio
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, Serve, eventually

from funitel.proto.errors import ShardFailed
from funitel.proto.security.keys import Key, digest_of, line_of
from funitel.router.api.routes import OPERATIONS
from funitel.router.auth.access import Access

BEARER = {"authorization": "Bearer sesame"}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
GENERATE = {
    "inputs": "hi",
    "parameters": {"max_new_tokens": 4},
}  # a prompt of three tokens: a first one and a byte each


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def hold(path: Path, **bounds: Any) -> str:
    """Write a file of one key; what the setting takes."""
    path.write_text(line_of(Key(name="team-a", digest=digest_of(b"sesame"), **bounds)) + "\n")
    return str(path)


async def metric(client: httpx.AsyncClient, name: str) -> float:
    """A sample of the metrics; 0 where there is none."""
    lines = (await client.get("/metrics", headers=BEARER)).text.splitlines()
    return next((float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), 0.0)


async def tokens(client: httpx.AsyncClient) -> tuple[float, float]:
    """What was charged: of prompts and of completions."""
    name = 'funitel_key_tokens_total{{key="team-a",kind="{}"}}'
    return await metric(client, name.format("prompt")), await metric(client, name.format("completion"))


# Every route


async def test_every_route_of_the_table_asks_for_a_key_unless_it_says_otherwise(serve: Serve, keys: Path) -> None:
    async with serve(FakeEngine(), api_key_file=hold(keys)) as client:
        for operation in OPERATIONS:
            path = re.sub(r"{.*?}", "m", operation.path)
            answer = await client.request(operation.method, path, content=b"{", headers={"x-api-key": "wrong"})
            asks = operation.access not in (Access.FACT, Access.LOGIN, Access.PROBE)
            assert (answer.status_code == 401) == asks, (operation.method, path)


async def test_facts_can_be_closed_and_probes_never_are(serve: Serve, keys: Path) -> None:
    async with serve(FakeEngine(), ready=False, api_key_file=hold(keys), protect_all_routes=True) as client:
        for path in ("/info", "/metrics", "/docs", "/openapi.json", "/api-doc/openapi.json", "/v1/models", "/v2"):
            for method in ("GET", "HEAD"):
                assert (await client.request(method, path)).status_code == 401, path
            assert (await client.get(path, headers=BEARER)).status_code in (200, 503), path
        for path in ("/", "/health", "/ping", "/health/ready", "/health/live", "/v2/health/live", "/v2/health/ready"):
            assert (await client.get(path)).status_code in (200, 503), path
        described = (await client.get("/openapi.json", headers=BEARER)).json()["paths"]
        assert "security" in described["/info"]["get"]
        assert "security" not in described["/health"]["get"]


PATHS = ("/generate", "/v1/chat/completions", "/v1/messages")


async def test_x16_five_wrong_keys_ban_an_address(serve: Serve, keys: Path) -> None:
    async with serve(FakeEngine(), api_key_file=hold(keys), max_wrong_keys=5, ban_seconds=60.0) as client:
        for _ in range(8):  # requests without a key are no guesses
            assert (await client.get("/v1/responses/r")).status_code == 401
        assert (await client.get("/v1/responses/r", headers=BEARER)).status_code == 404
        for number in range(5):
            headers = {"authorization": f"Bearer wrong-{number}"}
            assert (await client.get("/v1/responses/r", headers=headers)).status_code == 401
        for headers in ({"authorization": "Bearer wrong-5"}, BEARER):
            answer = await client.get("/v1/responses/r", headers=headers)
            assert answer.status_code == 429
            assert 0 < int(answer.headers["retry-after"]) <= 60
            assert "too many wrong API keys" in answer.text
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("path", PATHS)
async def test_a_key_is_for_its_routes(serve: Serve, keys: Path, path: str) -> None:
    engine = FakeEngine()
    async with serve(engine, api_key_file=hold(keys, routes=("/tokenize",))) as client:
        answer = await client.post(path, json=CHAT | GENERATE, headers=BEARER)
        assert answer.status_code == 403
        assert "for the routes /tokenize. Given: " + path in answer.text
        body = answer.json()
        match path:
            case "/generate":
                assert body["error_type"] == "forbidden"
            case "/v1/messages":
                assert body["error"]["type"] == "permission_error"
            case _:
                assert body["error"]["code"] == "insufficient_permissions"
        assert (await client.post("/tokenize", json={"inputs": "hi"}, headers=BEARER)).status_code == 200
        assert await metric(client, 'funitel_key_refused_total{key="team-a",reason="route"}') == 1
    assert not engine.requests


async def test_a_key_is_for_its_models(serve: Serve, keys: Path) -> None:
    engine = FakeEngine()
    settings = {"api_key_file": hold(keys, models=("my-llama",)), "served_model_name": "my-llama"}
    async with serve(engine, **settings) as client:
        for model in ("my-llama", "tgi", "", None):
            body = CHAT if model is None else CHAT | {"model": model}
            assert (await client.post("/v1/chat/completions", json=body, headers=BEARER)).status_code == 200, model
        assert (await client.post("/generate", json=GENERATE, headers=BEARER)).status_code == 200
        num_requests = len(engine.requests)
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/invocations"):
            body = CHAT | {"model": "other", "prompt": "hi", "input": "hi"}
            answer = await client.post(path, json=body, headers=BEARER)
            assert answer.status_code == 403, path
            assert "for the models my-llama. Given: 'other'" in answer.text
        twice = b'{"model": "my-llama", "model": "other", "messages": [{"role": "user", "content": "hi"}]}'
        headers = BEARER | {"content-type": "application/json"}
        assert (await client.post("/v1/chat/completions", content=twice, headers=headers)).status_code == 403
        assert len(engine.requests) == num_requests


async def test_a_key_for_another_model_gets_nothing_by_its_name(serve: Serve, keys: Path) -> None:
    engine = FakeEngine()
    settings = {"api_key_file": hold(keys, models=("other",)), "served_model_name": "my-llama"}
    async with serve(engine, **settings) as client:
        for model in ("other", "my-llama", "tgi"):
            answer = await client.post("/v1/chat/completions", json=CHAT | {"model": model}, headers=BEARER)
            assert answer.status_code == 403
        assert (await client.post("/generate", json=GENERATE, headers=BEARER)).status_code == 403
    assert not engine.requests


# Limits


@pytest.mark.parametrize("path", PATHS)
async def test_too_many_requests_of_a_key_are_told_when_to_come_back(serve: Serve, keys: Path, path: str) -> None:
    body = CHAT | {"model": "m"} if path != "/generate" else GENERATE
    async with serve(FakeEngine(), api_key_file=hold(keys, requests_per_minute=1)) as client:
        assert (await client.post(path, json=body, headers=BEARER)).status_code == 200
        answer = await client.post(path, json=body, headers=BEARER)
        assert answer.status_code == 429
        assert 55 <= int(answer.headers["retry-after"]) <= 61
        assert "at most 1 requests a minute with this API key" in answer.text
        error = answer.json()["error"]
        match path:
            case "/generate":
                assert answer.json()["error_type"] == "rate_limited"
            case "/v1/messages":
                assert error["type"] == "rate_limit_error"
            case _:
                assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert (await client.get("/health")).status_code == 200


async def test_requests_at_once_include_the_streams_that_run(serve: Serve, keys: Path) -> None:
    engine = FakeEngine(pause=0.05)
    async with serve(engine, api_key_file=hold(keys, max_concurrent_requests=1)) as client:
        running = asyncio.create_task(client.post("/generate_stream", json=GENERATE, headers=BEARER))

        async def is_running() -> bool:
            return bool(engine.tasks)

        await eventually(is_running, "a stream")
        assert (await client.post("/tokenize", json={"inputs": "hi"}, headers=BEARER)).status_code == 429
        assert (await running).status_code == 200
        assert (await client.post("/tokenize", json={"inputs": "hi"}, headers=BEARER)).status_code == 200


async def test_tokens_are_charged_as_usage_counts_them(serve: Serve, keys: Path) -> None:
    async with serve(FakeEngine(), api_key_file=hold(keys)) as client:
        await client.post("/generate", json=GENERATE, headers=BEARER)
        assert await tokens(client) == (3, 4)
        body = {"prompt": "hi", "n": 2, "max_tokens": 3, "temperature": 1}
        usage = (await client.post("/v1/completions", json=body, headers=BEARER)).json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 6)
        assert await tokens(client) == (6, 10)
        await client.post("/tokenize", json={"inputs": "hi"}, headers=BEARER)
        await client.post("/generate", json={"inputs": ""}, headers=BEARER)
        assert await tokens(client) == (6, 10)
        assert await metric(client, 'funitel_key_requests_total{key="team-a"}') == 4


async def test_tokens_that_are_not_left_are_refused_before_anything_runs(serve: Serve, keys: Path) -> None:
    engine = FakeEngine()
    async with serve(engine, api_key_file=hold(keys, tokens_per_minute=12)) as client:
        assert (await client.post("/generate", json=GENERATE, headers=BEARER)).status_code == 200  # takes 7
        for path in ("/generate", "/generate_stream"):
            answer = await client.post(path, json=GENERATE, headers=BEARER)
            assert answer.status_code == 429
            assert "at most 12 tokens a minute" in answer.text
            assert int(answer.headers["retry-after"]) >= 55
        small = {"inputs": "h", "parameters": {"max_new_tokens": 3}}
        assert (await client.post("/generate", json=small, headers=BEARER)).status_code == 200  # takes 5
        answer = await client.post("/tokenize", json={"inputs": "hi"}, headers=BEARER)
        assert answer.status_code == 429, "nothing is left"
    assert len(engine.requests) == 2


async def test_a1_a_text_beyond_the_context_is_charged_to_its_key(serve: Serve, keys: Path) -> None:
    async with serve(FakeEngine(), api_key_file=hold(keys, tokens_per_minute=10_000)) as client:
        body = {"inputs": "1" * 1_900_000, "parameters": {"max_new_tokens": 3}}
        answer = await client.post("/generate", json=body, headers=BEARER)
        assert answer.status_code == 422
        assert "Given: at least 1900000 `inputs` tokens" in answer.text
        assert (await tokens(client))[0] == 1_900_000
        assert (await client.post("/generate", json=GENERATE, headers=BEARER)).status_code == 429


async def test_a1_a_long_text_that_is_only_tokenized_is_charged(serve: Serve, keys: Path) -> None:
    async with serve(FakeEngine(), api_key_file=hold(keys)) as client:
        body = {"messages": [{"role": "user", "content": "sea " * 10_000}], "model": "any"}
        counted = (await client.post("/v1/messages/count_tokens", json=body, headers=BEARER)).json()["input_tokens"]
        assert counted > 40_000
        assert await tokens(client) == (counted, 0)


async def test_a_request_that_fails_pays_for_what_was_computed(serve: Serve, keys: Path) -> None:
    engine = FakeEngine(error=ShardFailed("rank 1 died"), fails_at=2)
    async with serve(engine, api_key_file=hold(keys)) as client:
        assert (await client.post("/generate", json=GENERATE, headers=BEARER)).status_code == 424
        assert await tokens(client) == (3, 2)
        engine.fails_at = 0
        await client.post("/generate", json=GENERATE, headers=BEARER)
        assert await tokens(client) == (3, 2), "nothing of it was begun"


async def test_what_is_stored_is_there_for_its_key_only(serve: Serve, keys: Path) -> None:
    async with serve(FakeEngine(), api_key="other", api_key_file=hold(keys)) as client:
        made = (await client.post("/v1/responses", json={"input": "Hi"}, headers=BEARER)).json()
        path, item = f"/v1/responses/{made['id']}", made["output"][0]["id"]
        other = {"x-api-key": "other"}
        for method, address in (("GET", path), ("GET", f"{path}/input_items"), ("DELETE", path)):
            answer = await client.request(method, address, headers=other)
            assert answer.status_code == 404
        gone_on = {"input": "And?", "previous_response_id": made["id"]}
        referring = {"input": [{"type": "item_reference", "id": item}, {"role": "user", "content": "And?"}]}
        for body in (gone_on, referring):
            for route in ("/v1/responses", "/v1/responses/input_tokens"):
                assert (await client.post(route, json=body, headers=other)).status_code == 400
                assert (await client.post(route, json=body, headers=BEARER)).status_code == 200
        assert (await client.get(path, headers=BEARER)).json() == made


ROUTES = {
    "/": GENERATE,
    "/generate": GENERATE,
    "/generate_stream": GENERATE,
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"model": "m", **CHAT},
    "/invocations": GENERATE,
    "/vertex": {"instances": [GENERATE]},
}


@pytest.mark.parametrize("share_prefixes", [False, True])
async def test_a2_every_route_finds_prefixes_of_its_own_key_only(
    share_prefixes: bool, serve: Serve, keys: Path
) -> None:
    engine = FakeEngine()
    settings = {"api_key": "other", "api_key_file": hold(keys), "share_prefixes": share_prefixes}
    async with serve(engine, **settings) as client:
        for path, body in ROUTES.items():
            owners = []
            for headers in (BEARER, {"x-api-key": "other"}):
                answer = await client.post(path, json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                owners.append(engine.requests[-1].cache_owner)
            assert (len(set(owners)) == 2, b"" in owners) == (not share_prefixes, share_prefixes), path
    engine = FakeEngine()
    async with serve(engine) as client:
        await client.post("/generate", json=GENERATE, headers=BEARER)
    assert engine.requests[-1].cache_owner == b"", "keys are not asked for"


async def test_a_revoked_key_is_out_within_seconds(serve: Serve, keys: Path) -> None:
    async with serve(FakeEngine(), api_key_file=hold(keys)) as client:
        assert (await client.post("/generate", json=GENERATE, headers=BEARER)).status_code == 200
        hold(keys, revoked=datetime(2026, 1, 1, tzinfo=UTC))

        async def is_out() -> bool:
            return (await client.post("/generate", json=GENERATE, headers=BEARER)).status_code == 401

        await eventually(is_out, "out")
