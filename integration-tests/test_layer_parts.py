"""A model in parts within one shard: the tokens of the model in one piece, also where the shard is killed."""

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

NUM_PROMPTS, TOKENS = 16, 60
EXACT, MIXED = "0-0=float32,1-2=float32", "0-0=float32,1-2=int8"
# A pool for a part of what is asked for, and prompts in chunks: sequences are preempted, and prefixes are shared.
LIMITS = (
    *("--max-input-tokens", "200", "--max-total-tokens", "400", "--max-batch-total-tokens", "1200"),
    *("--max-batch-prefill-tokens", "48", "--num-threads", "1", "--device", "cpu"),
)
ROOM = ("--max-input-tokens", "200", "--max-total-tokens", "400", "--num-threads", "1", "--device", "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("model"), max_position_embeddings=512)


async def ask(client: httpx.AsyncClient, index: int) -> Answer:
    """One of many requests that share beginnings: greedy or seeded, streamed or whole."""
    prompt = "a prefix that many of them begin with, " + f"{index} bottles of beer. " * (1 + index % 5)
    ways: list[dict[str, Any]] = [{}, {"do_sample": True, "seed": index, "top_p": 0.9}, {"repetition_penalty": 1.3}]
    how = stream if index % 4 else generate
    return await how(client, prompt, max_new_tokens=TOKENS, **ways[index % len(ways)])


async def ask_all(client: httpx.AsyncClient) -> list[Answer]:
    return await asyncio.gather(*(ask(client, index) for index in range(NUM_PROMPTS)))


def said(answers: list[Answer]) -> list[tuple[list[int], str]]:
    return [(answer.ids, answer.text) for answer in answers]


async def test_exact_parts_write_what_the_model_writes_in_one_piece(model: Path, tmp_path: Path) -> None:
    found = []
    for flags in (("--dtype", "float32"), ("--layer-parts", EXACT)):
        with serving(tmp_path, "--model-id", str(model), *LIMITS, *flags) as server:
            async with client_of(server.url) as client:
                found.append(said(await ask_all(client)))
                parts = (await client.get("/info")).json().get("layer_parts")
            assert len(server.shard_pids()) == 1
    assert found[0] == found[1]
    assert parts == "0-0=cpu:float32,1-2=cpu:float32"


async def test_parts_are_preempted_share_prefixes_and_outlive_their_shard(model: Path, tmp_path: Path) -> None:
    flags = ("--model-id", str(model), "--layer-parts", MIXED)
    with serving(tmp_path, *flags, *ROOM, "--prefix-caching", "false") as server:
        async with client_of(server.url) as client:
            expected = said([await ask(client, index) for index in range(NUM_PROMPTS)])
    with serving(tmp_path, *flags, *LIMITS) as server:
        footprint = server.footprint()
        async with client_of(server.url) as client:
            assert said(await ask_all(client)) == expected
            assert server.metrics()["funitel_preempted_total"] > 0
            asking = asyncio.create_task(ask_all(client))
            await asyncio.to_thread(server.wait_steps, 10)
            os.kill(server.shard_pids()[0], signal.SIGKILL)
            assert said(await asyncio.wait_for(asking, 120)) == expected
        log = await asyncio.to_thread(server.wait_log, "restart 1 of 5")
        assert "layers 0..0 of 3 device=cpu step=fused precision=torch.float32" in log
        assert "layers 1..2 of 3 device=cpu step=fused precision=int8" in log
        assert "Traceback" not in log
        assert server.error_lines() == []
    footprint.wait_gone()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--gpu-layers", "2", "--device", "cpu"), "--gpu-layers 2 needs a GPU: --device is cpu"),
        (("--gpu-layers", "0"), "--gpu-layers must be within 1..4096, given 0"),
        (("--layer-parts", "0-1=gpu"), "'0-1=gpu' has 'gpu' for layers 0-1: a place is one of cuda, cpu, float32"),
        (("--layer-parts", "0-1=int8"), "--layer-parts 0-1=int8 places 2 layers, the model has 3"),
        (("--layer-parts", "0-2=int8", "--num-shard", "2"), "cannot be used with --num-shard 2: one shard has all"),
        (("--layer-parts", "0-2=int8", "--partition", "0;1"), "cannot be used with --partition 0;1: one shard has"),
        (("--layer-parts", "0-2=int8", "--dtype", "float32"), "--dtype float32 cannot be used with --layer-parts"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(model: Path, flags: tuple[str, ...], line: str) -> None:
    ended = run_launcher("--model-id", str(model), *flags, timeout=120)
    assert ended.code != 0
    assert line in ended.err
    assert "Traceback" not in ended.err
