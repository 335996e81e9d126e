"""Quantised models from end to end: written by the command's own function, or as publishers write them, and served."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from funitel.model_server.settings import QuantizeSettings
from funitel.model_server.tools.quantize.command import quantize
from funitel_testing.clients import client_of, generate
from funitel_testing.published import MODELS, save_published
from funitel_testing.tiny import byte_tokenizer, save_tiny


@pytest.mark.parametrize(("num_shard", "flags"), [(1, ("--quantize", "gptq")), (2, ())])
async def test_a_gptq_folder_is_served(num_shard: int, flags: tuple[str, ...], launch: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    model = save_tiny("llama", tmp_path / "model", head_dim=16, **sizes)
    settings = QuantizeSettings(
        model_id=str(model), output_dir=str(tmp_path / "gptq"), groupsize=32, num_samples=2, device="cpu"
    )
    assert quantize(settings, model).num_quantised == 21
    server = launch("--model-id", settings.output_dir, "--num-shard", str(num_shard), *flags)
    async with client_of(server.url) as client:
        found = await generate(client, "Hello", max_new_tokens=6)
    assert len(found.ids) == 6


@pytest.mark.parametrize(
    ("name", "kind", "num_shard", "by_transformers"),
    [("deepseek_v3", "fp8_blocks", 2, False), ("qwen3_moe", "gptq", 1, True)],
)
async def test_a_published_format_is_served(
    name: str, kind: str, num_shard: int, by_transformers: bool, launch: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    float_folder = save_published(MODELS[name], folder, kind)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    if by_transformers:
        config = json.loads((folder / "config.json").read_text()) | {"architectures": ["UnlistedForCausalLM"]}
        (folder / "config.json").write_text(json.dumps(config))
    server = launch("--model-id", str(folder), "--num-shard", str(num_shard), "--dtype", "float32")
    ids = byte_tokenizer().encode("Hello").ids
    model = AutoModelForCausalLM.from_pretrained(float_folder, dtype=torch.float32).eval()
    expected = model.generate(torch.tensor([ids]), max_new_tokens=8, min_new_tokens=8, do_sample=False)
    async with client_of(server.url) as client:
        found = await generate(client, "Hello", max_new_tokens=8)
    assert found.ids == expected[0, len(ids) :].tolist()
    assert ("runs through transformers" in server.log.read_text()) is by_transformers
