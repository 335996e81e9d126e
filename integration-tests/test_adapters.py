"""LoRA adapters of a real server: named in TGI's, OpenAI's and vLLM's ways, and loaded and unloaded under load."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from funitel_testing.clients import client_of, generate, stream
from funitel_testing.servers import Server, run_launcher, serving
from funitel_testing.tiny import VOCAB_SIZE, save_tiny

RANK, ALPHA = 4, 16.0
TARGETS = ("q_proj", "v_proj", "down_proj")
PROMPT = "one two three"
TOKENS = 12
NAMES = ("sql", "poet", "third")


def save_adapter(base: Path, folder: Path, seed: int, *, widened: int = 0) -> Path:
    """Save a random adapter of a checkpoint; `widened` makes its inputs larger than the model's."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in sorted(load_file(base / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        if module.endswith(TARGETS):
            outputs, inputs = weight.shape
            a = torch.randn((RANK, inputs + widened), generator=generator) * 0.3
            b = torch.randn((outputs, RANK), generator=generator) * 0.3
            tensors[f"base_model.model.{module}.lora_A.weight"] = a
            tensors[f"base_model.model.{module}.lora_B.weight"] = b
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny", "bias": "none"}
    config |= {"r": RANK, "lora_alpha": ALPHA, "target_modules": list(TARGETS)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def expected_ids(base: Path, adapter: Path | None, prompt: str, count: int) -> list[int]:
    """The greedy tokens of transformers with the adapter merged into the weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    tensors = {} if adapter is None else load_file(adapter / "adapter_model.safetensors")
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, a in tensors.items():
            if name.endswith("lora_A.weight"):
                b = tensors[name.replace("lora_A", "lora_B")]
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                weights[f"{module}.weight"] += (b @ a) * (ALPHA / RANK)
        ids = transformers.AutoTokenizer.from_pretrained(base)(prompt, return_tensors="pt").input_ids
        for _ in range(count):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    found: list[int] = ids[0, -count:].tolist()
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return save_tiny("llama", folder, max_position_embeddings=1024, eos_token_id=VOCAB_SIZE)


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three adapters, and one of another base."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        save_adapter(model, root / name, seed)
    save_adapter(model, root / "foreign", 9, widened=8)
    return root


@pytest.fixture(scope="module")
def truth(model: Path, adapters: Path) -> dict[str, list[int]]:
    """The tokens of the base, under "", and of each adapter."""
    found = {name: expected_ids(model, adapters / name, PROMPT, TOKENS) for name in NAMES}
    found[""] = expected_ids(model, None, PROMPT, TOKENS)
    assert len({tuple(ids) for ids in found.values()}) == len(found), "the adapters change nothing"
    return found


@pytest.fixture(scope="module")
def server(model: Path, adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two adapters from the start, by TGI's variable; room for two in memory."""
    flags = ("--model-id", str(model), "--dtype", "float32", "--max-batch-total-tokens", "4096", "--max-loras", "2")
    environ = {"LORA_ADAPTERS": f"sql={adapters / 'sql'},poet={adapters / 'poet'}"}
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, *flags, "--lora-folder", str(adapters), environ=environ) as server:
        yield server


async def posted(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json() if "json" in response.headers["content-type"] else response.text


async def load(client: httpx.AsyncClient, name: str, path: str, **more: Any) -> str:
    return str(await posted(client, "/v1/load_lora_adapter", lora_name=name, lora_path=path, **more))


async def unload(client: httpx.AsyncClient, name: str) -> str:
    return str(await posted(client, "/v1/unload_lora_adapter", lora_name=name))


async def test_tgis_and_openais_requests_get_the_tokens_of_the_merged_models(
    server: Server, truth: dict[str, list[int]]
) -> None:
    async with client_of(server.url) as client:
        names = ("", "sql", "poet")
        asks = [
            ask(client, PROMPT, max_new_tokens=TOKENS, **({"adapter_id": name} if name else {}))
            for ask in (generate, stream)
            for name in names
        ]
        answers = await asyncio.gather(*asks)  # in one mixed batch
        assert [answer.ids for answer in answers] == [truth[name] for name in names] * 2
        texts = dict(zip(names, (answer.text for answer in answers), strict=False))
        for name in names:
            body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0} | ({"model": name} if name else {})
            assert (await posted(client, "/v1/completions", **body))["choices"][0]["text"] == texts[name]
        chats = [
            await posted(
                client,
                "/v1/chat/completions",
                model=name,
                messages=[{"role": "user", "content": "Hi"}],
                max_tokens=TOKENS,
                temperature=0,
            )
            for name in ("anything", "sql", "poet")
        ]
        assert len({chat["choices"][0]["message"]["content"] for chat in chats}) == 3
        assert [chat["model"] for chat in chats] == ["anything", "sql", "poet"]


async def test_the_models_are_listed_with_their_parent(server: Server, model: Path, adapters: Path) -> None:
    async with client_of(server.url) as client:
        base, *listed = (await client.get("/v1/models")).json()["data"]
        assert base["id"] == str(model)
        assert [(each["id"], each["parent"], each["root"]) for each in listed] == [
            (name, str(model), str(adapters / name)) for name in ("sql", "poet")
        ]


async def test_vllms_calls_load_an_adapter_and_forget_it(server: Server, truth: dict[str, list[int]]) -> None:
    async with client_of(server.url) as client:
        assert await load(client, "hot", "third") == "Success: LoRA adapter 'hot' added successfully."
        answer = await generate(client, PROMPT, max_new_tokens=TOKENS, adapter_id="hot")
        assert answer.ids == truth["third"]
        await load(client, "hot", "poet", load_inplace=True)  # the prefixes of the old one are not its own
        answer = await generate(client, PROMPT, max_new_tokens=TOKENS, adapter_id="hot")
        assert answer.ids == truth["poet"]
        assert await unload(client, "hot") == "Success: LoRA adapter 'hot' removed successfully."
        response = await client.post("/v1/completions", json={"model": "hot", "prompt": "Hi"})
        assert response.status_code == 404
        response = await client.post("/generate", json={"inputs": "Hi", "parameters": {"adapter_id": "hot"}})
        assert response.status_code == 422
    assert server.metrics()["funitel_adapters"] <= 2


async def test_adapters_come_and_go_under_load_and_no_request_fails(
    server: Server, truth: dict[str, list[int]]
) -> None:
    async with client_of(server.url) as client:
        is_over = False

        async def ask_on(name: str) -> int:
            count = 0
            while not is_over:
                chosen = {"adapter_id": name} if name else {}
                answer = await stream(client, PROMPT, max_new_tokens=TOKENS, **chosen)
                assert answer.ids == truth[name]
                count += 1
            return count

        asking = [asyncio.create_task(ask_on(name)) for name in ("", "sql", "poet") for _ in range(3)]
        for turn in range(6):
            await load(client, f"hot{turn}", "third")
            answer = await generate(client, PROMPT, max_new_tokens=TOKENS, adapter_id=f"hot{turn}")
            assert answer.ids == truth["third"]
            going_on = asyncio.create_task(generate(client, PROMPT, max_new_tokens=TOKENS, adapter_id=f"hot{turn}"))
            await asyncio.sleep(0.01)
            await unload(client, f"hot{turn}")
            assert (await going_on).ids == truth["third"]
        is_over = True
        assert all(await asyncio.gather(*asking))


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("foreign", 400, "cannot be loaded"),
        ("..", 400, "--lora-folder"),
        ("/etc", 400, "--lora-folder"),
        ("none", 404, "`lora_path` must be a folder"),
    ],
)
async def test_what_cannot_be_loaded_is_one_line_and_leaves_nothing(
    server: Server, path: str, status: int, words: str
) -> None:
    async with client_of(server.url) as client:
        response = await client.post("/v1/load_lora_adapter", json={"lora_name": "bad", "lora_path": path})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (status, "lora_path")
        assert words in error["message"]
        assert "bad" not in [each["id"] for each in (await client.get("/v1/models")).json()["data"]]


def test_an_adapter_of_another_base_ends_the_start_in_one_line(model: Path, adapters: Path) -> None:
    flags = ("--model-id", str(model), "--dtype", "float32", "--max-batch-total-tokens", "1024")
    ended = run_launcher(*flags, "--port", "0", "--lora-adapters", f"foreign={adapters / 'foreign'}")
    assert ended.code == 1
    assert "--lora-adapters foreign=" in ended.err
    assert "Traceback" not in ended.err


async def test_a_shard_that_is_killed_gets_its_adapters_again(server: Server, truth: dict[str, list[int]]) -> None:
    async with client_of(server.url) as client:
        asking = [
            asyncio.create_task(stream(client, PROMPT, max_new_tokens=TOKENS, adapter_id=name))
            for name in ("sql", "poet")
            for _ in range(4)
        ]
        await asyncio.sleep(0.02)
        os.kill(server.shard_pids()[0], signal.SIGKILL)
        assert [answer.ids for answer in await asyncio.gather(*asking)] == [truth["sql"]] * 4 + [truth["poet"]] * 4
