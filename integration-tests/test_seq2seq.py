"""Encoder-decoders on every route that generates: what transformers writes, whatever comes and goes beside it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from funitel_testing.clients import client_of, generate, stream
from funitel_testing.servers import Server
from funitel_testing.tiny_seq2seq import EOS_ID, FORCED_LANGUAGE, OTHER_LANGUAGE, OTHER_LANGUAGE_ID, save_tiny_seq2seq
from funitel_testing.tiny_seq2seq import generate as by_transformers

PROMPT = "the quick brown fox jumps"
NUM_REQUESTS = 9
NUM_TOKENS = 40
# A pool for a third of what is asked for, and prompts that may come in several chunks.
LIMITS = (
    *("--max-input-tokens", "50", "--max-total-tokens", "100"),
    *("--max-batch-total-tokens", "256", "--max-batch-prefill-tokens", "24"),
)


def prompt_of(number: int) -> str:
    return f"{number} {PROMPT} over"[: 5 + 3 * number]


def how(number: int) -> dict[str, Any]:
    """What a request asks for: some are sampled, some end where a letter comes."""
    sampled = {"do_sample": True, "seed": number, "temperature": 0.8} if number % 3 == 1 else {}
    return {"max_new_tokens": NUM_TOKENS, **sampled, **({"stop": ["e"]} if number % 4 == 2 else {})}


@pytest.mark.parametrize(("family", "num_shard"), [("t5", 2), ("t5", 1), ("bart", 1), ("bart", 2), ("m2m_100", 2)])
async def test_what_transformers_writes_whoever_comes_and_goes(
    family: str, num_shard: int, launch: Any, tmp_path_factory: pytest.TempPathFactory, is_full: bool
) -> None:
    if (family, num_shard) != ("t5", 2) and not is_full:
        pytest.skip("the executor's own tests know every family; --full serves all of them here")
    folder = save_tiny_seq2seq(family, tmp_path_factory.mktemp(family))
    flags = ("--model-id", str(folder), "--device", "cpu", "--num-shard", str(num_shard), *LIMITS)
    server: Server = launch(*flags)
    async with client_of(server.url) as client:
        await _check_routes(client, folder)
        await _check_languages(client, folder, has_some=family in FORCED_LANGUAGE)
        alone = [await generate(client, prompt_of(number), **how(number)) for number in range(NUM_REQUESTS)]

        async def one(number: int) -> list[int]:
            await asyncio.sleep(0.002 * number)
            leave_after = 5 if number % 5 == 4 else None
            return (await stream(client, prompt_of(number), leave_after=leave_after, **how(number))).ids

        together = await asyncio.gather(*(one(number) for number in range(NUM_REQUESTS)))
    assert server.metrics()["funitel_preempted_total"] > 0
    for number, (answer, ids) in enumerate(zip(alone, together, strict=True)):
        assert ids == answer.ids[: len(ids)], f"request {number}"
        assert number % 5 == 4 or len(ids) == len(answer.ids)
    greedy = [number for number in range(NUM_REQUESTS) if how(number) == {"max_new_tokens": NUM_TOKENS}]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    expected = by_transformers(folder, [tokenizer.encode(prompt_of(number)).ids for number in greedy], NUM_TOKENS)
    for number, ids in zip(greedy, expected, strict=True):
        assert alone[number].ids == ids, f"request {number}"
        assert alone[number].finish_reason == ("eos_token" if len(ids) < NUM_TOKENS else "length")


async def _check_languages(client: Any, folder: Path, *, has_some: bool) -> None:
    """A request says which language it wants, natively and in OpenAI's words; other models have none."""
    native = {"inputs": PROMPT, "parameters": {"max_new_tokens": 8, "target_language": OTHER_LANGUAGE, "details": True}}
    openai = {"model": "tgi", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "target_language": OTHER_LANGUAGE}
    answer, completion = await client.post("/generate", json=native), await client.post("/v1/completions", json=openai)
    if not has_some:
        assert (answer.status_code, completion.status_code) == (422, 422)
        assert "`target_language` is not supported: the model has no languages" in answer.text
        assert completion.json()["error"]["param"] == "target_language"
        return
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(PROMPT).ids
    (expected,) = by_transformers(folder, [ids], 8, forced_bos_token_id=OTHER_LANGUAGE_ID)
    assert [token["id"] for token in answer.json()["details"]["tokens"]] == expected
    assert completion.json()["choices"][0]["text"] == answer.json()["generated_text"]
    unknown = {"inputs": PROMPT, "parameters": {"target_language": "tlh_Latn"}}
    refused = await client.post("/generate", json=unknown)
    assert refused.status_code == 422
    assert "must be one of the model's 2 languages, such as eng_Latn, fra_Latn. Given: 'tlh_Latn'" in refused.text


async def _check_routes(client: Any, folder: Path) -> None:
    """Native, OpenAI's, and a chat that the model has no template for."""
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(PROMPT).ids
    assert ids[-1] == EOS_ID
    (expected,) = by_transformers(folder, [ids], 8)
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 8, "details": True, "decoder_input_details": True}}
    response = await client.post("/", json=body)
    assert response.status_code == 200, response.text
    (answer,) = response.json()
    assert [token["id"] for token in answer["details"]["tokens"]] == expected
    streamed = await stream(client, PROMPT, max_new_tokens=8)
    assert streamed.ids == expected
    assert PROMPT + streamed.text == answer["generated_text"]  # this route shows the prompt too
    asked = {"model": "tgi", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    completion = (await client.post("/v1/completions", json=asked)).json()
    assert completion["choices"][0]["text"] == streamed.text
    assert (completion["usage"]["prompt_tokens"], completion["usage"]["completion_tokens"]) == (len(ids), len(expected))
    chat = {"model": "tgi", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8}
    refused = await client.post("/v1/chat/completions", json=chat)
    assert refused.status_code == 422
    assert "template not found" in refused.text
    too_long = await client.post("/generate", json={"inputs": PROMPT * 2, "parameters": {"max_new_tokens": 8}})
    assert too_long.status_code == 422
    num_tokens = len(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(PROMPT * 2).ids)
    assert f"`inputs` must have less than 50 tokens. Given: {num_tokens}" in too_long.text
