"""The step API over an engine with a made-up model, whose tokens depend on all tokens before them."""

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines import request
from fake_shards import fake_shards, next_token
from fakes import FakeEngine, Serve, byte_tokenizer

from funitel.proto.step import FinishReason, GeneratedText, Generation, Tokens
from funitel.router.connect import connect
from funitel.router.serving import step_queries

START = 256


@asynccontextmanager
async def stepping(serve: Serve, folder: Path, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A router over one fake shard with an engine of its own."""
    async with fake_shards(folder, 1, pool_tokens=4000):
        chosen = {"master_shard_uds_path": f"{folder}/shard-0"} | settings
        async with serve(FakeEngine(), connect=connect, **chosen) as client:
            yield client


async def posted(client: httpx.AsyncClient, path: str, body: Any, **headers: str) -> Any:
    answer = await client.post(f"/v1/steps/{path}", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def add(client: httpx.AsyncClient, inputs: str, max_new_tokens: int, **headers: str) -> int:
    body = {"inputs": inputs, "parameters": {"max_new_tokens": max_new_tokens}}
    query_id = (await posted(client, "queries", body, **headers))["id"]
    assert isinstance(query_id, int)
    return query_id


async def advance(client: httpx.AsyncClient, texts: dict[int, list[int]], body: Any = None) -> list[int]:
    """One step with the tokens that sampling chose; the ids of the queries that had a result."""
    results = (await posted(client, "infer", body or {}))["data"]
    chosen = [{name: each[name] for name in ("id", "token_id", "is_end")} for each in results]
    await posted(client, "commit", {"tokens": chosen})
    for each in results:
        texts.setdefault(each["id"], []).append(each["token_id"])
    return [each["id"] for each in results]


def alone(inputs: str, count: int) -> list[int]:
    tokens = [START, *byte_tokenizer().encode(inputs, add_special_tokens=False).ids]
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[-count:]


async def test_i17_queries_that_join_and_leave_are_what_they_are_alone(serve: Serve, tmp_path: Path) -> None:
    async with stepping(serve, tmp_path) as client:
        texts: dict[int, list[int]] = {}
        first, leaving = await add(client, "first", 9), await add(client, "leaves", 9)
        for _ in range(3):
            assert await advance(client, texts) == [first, leaving]
        joining = await add(client, "joins", 4)
        answer = await client.delete(f"/v1/steps/queries/{leaving}")
        assert answer.json() == {"object": "step.query.removed", "id": leaving, "removed": True}
        assert (await client.delete(f"/v1/steps/queries/{leaving}")).status_code == 404
        assert await advance(client, texts, {"ids": [joining]}) == [joining]
        while await advance(client, texts):
            pass
        assert texts == {first: alone("first", 9), leaving: alone("leaves", 3), joining: alone("joins", 4)}
        whole = {"prompt": "first", "max_tokens": 9, "return_token_ids": True}
        answer = await client.post("/v1/completions", json=whole)
        assert answer.json()["choices"][0]["token_ids"] == texts[first]


async def test_i17_a_step_computes_256_tokens_and_a_longer_prompt_takes_several(serve: Serve, tmp_path: Path) -> None:
    prompts = ["x" * 150, "y" * 150, "z" * 100]  # and a start token each
    async with stepping(serve, tmp_path) as client:
        texts: dict[int, list[int]] = {}
        first, second, third = [await add(client, prompt, 4) for prompt in prompts]
        steps = [await advance(client, texts) for _ in range(3)]
        assert steps == [[first], [first, second, third], [first, second, third]]
        assert texts == {first: alone(prompts[0], 3), second: alone(prompts[1], 2), third: alone(prompts[2], 2)}


async def test_i17_the_client_chooses_the_token(serve: Serve, tmp_path: Path) -> None:
    async with stepping(serve, tmp_path) as client:
        query = await add(client, "choose", 9)
        first = await posted(client, "infer", {})
        assert first["data"][0]["token_id"] == alone("choose", 1)[0]
        assert first["data"][0].keys() == {"id", "token_id", "text", "logprob", "candidates", "is_end"}
        assert await posted(client, "infer", {}) == first  # not committed: the same again
        (chosen,) = byte_tokenizer().encode("A", add_special_tokens=False).ids
        tokens = [{"id": query, "token_id": chosen}]
        answer = await posted(client, "commit", {"tokens": tokens})
        assert answer == {"object": "step.commit", "committed": 1, "queries": 1}
        after = (await posted(client, "infer", {}))["data"][0]
        assert after["token_id"] == alone("chooseA", 1)[0]
        last = [{"id": query, "token_id": after["token_id"], "is_end": True}]
        assert (await posted(client, "commit", {"tokens": last}))["queries"] == 0
        assert (await posted(client, "infer", {}))["data"] == []


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("infer", {"ids": [7]}, "there is no query 7"),
        ("commit", {"tokens": [{"id": 1, "token_id": 5}]}, "query 1 has no result to commit a token for"),
        ("commit", {"tokens": [{"id": 1, "token_id": 5}] * 2}, "at most one token of a query"),
        ("queries", {"inputs": "x", "parameters": {"best_of": 2}}, "`best_of` is not for a query"),
        ("queries", {"inputs": "x", "parameters": {"details": True}}, "`details` is not for a query"),
        ("queries", {"inputs": "x", "parameters": {"do_sample": True, "mirostat": 2}}, "mirostat must be 0"),
    ],
)
async def test_what_is_refused(client: httpx.AsyncClient, path: str, body: Any, says: str) -> None:
    await add(client, "there", 5)
    answer = await client.post(f"/v1/steps/{path}", json=body)
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]["message"]


async def test_a_token_beyond_the_vocabulary_is_refused(client: httpx.AsyncClient) -> None:
    query = await add(client, "there", 5)
    await posted(client, "infer", {})
    answer = await client.post("/v1/steps/commit", json={"tokens": [{"id": query, "token_id": 258}]})
    assert (answer.status_code, "within 0..257, given 258" in answer.text) == (400, True)


async def test_queries_are_bounded_in_number_and_in_idle_time(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 17):
        assert await add(client, "x", 5) == number
    answer = await client.post("/v1/steps/queries", json={"inputs": "x"})
    assert (answer.status_code, "at most 16 queries" in answer.text) == (429, True)
    monkeypatch.setattr(step_queries, "IDLE_SECONDS", -1.0)
    assert await add(client, "x", 5) == 17


async def test_queries_belong_to_the_key_that_made_them(serve: Serve, tmp_path: Path) -> None:
    def line(name: str) -> str:
        digest = hashlib.sha256(name.encode()).hexdigest()
        return json.dumps({"name": name, "sha256": digest, "created": "2026-01-01T00:00:00Z"})

    path = tmp_path / "keys"
    path.write_text(line("one") + "\n" + line("other"))
    path.chmod(0o600)
    async with serve(FakeEngine(), api_key_file=str(path)) as client:
        one, other = ({"authorization": f"Bearer {name}"} for name in ("one", "other"))
        query = await add(client, "mine", 5, **one)
        assert (await posted(client, "infer", {}, **other))["data"] == []
        assert (await client.delete(f"/v1/steps/queries/{query}", headers=other)).status_code == 404
        assert len((await posted(client, "infer", {}, **one))["data"]) == 1
        assert (await client.delete(f"/v1/steps/queries/{query}", headers=one)).status_code == 200
        assert (await client.post("/v1/steps/infer", json={})).status_code == 401


def test_an_aborted_step_leaves_a_query_as_it_was() -> None:
    table = step_queries.QueryTable()
    query = table.add(request(prompt_len=4, max_new_tokens=3))
    planned = table.plan()
    aborted = Generation(0, Tokens((), (), ()), (), finished=GeneratedText("", 0, FinishReason.ABORT))
    assert table.settle(planned, [aborted]) == []
    (again,) = table.plan()
    assert (again.query_id, again.request) == (query, planned[0].request)
    table.remove(query)
    assert table.settle([again], [Generation(0, Tokens((5,), (-1.0,), ("x",)))]) == []
