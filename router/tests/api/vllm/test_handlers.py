"""vLLM's `/tokenize`, `/detokenize`, `/version` and `/load`, and the bounds of log-probabilities."""

import asyncio
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, Serve, byte_tokenizer, eventually

CHAT = [{"role": "user", "content": "Hi é"}]
PROMPT = "[user]Hi é\n[assistant]"
START = 256


def ids_of(text: str) -> list[int]:
    return list(byte_tokenizer().encode(text, add_special_tokens=False).ids)


async def posted(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("more", [{}, {"model": "any"}, {"add_special_tokens": True}])
async def test_b7_tokens_of_a_prompt(client: httpx.AsyncClient, more: dict[str, Any]) -> None:
    answer = await posted(client, "/tokenize", prompt="Hi é", **more)
    ids = [START, *ids_of("Hi é")]
    assert answer == {"count": len(ids), "max_model_len": 200, "tokens": ids, "token_strs": None}


async def test_b7_tokens_as_they_are_spelt(client: httpx.AsyncClient) -> None:
    answer = await posted(client, "/tokenize", prompt="Hi é", add_special_tokens=False, return_token_strs=True)
    assert answer["tokens"] == ids_of("Hi é")
    assert answer["token_strs"] == ["H", "i", "Ġ", "Ã", "©"]
    assert (await posted(client, "/tokenize", prompt="", add_special_tokens=False))["tokens"] == []


async def test_b7_tokens_of_a_chat(client: httpx.AsyncClient) -> None:
    answer = await posted(client, "/tokenize", messages=CHAT)
    assert answer["tokens"] == ids_of(PROMPT)
    assert (answer["count"], answer["max_model_len"]) == (len(ids_of(PROMPT)), 200)
    bare = await posted(client, "/tokenize", messages=CHAT, add_generation_prompt=False, return_token_strs=True)
    assert bare["tokens"] == ids_of("[user]Hi é\n")
    assert len(bare["token_strs"]) == bare["count"]
    started = await posted(client, "/tokenize", messages=CHAT, add_special_tokens=True)
    assert started["tokens"] == [START, *ids_of(PROMPT)]


async def test_b7_tgis_own_body_has_its_own_answer(client: httpx.AsyncClient) -> None:
    answer = await posted(client, "/tokenize", inputs="Hi")
    assert [token["id"] for token in answer] == [START, *ids_of("Hi")]
    both = await posted(client, "/tokenize", inputs="Hi", prompt="Ho")
    assert both == answer


async def test_b7_tokens_become_text_again(client: httpx.AsyncClient) -> None:
    answer = await posted(client, "/detokenize", model="any", tokens=[START, *ids_of("Hi é")])
    assert answer == {"prompt": "<s>Hi é"}
    assert await posted(client, "/detokenize", tokens=[]) == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/tokenize", {}, "inputs"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": ["Hi"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "Hi", "add_special_tokens": "yes"}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "Hi"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [258]}, "`tokens` must be ids >= 0 and < 258. Given: 258"),
        ("/detokenize", {"tokens": [1] * 201}, "`tokens` must be at most 200. Given: 201"),
    ],
)
async def test_b7_what_is_refused(client: httpx.AsyncClient, path: str, body: Any, says: str) -> None:
    response = await client.post(path, json=body)
    assert response.status_code == 422
    assert says in response.json()["error"]


async def test_b7_the_version(client: httpx.AsyncClient) -> None:
    (version,) = (await client.get("/version")).json().items()
    assert version == ("version", (await client.get("/info")).json()["version"])


async def test_b7_the_load(serve: Serve) -> None:
    engine = FakeEngine(pause=60)
    async with serve(engine) as client:
        assert (await client.get("/load")).json() == {"server_load": 0}
        running = [asyncio.create_task(client.post("/generate", json={"inputs": "Hi"})) for _ in range(2)]

        async def are_both_there() -> bool:
            return bool((await client.get("/load")).json() == {"server_load": 2})

        await eventually(are_both_there, "a load of 2")
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_b7_models_tell_their_length(client: httpx.AsyncClient) -> None:
    (listed,) = (await client.get("/v1/models")).json()["data"]
    assert listed["max_model_len"] == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi", "logprobs": 20, "echo": True}),
        ("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 20}),
        (
            "/v1/responses",
            {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 20},
        ),
    ],
)
async def test_b7_twenty_likeliest_tokens(serve: Serve, path: str, body: dict[str, Any]) -> None:
    engine = FakeEngine()
    async with serve(engine) as client:
        assert (await client.post(path, json=body)).status_code == 200
    assert engine.requests[0].top_n_tokens == 20
    async with serve(FakeEngine(), max_logprobs=7) as client:
        response = await client.post(path, json=body)
        assert response.status_code in (400, 422)
        assert "7" in response.text


async def test_b7_native_routes_keep_tgis_bound(client: httpx.AsyncClient) -> None:
    body = {"inputs": "Hi", "parameters": {"details": True, "top_n_tokens": 6}}
    response = await client.post("/generate", json=body)
    assert response.status_code == 422
    assert "<= 5. Given: 6" in response.json()["error"]
