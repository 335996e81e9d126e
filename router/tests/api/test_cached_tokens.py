"""What clients read of the prefix cache, and the salt that parts them, on every route that has a word for it."""

import json
from typing import Any

import httpx
import pytest
from fakes import FakeEngine

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("path", "body", "details"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}, "prompt_tokens_details"),
        ("/v1/chat/completions", {"messages": MESSAGES, "n": 2}, "prompt_tokens_details"),
        ("/v1/completions", {"prompt": "Once upon"}, "prompt_tokens_details"),
        ("/v1/responses", {"input": "Hi"}, "input_tokens_details"),
    ],
)
async def test_usage_says_what_was_not_computed_again(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any], details: str
) -> None:
    engine.num_cached_tokens = 16
    answer = (await client.post(path, json=body)).json()
    assert answer["usage"][details]["cached_tokens"] == 16


@pytest.mark.parametrize(
    ("path", "body", "details"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}, "prompt_tokens_details"),
        ("/v1/completions", {"prompt": "Once upon"}, "prompt_tokens_details"),
        ("/v1/responses", {"input": "Hi"}, "input_tokens_details"),
    ],
)
async def test_usage_says_where_tokens_were_found(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any], details: str
) -> None:
    engine.num_cached_tokens, engine.cached_by_tier = 48, {"memory": 16, "disk": 32}
    found = (await client.post(path, json=body)).json()["usage"][details]
    assert (found["cached_tokens"], found["cached_tokens_by_tier"]) == (48, {"memory": 16, "disk": 32})


async def test_several_prompts_add_up(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.num_cached_tokens, engine.cached_by_tier = 48, {"memory": 16, "host": 32}
    answer = (await client.post("/v1/completions", json={"prompt": ["a b", "c d"], "n": 2})).json()
    found = answer["usage"]["prompt_tokens_details"]
    assert found == {"cached_tokens": 96, "cached_tokens_by_tier": {"memory": 32, "host": 64}}


async def test_native_details_have_both(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = {"inputs": "Hi", "parameters": {"details": True}}
    assert "cached_tokens" not in (await client.post("/generate", json=body)).json()["details"]
    engine.num_cached_tokens, engine.cached_by_tier = 48, {"memory": 16, "disk": 32}
    found = (await client.post("/generate", json=body)).json()["details"]
    assert (found["cached_tokens"], found["cached_tokens_by_tier"]) == (48, {"memory": 16, "disk": 32})


async def test_the_last_chunk_says_it_too(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.num_cached_tokens = 16
    body = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
    events = (await client.post("/v1/chat/completions", json=body)).text.split("\n\n")
    usage = json.loads(events[-3].removeprefix("data: "))["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"inputs": "Hi", "parameters": {"cache_salt": "mine"}}),
        ("/v1/chat/completions", {"messages": MESSAGES, "cache_salt": "mine"}),
        ("/v1/completions", {"prompt": "Hi", "cache_salt": "mine"}),
    ],
)
async def test_the_salt_reaches_the_engine_and_is_bounded(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    assert (await client.post(path, json=body)).status_code == 200
    assert engine.requests[-1].cache_salt == "mine"
    await client.post(path, json=json.loads(json.dumps(body).replace('"mine"', "null")))
    assert engine.requests[-1].cache_salt == ""
    refused = await client.post(path, json=json.loads(json.dumps(body).replace("mine", "m" * 257)))
    assert refused.status_code in (400, 422)
    assert "cache_salt" in refused.text
