"""`--engine llama_cpp`: llama.cpp computes the demo model's GGUF behind the same router, and nothing else changes."""

import asyncio
import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from funitel_testing.clients import Answer, client_of, generate, stream
from funitel_testing.servers import Server, run_launcher, serving, wait_until

FLAGS = ("--engine", "llama_cpp", "--max-total-tokens", "1024", "--max-batch-total-tokens", "4096")
CHAT = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "Name three colours."}]
installed = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="the extra llama-cpp is not installed")


@pytest.fixture(scope="module")
def server(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), "--model-id", str(demo_model), *FLAGS) as server:
        yield server


async def _chat(client: httpx.AsyncClient, **fields: object) -> dict[str, object]:
    answer = await client.post(CHAT, json={"model": "tgi", "messages": QUESTION, "max_tokens": 24, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, object] = answer.json()["choices"][0]
    return found


def _running(server: Server) -> float:
    return server.metrics()["tgi_batch_current_size"]


@installed
async def test_a_chat_is_answered_with_log_probabilities_seeds_stops_and_schemas(server: Server) -> None:
    async with client_of(server.url) as client:
        await asyncio.to_thread(server.wait_log, "llama.cpp")
        plain = await _chat(client, temperature=0, logprobs=True, top_logprobs=3)
        text = str(plain["message"]["content"])  # type: ignore[index]
        assert len(text) > 10
        tokens = plain["logprobs"]["content"]  # type: ignore[index]
        assert all(each["logprob"] <= 0 and len(each["top_logprobs"]) == 3 for each in tokens)
        assert all(each["token"] == each["top_logprobs"][0]["token"] for each in tokens), "it is greedy"
        drawn = [await _chat(client, temperature=1.5, seed=seed) for seed in (1, 1, 2)]
        assert drawn[0]["message"] == drawn[1]["message"] != drawn[2]["message"]
        stop = text[5:8]
        stopped = await _chat(client, temperature=0, stop=[stop])
        assert stopped["message"]["content"] == text[: text.index(stop)]  # type: ignore[index]
        assert stopped["finish_reason"] == "stop"
        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["red", "green"]}}}
        kept = await _chat(client, temperature=1.0, seed=3, response_format=schema)
        assert kept["message"]["content"] in ('"red"', '"green"')  # type: ignore[index]


@installed
async def test_eight_streams_run_beside_each_other(server: Server) -> None:
    async with client_of(server.url) as client:
        prompts = [f"Here are {count} things that begin with a letter:" for count in range(2, 10)]
        asked = [asyncio.create_task(stream(client, prompt, max_new_tokens=40)) for prompt in prompts]
        await asyncio.to_thread(wait_until, lambda: _running(server) == 8, 30)
        answers = await asyncio.gather(*asked)
        assert all(len(answer.instants) > 5 for answer in answers), "tokens come one by one"
        assert len({answer.text for answer in answers}) > 1


@installed
async def test_a_client_that_leaves_frees_its_room(server: Server) -> None:
    async with client_of(server.url) as client:
        await asyncio.to_thread(wait_until, lambda: _running(server) == 0, 5)
        used = _used(server)
        answer = await stream(client, "Once upon a time", leave_after=3, max_new_tokens=900)
        assert len(answer.ids) == 3
        await asyncio.to_thread(wait_until, lambda: _running(server) == 0, 5)
        assert _used(server) <= used
        again = await asyncio.gather(*(generate(client, "One two three", max_new_tokens=8) for _ in range(4)))
        assert len({each.text for each in again}) == 1


def _used(server: Server) -> float:
    return server.metrics()['funitel_blocks{state="used"}']


async def _ask(client: httpx.AsyncClient, index: int) -> Answer:
    sampled = {"do_sample": True, "seed": index} if index % 2 else {}
    return await stream(client, f"{index} bottles of beer on the wall,", max_new_tokens=60, **sampled)


@installed
async def test_streams_outlive_the_shard(server: Server) -> None:
    async with client_of(server.url) as client:
        asking = [asyncio.create_task(_ask(client, index)) for index in range(6)]
        await asyncio.to_thread(wait_until, lambda: _running(server) == 6, 30)
        (victim,) = server.shard_pids()
        os.kill(victim, signal.SIGKILL)
        answers = await asyncio.wait_for(asyncio.gather(*asking), 180)
        assert all(1 < len(answer.ids) <= 60 for answer in answers)
        assert server.metrics().get("funitel_replica_returns_total") == 1
        assert server.shard_pids() != [victim]
        assert (await generate(client, "One two three", max_new_tokens=4)).ids
    assert "Traceback" not in server.log.read_text()


@pytest.mark.skipif(find_spec("llama_cpp") is not None, reason="the extra llama-cpp is installed")
def test_without_the_extra_one_line_says_which(demo_model: Path) -> None:
    ended = run_launcher("--model-id", str(demo_model), "--engine", "llama_cpp")
    assert ended.code == 1
    assert "pip install 'funitel[llama-cpp]'" in ended.last_line
