"""Structured output from outside: whatever a random model writes follows its schema, streamed or not."""

import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from funitel_testing.clients import client_of
from funitel_testing.schemas import SCHEMAS

MAX_NEW_TOKENS = 400
AT_ONCE = 16
VALIDATOR = jsonschema.Draft202012Validator


def parameters(name: str, seed: int) -> dict[str, Any]:
    grammar = {"type": "json_schema", "value": {"name": "answer", "schema": SCHEMAS[name]}}
    if "properties" in SCHEMAS[name] and seed % 2:
        grammar = {"type": "json", "value": SCHEMAS[name]}
    return {
        "grammar": grammar,
        "do_sample": True,
        "temperature": 1.5,
        "seed": seed,
        "max_new_tokens": MAX_NEW_TOKENS,
        "details": True,
    }


async def ask(client: httpx.AsyncClient, name: str, seed: int) -> dict[str, Any]:
    body = {"inputs": f"Schema {name}:", "parameters": parameters(name, seed)}
    response = await client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def is_whole(name: str, answer: dict[str, Any]) -> bool:
    """Whether an answer was not cut off; one that was not must be valid."""
    if answer["details"]["finish_reason"] == "length":
        return False
    checker = VALIDATOR.FORMAT_CHECKER
    jsonschema.validate(json.loads(answer["generated_text"]), SCHEMAS[name], cls=VALIDATOR, format_checker=checker)
    return True


@pytest.mark.parametrize("num_shard", [2, 1])
async def test_every_answer_that_ends_follows_its_schema(
    num_shard: int, launch: Any, tiny_model: Path, is_full: bool, figures: dict[str, object]
) -> None:
    server = launch("--model-id", str(tiny_model), "--num-shard", str(num_shard), "--dtype", "float32")
    seeds = range(10 if num_shard == 1 or is_full else 1)
    places = asyncio.Semaphore(AT_ONCE)
    async with client_of(server.url) as client:

        async def one(name: str, seed: int) -> bool:
            async with places:
                return is_whole(name, await ask(client, name, seed))

        whole = await asyncio.gather(*(one(name, seed) for name in SCHEMAS for seed in seeds))
    assert whole.count(False) < 0.02 * len(whole)
    figures[f"3 JSON schema answers valid, {num_shard} shard(s)"] = (
        f"{whole.count(True)} of {len(whole)}, {whole.count(False)} cut off, none invalid"
    )


async def test_every_token_of_a_forced_span_is_an_event_of_its_own(launch: Any, tiny_model: Path) -> None:
    server = launch("--model-id", str(tiny_model), "--num-shard", "1", "--dtype", "float32")
    async with client_of(server.url) as client:
        whole = await ask(client, "refs", 4)
        body = {"inputs": "Schema refs:", "parameters": parameters("refs", 4)}
        response = await client.post("/generate_stream", json=body)
    events = [json.loads(line[5:]) for line in response.text.splitlines() if line.startswith("data:")]
    tokens = [token["id"] for token in whole["details"]["tokens"]]
    assert [event["token"]["id"] for event in events] == tokens
    assert [event["index"] for event in events] == list(range(1, len(tokens) + 1))
    assert events[-1]["generated_text"] == whole["generated_text"]
    assert all(event["generated_text"] is None for event in events[:-1])


async def test_a_grammar_bomb_slows_nobody_down(launch: Any, tiny_model: Path) -> None:
    server = launch("--model-id", str(tiny_model), "--num-shard", "1", "--dtype", "float32")
    # Over 30 s where objects of 8000 properties, the former bomb, took 4 to 6: as long as the limit.
    bomb = {"type": "array", "prefixItems": [{"type": "integer", "multipleOf": 10007 + i} for i in range(400)]}
    parameters = {"grammar": {"type": "json", "value": bomb}, "max_new_tokens": 5}
    async with client_of(server.url) as client:
        refused = asyncio.create_task(client.post("/generate", json={"inputs": "a", "parameters": parameters}))
        slowest = 0.0
        while not refused.done():
            begin = time.monotonic()
            assert (await client.get("/health")).status_code == 200
            slowest = max(slowest, time.monotonic() - begin)
        answer = await refused
    assert answer.status_code == 422
    assert answer.json()["error"].endswith("grammar is not valid: it takes more than 5 s to compile")
    assert slowest < 1.0


async def test_a_grammar_costs_little_time_per_token(
    launch: Any, demo_model: Path, is_full: bool, figures: dict[str, object]
) -> None:
    """With spans off, every token is computed; the rest is the mask."""
    if not is_full:
        pytest.skip("times a model: --full")
    server = launch("--model-id", str(demo_model), "--disable-forced-spans")
    async with client_of(server.url) as client:

        async def seconds_per_token(**more: Any) -> float:
            body = {"inputs": "A person:", "parameters": {"max_new_tokens": 60, "details": True} | more}
            begin = time.monotonic()
            answer = (await client.post("/generate", json=body)).json()
            return (time.monotonic() - begin) / len(answer["details"]["tokens"])

        prose = {"type": "regex", "value": "([A-Za-z]{1,12} ){60}"}
        names = {"type": "array", "minItems": 12, "items": {"type": "string", "minLength": 3, "maxLength": 12}}
        schema = {"type": "object", "properties": {"names": names}, "required": ["names"]}
        kinds = {"prose": prose, "schema": {"type": "json", "value": schema}}
        rounds = [
            [await seconds_per_token(), *[await seconds_per_token(grammar=grammar) for grammar in kinds.values()]]
            for _ in range(12)
        ]
    slowdowns = []
    for place, name in enumerate(kinds, start=1):
        slowdowns.append(statistics.median(times[place] / times[0] for times in rounds[2:]) - 1)
        figures[f"3 median slowdown per token by a grammar, spans off: {name}"] = f"{slowdowns[-1]:.1%}"
    assert max(slowdowns) < 0.1
