"""Two pipeline stages of two ranks each: the tokens of one shard, also where a rank is killed under load."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from funitel_testing.clients import Answer, client_of, generate, stream
from funitel_testing.servers import run_launcher, serving
from funitel_testing.tiny import save_tiny
from funitel_testing.tiny_adapters import TinyAdapter, save_adapter
from funitel_testing.zoo import ZOO

NUM_PROMPTS = 20
TWO_BY_TWO = ("--partition", "0&1;2&3", "--layers", "1,2")
# A pool for a part of what is asked for, and prompts in chunks: sequences are preempted, and chunks follow one another.
LIMITS = (
    *("--max-input-tokens", "200", "--max-total-tokens", "400", "--max-batch-total-tokens", "1600"),
    *("--max-batch-prefill-tokens", "48", "--num-threads", "1", "--dtype", "float32"),
)
SPAN = {"type": "regex", "value": "(the same words again and again, [ab]){2}"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=512)


async def ask(client: httpx.AsyncClient, index: int, tokens: int) -> Answer:
    """One of many different requests: greedy, seeded, with penalties or kept to a grammar; streamed or whole."""
    prompt = f"{index} bottles of beer on the wall. " * (1 + index % 5)
    ways: list[dict[str, Any]] = [
        {},
        {"do_sample": True, "seed": index, "top_p": 0.9},
        {"repetition_penalty": 1.3, "top_n_tokens": 2},
        {"grammar": SPAN},
        {"do_sample": True, "seed": index, "frequency_penalty": 0.5},
    ]
    how = stream if index % 4 else generate
    return await how(client, prompt, max_new_tokens=tokens, **ways[index % len(ways)])


async def ask_all(client: httpx.AsyncClient, tokens: int) -> list[Answer]:
    return await asyncio.gather(*(ask(client, index, tokens) for index in range(NUM_PROMPTS)))


async def test_stages_write_what_one_shard_writes_and_outlive_a_rank(model: Path, tmp_path: Path) -> None:
    tokens = 60
    flags = ("--model-id", str(model), *LIMITS)
    with serving(tmp_path, *flags) as server:
        async with client_of(server.url) as client:
            expected = await ask_all(client, tokens)
    with serving(tmp_path, *flags, *TWO_BY_TWO) as server:
        footprint = server.footprint()
        assert len(server.shard_pids()) == 4
        async with client_of(server.url) as client:
            found = await ask_all(client, tokens)
            assert [answer.ids for answer in found] == [answer.ids for answer in expected]
            assert [answer.text for answer in found] == [answer.text for answer in expected]
            asking = asyncio.create_task(ask_all(client, tokens))
            await asyncio.to_thread(server.wait_steps, 10)
            os.kill(server.shard_pids()[2], signal.SIGKILL)
            found = await asyncio.wait_for(asking, 120)
            assert [answer.ids for answer in found] == [answer.ids for answer in expected]
        assert len(server.shard_pids()) == 4
        assert server.error_lines() == []
        log = await asyncio.to_thread(server.wait_log, "restart 1 of 5")
        assert "pipeline stage 1 of 2: layers 1..2 of 3" in log
        assert "Traceback" not in log
    footprint.wait_gone()


async def test_whole_experts_on_ranks_write_what_one_shard_writes(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model")  # its tokenizer
    ZOO["qwen2_moe"].save(folder)
    answers = []
    for further in ((), ("--num-shard", "2", "--expert-parallel")):
        with serving(
            tmp_path, "--model-id", str(folder), "--num-threads", "1", "--dtype", "float32", *further
        ) as server:
            async with client_of(server.url) as client:
                asked = (generate(client, "abc " * index, max_new_tokens=12, seed=1) for index in range(1, 6))
                answers.append([answer.ids for answer in await asyncio.gather(*asked)])
    assert answers[0] == answers[1]


async def test_stages_add_adapters_each_to_its_own_layers(model: Path, tmp_path: Path) -> None:
    targets = ["q_proj", "down_proj", "embed_tokens", "lm_head"]  # of both stages, and of their ends
    adapter = save_adapter(model, tmp_path / "adapter", TinyAdapter(rank=4, targets=targets), seed=1)
    answers = []
    for further in ((), ("--partition", "0;1")):
        flags = ("--model-id", str(model), "--num-threads", "1", "--lora-adapters", f"tuned={adapter}", *further)
        with serving(tmp_path, *flags) as server:
            async with client_of(server.url) as client:
                base = await generate(client, "the cat sat on", max_new_tokens=12)
                tuned = await generate(client, "the cat sat on", max_new_tokens=12, adapter_id="tuned")
                answers.append((base.ids, tuned.ids))
    assert answers[0] == answers[1]
    assert base.ids != tuned.ids


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--partition", "0&1;2"), "'0&1;2' has stages of 2, 1 ranks: all must have as many"),
        (("--partition", "0;2"), "'0;2' has 2 ranks, which must be 0..1: rank 1 is missing"),
        (("--partition", "0;0"), "'0;0' has rank 0 twice"),
        (("--partition", "0;1", "--layers", "1,1"), "--layers 1,1 adds up to 2 layers"),
        (("--partition", "0;1;2;3"), "--partition 0;1;2;3 has 4 stages"),
        (("--partition", "0;1", "--num-shard", "3"), "--num-shard 3 and --partition 0;1 of 2 ranks contradict"),
        (("--layers", "1,2"), "--layers 1,2 is for the stages of --partition, which is not given"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(model: Path, flags: tuple[str, ...], line: str) -> None:
    ended = run_launcher("--model-id", str(model), "--device", "cpu", *flags)
    assert ended.code != 0
    assert line in ended.last_line
    assert "Traceback" not in ended.err


def test_experts_are_spread_only_where_there_are_some(model: Path) -> None:
    ended = run_launcher("--model-id", str(model), "--num-shard", "2", "--expert-parallel", timeout=120)
    assert ended.code != 0
    assert "--expert-parallel is for mixtures of experts, LlamaForCausalLM has no experts" in ended.err
    assert "Traceback" not in ended.err
