"""Images in prompts, through the whole server: answers equal those of transformers, for every family."""

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest
from PIL import Image

from funitel_testing.clients import client_of
from funitel_testing.servers import Server, serving
from funitel_testing.vision_models import VISION_FAMILIES, VisionOracle, picture, save_vision
from funitel_testing.vision_requests import content_of, data_url

MAX_TOKENS = 10
FLAGS = ("--dtype", "float32", "--max-batch-total-tokens", "8192", "--max-input-tokens", "2000", "--max-total-tokens")
WITHOUT_ORACLE = ("llama4",)  # its processor needs torchvision, see router/tests/media
IN_SHORT = ("idefics3", "llava", "qwen2_5_vl", "qwen3_vl", "gemma3")


@pytest.fixture(params=[family for family in VISION_FAMILIES if family not in WITHOUT_ORACLE])
def family(request: pytest.FixtureRequest, is_full: bool) -> str:
    """A family with an oracle; some of them in the short form."""
    name: str = request.param
    if not is_full and name not in IN_SHORT:
        pytest.skip("with --full")
    return name


@pytest.fixture
def model(family: str, tmp_path: Path) -> Path:
    """Folder of the small model of the family."""
    return save_vision(family, tmp_path / "model")


QUESTIONS: list[list[str | Image.Image]] = [
    ["What is this? ", picture(60, 45)],
    [picture(33, 90, 1), "between ", picture(120, 31, 2), " and behind"],
    ["No picture at all."],
    ["Large: ", picture(300, 200, 3), picture(60, 45)],
]


def asked(oracle: VisionOracle, parts: list[str | Image.Image]) -> tuple[str, list[Image.Image]]:
    """The prompt that the template of the small models makes of a question, and its pictures."""
    text = "".join(part if isinstance(part, str) else oracle.row.marker for part in parts)
    return f"[user] {text}\n[assistant]", [part for part in parts if not isinstance(part, str)]


async def chat(client: httpx.AsyncClient, parts: list[str | Image.Image], max_tokens: int = MAX_TOKENS) -> list[int]:
    """Token ids of a greedy answer."""
    body = {"messages": [{"role": "user", "content": content_of(parts)}], "max_tokens": max_tokens, "temperature": 0}
    answer = await client.post("/v1/chat/completions", json={**body, "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


async def check_all(server: Server, oracle: VisionOracle) -> None:
    """Alone and in company, twice: the second time from the caches."""
    expected = [oracle.generate(*asked(oracle, parts), MAX_TOKENS) for parts in QUESTIONS]
    async with client_of(server.url) as client:
        for parts, ids in zip(QUESTIONS, expected, strict=True):
            assert await chat(client, parts) == ids
        assert await asyncio.gather(*(chat(client, parts) for parts in QUESTIONS)) == expected


async def test_answers_equal_transformers(family: str, model: Path, tmp_path: Path) -> None:
    oracle = VisionOracle(family, model)
    with serving(tmp_path, "--model-id", str(model), *FLAGS, "2500") as server:
        await check_all(server, oracle)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"], indirect=True)
async def test_on_two_ranks_in_small_chunks(family: str, model: Path, tmp_path: Path) -> None:
    oracle = VisionOracle(family, model)
    chunks = ("--max-batch-prefill-tokens", "48", "--num-shard", "2")
    with serving(tmp_path, "--model-id", str(model), *FLAGS, "2500", *chunks) as server:
        await check_all(server, oracle)


@pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)
async def test_preempted_and_killed_streams_say_the_same(family: str, model: Path, tmp_path: Path) -> None:
    tight = ("--max-batch-total-tokens", "700", "--max-input-tokens", "400", "--max-total-tokens", "500")
    with serving(tmp_path, "--model-id", str(model), "--dtype", "float32", *tight) as server:
        async with client_of(server.url) as client:
            alone = [await chat(client, parts, 100) for parts in QUESTIONS]
            asking = [asyncio.create_task(chat(client, parts, 100)) for parts in QUESTIONS * 2]
            await asyncio.to_thread(server.wait_steps, 10)
            os.kill(server.shard_pids()[0], signal.SIGKILL)
            assert await asyncio.gather(*asking) == alone * 2
            metrics = server.metrics()
        assert metrics["funitel_replica_returns_total"] == 1


@pytest.mark.parametrize("family", ["llava"], indirect=True)
async def test_markdown_images_of_generate(family: str, model: Path, tmp_path: Path) -> None:
    oracle = VisionOracle(family, model)
    image = picture(60, 45)
    with serving(tmp_path, "--model-id", str(model), *FLAGS, "2500") as server:
        async with client_of(server.url) as client:
            body = {"inputs": f"See ![]({data_url(image)}) well", "parameters": {"details": True, "max_new_tokens": 8}}
            answer = await client.post("/generate", json=body)
            assert answer.status_code == 200, answer.text
            ids = [token["id"] for token in answer.json()["details"]["tokens"]]
            assert ids == oracle.generate(f"See {oracle.row.marker} well", [image], 8)
            plain = await client.post("/generate", json={**body, "inputs": "See ![](x) well <image>"})
            assert plain.status_code == 422
            assert plain.json()["error"].startswith("Input validation error: `inputs` has a URL of the scheme none")
