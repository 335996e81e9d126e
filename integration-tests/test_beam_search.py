"""Beam search against a running server: the answers of transformers, over every route, in company, after a crash."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from funitel_testing.beam_oracle import BeamOracle, Found, some_prompts, with_ends
from funitel_testing.clients import client_of, stream
from funitel_testing.servers import Server, serving

# A pool for two searches of four beams or so, and prompts in chunks of at most 24 tokens.
LIMITS = (
    *("--max-input-tokens", "64", "--max-total-tokens", "160", "--max-best-of", "4"),
    *("--max-batch-total-tokens", "480", "--max-batch-prefill-tokens", "24"),
)
PROMPTS = some_prompts(20, 200)
ENDS = list(range(100, 130))
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_ends(tiny_model, tmp_path_factory.mktemp("ending") / "model", ENDS)


@pytest.fixture(scope="module")
def beams(folder: Path) -> BeamOracle:
    return BeamOracle(folder)


def flags(folder: Path, *more: str) -> tuple[str, ...]:
    return ("--model-id", str(folder), "--dtype", "float32", *LIMITS, *more)


async def search(client: httpx.AsyncClient, prompt: Any, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "use_beam_search": True, "max_tokens": MAX_TOKENS, "return_token_ids": True} | fields
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def ids_of(answer: dict[str, Any]) -> list[tuple[int, ...]]:
    return [tuple(choice["token_ids"]) for choice in answer["choices"]]


def wanted_ids(found: list[Found]) -> list[tuple[int, ...]]:
    return [each.ids for each in found]


async def _together(client: httpx.AsyncClient, **fields: Any) -> list[list[tuple[int, ...]]]:
    return [ids_of(each) for each in await asyncio.gather(*(search(client, prompt, **fields) for prompt in PROMPTS))]


async def _left(server: Server) -> float:
    """Tokens of the pool in use, once nothing is running."""
    for _ in range(100):
        used = server.metrics()['funitel_blocks{state="used"}']
        if not used:
            break
        await asyncio.sleep(0.05)
    return used


@pytest.mark.parametrize("num_shard", [1, 2])
async def test_beam_search_is_that_of_transformers_in_company_preempted_and_after_a_crash(
    folder: Path, beams: BeamOracle, tmp_path: Path, num_shard: int
) -> None:
    options: list[dict[str, Any]] = [
        {"n": 4, "length_penalty": 2.0, "early_stopping": "never"},
        {"n": 2, "best_of": 4, "length_penalty": 0.0, "early_stopping": True},
        {"n": 2},
    ]
    with serving(tmp_path, *flags(folder, "--num-shard", str(num_shard))) as server:
        async with client_of(server.url) as client:
            alone = await stream(client, "Here are", max_new_tokens=60, seed=3, do_sample=True, ignore_eos=True)
            for each in options:
                penalties = {name: each[name] for name in ("length_penalty", "early_stopping") if name in each}
                width = each.get("best_of", each["n"])
                wanted = [
                    wanted_ids(beams.search(p, num_beams=width, max_new_tokens=MAX_TOKENS, **penalties))[: each["n"]]
                    for p in PROMPTS
                ]
                beside = stream(client, "Here are", max_new_tokens=60, seed=3, do_sample=True, ignore_eos=True)
                found, other = await asyncio.gather(_together(client, **each), beside)
                assert found == wanted
                assert other.ids == alone.ids
            assert server.metrics()["funitel_preempted_total"] > 0
            asking = asyncio.create_task(_together(client, **options[0], max_tokens=40))
            await asyncio.to_thread(server.wait_steps, 10)
            assert not asking.done()
            os.kill(server.shard_pids()[0], signal.SIGKILL)
            after = await asyncio.wait_for(asking, 120)
            assert after == await _together(client, **options[0], max_tokens=40)
            assert await _left(server) == 0
        assert "Traceback" not in server.log.read_text()


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with serving(tmp_path_factory.mktemp("server"), *flags(folder)) as server:
        yield server


async def test_every_route_gives_the_beams(server: Server, beams: BeamOracle) -> None:
    async with client_of(server.url) as client:
        answer = await search(client, "So it was", n=3, logprobs=2)
        prompt = answer["choices"][0]["prompt_token_ids"]
        wanted = beams.search(prompt, num_beams=3, max_new_tokens=MAX_TOKENS)
        assert ids_of(answer) == wanted_ids(wanted)
        assert answer["usage"]["completion_tokens"] == sum(len(each.ids) for each in wanted)
        for choice, each in zip(answer["choices"], wanted, strict=True):
            scores = choice["logprobs"]["token_logprobs"]
            assert sum(scores) / len(each.ids) == pytest.approx(each.score, abs=1e-4)
            assert all(len(top) in (2, 3) for top in choice["logprobs"]["top_logprobs"])
            assert choice["finish_reason"] == ("stop" if each.ids[-1] in ENDS else "length")
        parameters = {"use_beam_search": True, "best_of": 3, "max_new_tokens": MAX_TOKENS, "details": True}
        native = await client.post("/generate", json={"inputs": "So it was", "parameters": parameters})
        assert native.status_code == 200, native.text
        details = native.json()["details"]
        listed = [details, *details["best_of_sequences"]]
        assert [tuple(token["id"] for token in each["tokens"]) for each in listed] == wanted_ids(wanted)
        assert native.json()["generated_text"] == answer["choices"][0]["text"]
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-") as chats:
        messages: Any = [{"role": "user", "content": "So"}]
        body = {"use_beam_search": True, "length_penalty": 0.5}
        chat = await chats.chat.completions.create(
            model="tgi", messages=messages, n=2, max_tokens=8, logprobs=True, temperature=0, extra_body=body
        )
        assert len(chat.choices) == 2
        sums = [sum(t.logprob for t in c.logprobs.content) for c in chat.choices if c.logprobs and c.logprobs.content]
        assert len(sums) == 2


async def test_a_stop_string_ends_a_beam(server: Server) -> None:
    async with client_of(server.url) as client:
        free = await search(client, "So it was", n=2, ignore_eos=True)
        stop = free["choices"][0]["text"][2:4]
        stopped = await search(client, "So it was", n=2, ignore_eos=True, stop=[stop], early_stopping=True)
    assert any(choice["finish_reason"] == "stop" for choice in stopped["choices"])
    assert all(stop not in choice["text"] for choice in stopped["choices"])


async def test_tgis_best_of_draws_candidates_and_answers_the_likeliest(server: Server) -> None:
    parameters = {"best_of": 3, "do_sample": True, "max_new_tokens": 8, "details": True}
    async with client_of(server.url) as client:
        response = await client.post("/generate", json={"inputs": "So it was", "parameters": parameters})
    details = response.json()["details"]
    candidates = [details, *details["best_of_sequences"]]
    means = [sum(t["logprob"] for t in each["tokens"]) / len(each["tokens"]) for each in candidates]
    assert means == sorted(means, reverse=True)
    assert len({each["seed"] for each in candidates}) == 3


async def test_a_client_that_leaves_frees_its_beams(server: Server) -> None:
    async with client_of(server.url) as client:
        for seconds in (0.01, 0.03, 0.05, 0.1):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(seconds):
                    await search(client, PROMPTS[0], n=4, max_tokens=90, ignore_eos=True)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(seconds):
                    await _together(client, n=4, max_tokens=90, ignore_eos=True)
    assert await _left(server) == 0


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"stream": True}, "use_beam_search", "`use_beam_search` is not available when `stream` is true"),
    ({"temperature": 0.7}, "temperature", "`use_beam_search` and `temperature` exclude each other. Given: 0.7"),
    ({"top_k": 5}, "top_k", "`use_beam_search` and `top_k` exclude each other. Given: 5"),
    ({"mirostat": 2}, "mirostat", "`use_beam_search` and `mirostat` exclude each other. Given: 2"),
    ({"presence_penalty": 1}, "presence_penalty", "`use_beam_search` and `presence_penalty` exclude each other"),
    ({"guided_regex": "a+"}, "guided_regex", "`use_beam_search` and `guided_regex` exclude each other"),
    ({"n": 5}, "n", "`n` must be > 0 and <= 4 with `use_beam_search`. Given: 5"),
    ({"n": 3, "best_of": 2}, "best_of", "`best_of` must be >= `n`, which is 3. Given: 2"),
    ({"n": 4, "max_tokens": 150}, "n", "`n` beams of 9 prompt tokens and 150 `max_tokens` need"),
    ({"length_penalty": 200}, "length_penalty", "`length_penalty` must be >= -100 and <= 100. Given: 200.0"),
    ({"early_stopping": "soon"}, "early_stopping", "early_stopping"),
    ({"use_beam_search": False, "length_penalty": 2}, "length_penalty", "`length_penalty` needs `use_beam_search`"),
]


@pytest.mark.parametrize(("fields", "param", "says"), REFUSED, ids=[next(iter(fields)) for fields, _, _ in REFUSED])
async def test_what_contradicts_a_beam_search_is_refused(
    server: Server, fields: dict[str, Any], param: str, says: str
) -> None:
    body = {"prompt": "So it was", "use_beam_search": True, "n": 2, "max_tokens": 5} | fields
    async with client_of(server.url) as client:
        response = await client.post("/v1/completions", json=body)
    assert response.status_code in (400, 422), response.text
    assert says in response.text
    assert param in response.text
    assert "\\n" not in response.text
