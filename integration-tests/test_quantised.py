"""Quantised models from end to end: written by the command's own function, or as publishers write them, and served."""

import json
import os
import subprocess
import sys
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


def test_the_quality_of_a_gptq_folder_is_measured_against_its_source(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    model = save_tiny("llama", tmp_path / "model", head_dim=16, **sizes)
    folder, text = tmp_path / "gptq", Path(__file__).parents[1] / "benchmarks" / "heldout.txt"
    settings = QuantizeSettings(
        model_id=str(model), output_dir=str(folder), groupsize=32, num_samples=2, device="cpu", num_threads=1
    )
    quantize(settings, model)
    words = ["perplexity", str(folder), "--text", str(text), "--against", str(model), "--max-tokens", "300"]
    words += ["--window", "100", "--stride", "50", "--device", "cpu", "--num-threads", "1", "--json"]
    environ = os.environ | {"PYTHONPATH": ":".join(filter(None, sys.path))}
    line = [sys.executable, "-m", "funitel", *words]
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    reference, row = found["results"]
    assert (found["tokens"], reference["precision"], row["model"]) == (299, "float32", str(folder))
    assert row["weight_bytes"] < reference["weight_bytes"]
    assert 0.01 < row["kl_mean"] < row["kl_p99"] <= row["kl_max"]
    assert 0.3 < row["same_top_token"] < 1


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
