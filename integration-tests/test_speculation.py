"""A server that speculates answers what it answers without: by one shard and by two, in a full pool, hybrids too."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from funitel_testing.clients import client_of, generate, stream
from funitel_testing.servers import Server
from funitel_testing.tiny import byte_tokenizer
from funitel_testing.zoo import ZOO

NUM_PROMPTS = 100
MANY = ("--max-concurrent-requests", "300")
LEAST_ACCEPTED = 50  # drafts
FEW_TOKENS = [65, 66, 67]  # texts of which repeat themselves


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    ZOO["qwen3_5"].save(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def asked_of(number: int) -> tuple[str, dict[str, Any]]:
    """A prompt with a phrase that comes again, and its parameters; those above `NUM_PROMPTS` are sampled."""
    source = random.Random(number)
    phrase = "".join(source.choice("abcdefgh ") for _ in range(source.randint(3, 12)))
    how: dict[str, Any] = {"max_new_tokens": source.randint(8, 40)}
    if number >= NUM_PROMPTS:
        how |= {"do_sample": True, "seed": number, "temperature": 0.7, "top_p": 0.9}
        how |= {"repetition_penalty": 1.05} if number % 3 == 0 else {}
    if number % 2:
        how |= {"allowed_token_ids": FEW_TOKENS}
    return phrase * 3 + str(number) + phrase, how


def accepted(server: Server) -> float:
    return server.metrics().get('funitel_draft_tokens_total{outcome="accepted"}', 0.0)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("tiny_model", ()),
        ("tiny_model", ("--num-shard", "2")),
        ("tiny_model", ("--max-batch-total-tokens", "1200", "--max-total-tokens", "200")),
        ("hybrid", ("--max-batch-size", "16", "--max-batch-total-tokens", "1600", "--max-total-tokens", "200")),
    ],
)
async def test_texts_are_those_without_drafts(
    launch: Any, request: pytest.FixtureRequest, name: str, flags: tuple[str, ...]
) -> None:
    folder: Path = request.getfixturevalue(name)
    server: Server = launch("--model-id", str(folder), "--dtype", "float32", "--speculate", "4", *MANY, *flags)
    asked = [asked_of(number) for number in range(2 * NUM_PROMPTS)]
    async with client_of(server.url) as client:
        assert (await client.get("/info")).json()["speculate"] == 4
        texts = []
        for speculate in (0, None, 2):
            fields = {} if speculate is None else {"speculate": speculate}
            before = accepted(server)
            answers = await asyncio.gather(*(generate(client, prompt, **how, **fields) for prompt, how in asked))
            texts.append([answer.text for answer in answers])
            assert (accepted(server) - before == 0) == (speculate == 0)
        assert texts[0] == texts[1] == texts[2]
    assert accepted(server) >= LEAST_ACCEPTED
    used = server.metrics()['funitel_blocks{state="used"}']
    assert used == 0


async def test_tokens_of_a_step_are_events_in_order(launch: Any, tiny_model: Path) -> None:
    server: Server = launch("--model-id", str(tiny_model), "--dtype", "float32", "--speculate", "4", *MANY)
    async with client_of(server.url) as client:
        before = accepted(server)
        for number in range(8):
            prompt, how = asked_of(number)
            streamed = await stream(client, prompt, **how)
            plain = await client.post(
                "/generate", json={"inputs": prompt, "parameters": how | {"details": True, "speculate": 0}}
            )
            details = plain.json()["details"]
            assert streamed.ids == [token["id"] for token in details["tokens"]]
            assert streamed.text == plain.json()["generated_text"]
        assert accepted(server) > before


async def test_more_drafts_than_the_server_has_are_refused(launch: Any, tiny_model: Path) -> None:
    server: Server = launch("--model-id", str(tiny_model), "--dtype", "float32", "--speculate", "4", *MANY)
    async with client_of(server.url) as client:
        answer = await client.post("/generate", json={"inputs": "a", "parameters": {"speculate": 5}})
        assert answer.status_code == 422
        assert "`speculate` must be >= 0 and <= 4, --speculate of this server. Given: 5" in answer.text
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "speculate": 2}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
