"""The routes for requests that run, over an engine that follows a script."""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, Serve, eventually

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 50}
SLOW = {"pieces": ("word ",) * 40, "pause": 0.05}


async def record(client: httpx.AsyncClient, **headers: str) -> dict[str, Any]:
    """The one request that runs, once it has tokens."""
    found: list[dict[str, Any]] = []

    async def runs() -> bool:
        answer = await client.get("/v1/requests", headers=headers)
        assert answer.status_code == 200, answer.text
        found[:] = answer.json()["data"]
        return bool(found) and found[0]["tokens"] > 0

    await eventually(runs, "a request runs")
    assert len(found) == 1
    return found[0]


ASKS: tuple[tuple[str, dict[str, Any], Any], ...] = (
    ("/v1/chat/completions", CHAT, lambda body: body["choices"][0]["finish_reason"]),
    ("/v1/completions", {"prompt": "x", "max_tokens": 50}, lambda body: body["choices"][0]["finish_reason"]),
    (
        "/generate",
        {"inputs": "x", "parameters": {"details": True, "max_new_tokens": 50}},
        lambda body: body["details"]["finish_reason"],
    ),
    ("/v1/responses", {"input": "x"}, lambda body: {"incomplete": "abort"}[body["status"]]),
    (
        "/v1/messages",
        {**CHAT, "model": "m"},
        lambda body: {"max_tokens": "abort", "model_context_window_exceeded": "abort"}[body["stop_reason"]],
    ),
)


@pytest.mark.parametrize(("path", "body", "reason"), ASKS)
async def test_an_aborted_request_is_answered_up_to_there(serve: Serve, path: str, body: Any, reason: Any) -> None:
    engine = FakeEngine(**SLOW)
    async with serve(engine) as client:
        asking = asyncio.create_task(client.post(path, json=body, headers={"x-request-id": "mine"}))
        running = await record(client)
        assert running["id"] == "mine"
        assert (running["object"], running["state"], running["choices"]) == ("request", "running", 1)
        answer = await client.delete("/v1/requests/mine")
        assert (answer.status_code, answer.json()) == (
            200,
            {"object": "request.aborted", "id": "mine", "aborted": True},
        )
        answered = await asking
        assert answered.status_code == 200, answered.text
        assert reason(answered.json()) == "abort"
        assert "word " in answered.text
        assert len(engine.cancelled) == 1
        assert (await client.get("/v1/requests")).json() == {"object": "list", "data": []}
        lines = (await client.get("/metrics")).text.splitlines()
        assert "tgi_request_success 0.0" in lines
        assert [line for line in lines if line.startswith("tgi_request_failure{")] == [
            'tgi_request_failure{err="aborted"} 1.0'
        ]
        assert "tgi_request_duration_count 0.0" in lines


async def test_a_stream_is_ended_with_a_finish_reason(serve: Serve) -> None:
    async with serve(FakeEngine(**SLOW)) as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | {"stream": True, "n": 2}))
        running = await record(client)
        assert running["choices"] == 2
        assert (await client.delete(f"/v1/requests/{running['response_id']}")).status_code == 200
        lines = [line[6:] for line in (await asking).text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        chunks = [json.loads(line) for line in lines[:-1]]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        last = {choice["index"]: choice["finish_reason"] for choice in choices}
        assert last == {0: "abort", 1: "abort"}
        assert [choice["finish_reason"] for choice in choices].count("abort") == 2
        assert {chunk["id"] for chunk in chunks} == {running["response_id"]}


async def test_a_native_stream_is_ended_with_its_details(serve: Serve) -> None:
    async with serve(FakeEngine(**SLOW)) as client:
        body = {"inputs": "x", "parameters": {"details": True, "max_new_tokens": 50}}
        asking = asyncio.create_task(client.post("/generate_stream", json=body, headers={"x-request-id": "s"}))
        await record(client)
        assert (await client.delete("/v1/requests/s")).status_code == 200
        lines = [line[5:] for line in (await asking).text.splitlines() if line.startswith("data:")]
        last = json.loads(lines[-1])
        assert last["details"]["finish_reason"] == "abort"
        assert last["details"]["generated_tokens"] == len(lines) - 1
        assert last["token"] == {"id": 0, "text": "", "logprob": None, "special": True}


@pytest.mark.parametrize(
    ("method", "path"),
    [("DELETE", "/v1/requests/x"), ("POST", "/v1/requests/x/pause"), ("POST", "/v1/requests/x/resume")],
)
async def test_an_unknown_id_is_not_found(client: httpx.AsyncClient, method: str, path: str) -> None:
    answer = await client.request(method, path)
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["message"] == "no request with id 'x' runs"


async def test_a_key_has_its_own_requests_unless_its_scope_names_these_routes(serve: Serve, tmp_path: Path) -> None:
    def line(name: str, **scopes: Any) -> str:
        digest = hashlib.sha256(name.encode()).hexdigest()
        return json.dumps({"name": name, "sha256": digest, "created": "2026-01-01T00:00:00Z"} | scopes)

    path = tmp_path / "keys"
    path.write_text("\n".join([line("one"), line("other"), line("operator", routes=["/v1/requests*"])]))
    path.chmod(0o600)
    heads = {name: {"authorization": f"Bearer {name}"} for name in ("one", "other", "operator")}
    async with serve(FakeEngine(**SLOW), api_key_file=str(path)) as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT, headers=heads["one"]))
        running = await record(client, **heads["one"])
        assert running["key"] == "one"
        assert (await client.get("/v1/requests", headers=heads["other"])).json()["data"] == []
        url = f"/v1/requests/{running['id']}"
        assert (await client.delete(url, headers=heads["other"])).status_code == 404
        assert (await client.delete(url)).status_code == 401
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=heads["operator"])).status_code == 403
        assert (await record(client, **heads["operator"]))["id"] == running["id"]
        assert (await client.delete(url, headers=heads["operator"])).status_code == 200
        assert (await asking).json()["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize(("method", "action"), [("DELETE", ""), ("POST", "/pause"), ("POST", "/resume")])
async def test_a_request_of_a_batch_is_changed_with_its_batch_only(
    serve: Serve, tmp_path: Path, method: str, action: str
) -> None:
    async with serve(FakeEngine(**SLOW), batch_dir=str(tmp_path / "b")) as client:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
        given = {"files": {"file": ("in.jsonl", json.dumps(line).encode())}, "data": {"purpose": "batch"}}
        file_id = (await client.post("/v1/files", **given)).json()["id"]
        body = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "1h"}
        batch = (await client.post("/v1/batches", json=body)).json()
        running = await record(client)
        answer = await client.request(method, f"/v1/requests/{running['id']}{action}")
        assert answer.status_code == 400, answer.text
        said = f"request '{running['id']}' is one of a batch: only the batch can be changed, which `POST"
        assert said in answer.json()["error"]["message"]
        assert (await record(client))["state"] == "running"
        assert (await client.post(f"/v1/batches/{batch['id']}/cancel")).status_code == 200


SCORED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", CHAT | {"prompt_logprobs": 2}),
    ("/v1/completions", {"prompt": "x", "prompt_logprobs": 2}),
    ("/v1/completions", {"prompt": "x", "echo": True, "logprobs": 2}),
    ("/v1/completions", {"prompt": "x", "echo": True, "logprobs": 2, "stream": True}),
    ("/v1/completions", {"prompt": "x", "echo": True, "logprobs": 2, "prompt_logprobs": 2}),
)


@pytest.mark.parametrize(("path", "body"), SCORED)
async def test_a_request_aborted_before_its_first_token_has_no_scores_of_its_prompt(
    serve: Serve, path: str, body: dict[str, Any]
) -> None:
    async with serve(FakeEngine(pause=60)) as client:
        asking = asyncio.create_task(client.post(path, json=body, headers={"x-request-id": "mine"}))

        async def runs() -> bool:
            return bool((await client.get("/v1/requests")).json()["data"])

        await eventually(runs, "a request runs")
        assert (await client.delete("/v1/requests/mine")).status_code == 200
        answer = await asking
    assert answer.status_code == 200, answer.text
    text = answer.text.split("\n")[0].removeprefix("data: ") if body.get("stream") else answer.text
    (choice,) = json.loads(text)["choices"]
    assert choice["finish_reason"] == "abort"
    assert "prompt_logprobs" not in answer.text
    if body.get("echo"):
        assert choice["text"] == "x"
        assert choice["logprobs"]["tokens"] == []
