"""A model of no row, through launcher, router and shards: what transformers writes, whoever shares a step."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from funitel_testing.clients import client_of, generate, stream
from funitel_testing.fallback import UNLISTED, split_form
from funitel_testing.servers import Server
from funitel_testing.tiny import byte_tokenizer

NUM_REQUESTS = 5
NUM_TOKENS = 12
LIMITS = ("--max-total-tokens", "160", "--max-batch-total-tokens", "640")
CHUNKS = ("--max-batch-prefill-tokens", "32")
WITH_STATE = ("qwen3-next",)  # takes a prompt in one step


def prompt_of(number: int) -> str:
    return f"{number} bottles of beer on the wall, " * 3 + "and so on " * (number % 3)


def greedy(folder: Path, prompts: list[str]) -> list[list[int]]:
    """What transformers' own loop writes, each prompt by itself."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        answer = model.generate(ids, max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
        found.append(answer[0, ids.shape[1] :].tolist())
    return found


@pytest.mark.parametrize(("name", "num_shard"), [("ernie", 2), ("arcee", 1), ("dots", 2), ("qwen3-next", 2)])
async def test_what_transformers_writes_whoever_shares_a_step(
    name: str, num_shard: int, launch: Any, tmp_path_factory: pytest.TempPathFactory, is_full: bool
) -> None:
    if (name, num_shard) != ("ernie", 2) and not is_full:
        pytest.skip("the unit tests know every kind of model; --full serves more of them here")
    folder = tmp_path_factory.mktemp(name)
    split_form(name).save(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    limits = LIMITS if name in WITH_STATE else LIMITS + CHUNKS
    server: Server = launch("--model-id", str(folder), "--device", "cpu", "--num-shard", str(num_shard), *limits)
    prompts = [prompt_of(number) for number in range(NUM_REQUESTS)]
    expected = greedy(folder, prompts)
    async with client_of(server.url) as client:

        async def one(number: int) -> list[int]:
            await asyncio.sleep(0.002 * number)
            leave_after = 5 if number % 4 == 3 else None
            return (await stream(client, prompts[number], leave_after=leave_after, max_new_tokens=NUM_TOKENS)).ids

        for _ in range(2):  # the second time prompts are in the prefix cache
            together = await asyncio.gather(*(one(number) for number in range(NUM_REQUESTS)))
            for number, ids in enumerate(together):
                assert ids == expected[number][: len(ids)], f"request {number}"
                assert number % 4 == 3 or len(ids) == len(expected[number])
        sampled = {"do_sample": True, "seed": 3, "temperature": 0.8, "max_new_tokens": NUM_TOKENS}
        assert (await generate(client, prompts[0], **sampled)).ids == (
            await generate(client, prompts[0], **sampled)
        ).ids
    assert (server.metrics()["funitel_prefix_cache_hit_tokens_total"] > 0) is (name != "qwen3-next")  # it has a state
    await asyncio.to_thread(server.wait_log, f"{UNLISTED[name].architecture} runs through transformers")
    assert server.stop() == 0
