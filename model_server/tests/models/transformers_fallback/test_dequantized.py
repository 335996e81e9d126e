"""Quantised checkpoints through transformers: logits of the weights that they stand for, without its quantisers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from funitel.proto.errors import SettingsError, UnsupportedModel, WeightsError
from funitel_testing.fallback import TOLERANCE, difference, load
from funitel_testing.fallback_worker import serve_rank
from funitel_testing.forward_worker import step_through
from funitel_testing.published import FORMATS, MODELS, PROMPTS, expected_logits, save_mxfp4, save_published
from funitel_testing.ranks import run_ranks
from funitel_testing.servers import free_port

NUM_DECODE = 3
MIXTURES = [("deepseek_v3", "fp8_blocks"), ("qwen3_moe", "gptq"), ("qwen3_moe_stacked", "fp8_blocks")]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)  # tensors are tiny


def stepped(folder: Path) -> list[torch.Tensor]:
    model = load(folder)
    chunk = 11 if model.takes_chunks else max(map(len, PROMPTS))
    return step_through(model.loaded.decoder, model.pools.make(200), PROMPTS, NUM_DECODE, chunk)


@pytest.mark.parametrize(("name", "kind"), [*MIXTURES, *(("qwen3", kind) for kind in FORMATS)])
def test_logits_are_those_of_the_weights_dequantised(name: str, kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    expected = expected_logits(save_published(MODELS[name], folder, kind))
    assert difference(stepped(folder), expected) < TOLERANCE


def test_a_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    model = save_mxfp4(tmp_path)
    with torch.inference_mode():
        expected = [model(torch.tensor([ids])).logits[0] for ids in PROMPTS]
    assert difference(stepped(tmp_path), expected) < TOLERANCE


def test_two_ranks(tmp_path: Path) -> None:
    """Each reads its own rows and columns, cut inside words, groups and blocks."""
    even = {"num_attention_heads": 4, "num_key_value_heads": 2}
    kinds = {"gptq": "qwen3_moe", "fp8_blocks": "qwen3", "nvfp4": "qwen3", "int4": "qwen3"}
    expected = {}
    for kind, name in kinds.items():
        tiny = replace(MODELS[name], config={**MODELS[name].config, **even})
        expected[kind] = expected_logits(save_published(tiny, tmp_path / kind, kind))
    job = {"size": 2, "port": free_port(), "folders": [str(tmp_path / kind) for kind in kinds]}
    (tmp_path / "job.json").write_text(json.dumps({**job, "prompts": PROMPTS, "num_decode": NUM_DECODE}))
    run_ranks(serve_rank, tmp_path, 2)
    for kind, (found, _, (_, split, split_in_all), _) in zip(kinds, torch.load(tmp_path / "0.pt"), strict=True):
        assert difference(found, expected[kind]) < TOLERANCE, kind
        assert split < 0.6 * split_in_all, kind


def test_the_flag_confirms_what_the_checkpoint_says(tmp_path: Path) -> None:
    save_published(MODELS["qwen3"], tmp_path / "model", "awq")
    load(tmp_path / "model", quantize="awq")
    with pytest.raises(SettingsError, match="--quantize gptq: this checkpoint is quantised as awq"):
        load(tmp_path / "model", quantize="gptq")


def spoiled(folder: Path, name: str, values: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors if values is None else tensors | {name: values}, path, {"format": "pt"})


STEM = "model.layers.1.mlp.down_proj"


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_published(MODELS["qwen3"], folder, "fp8_blocks")
    spoiled(folder, f"{STEM}.weight_scale_inv", torch.full((2, 3), torch.nan))
    line = f"tensor {STEM}.weight_scale_inv holds the scale nan; scales must be finite"
    with pytest.raises(WeightsError, match=line) as raised:
        load(folder)
    assert "\n" not in raised.value.message
    spoiled(folder, f"{STEM}.weight_scale_inv", torch.ones(2, 2))
    with pytest.raises(WeightsError, match=rf"{STEM}.weight_scale_inv has shape \[2, 2\], expected \[2, 3\]"):
        load(folder)
    spoiled(folder, f"{STEM}.weight_scale_inv", None)
    with pytest.raises(WeightsError, match=f"the checkpoint lacks tensor {STEM}.weight_scale_inv"):
        load(folder)
    spoiled(folder, f"{STEM}.weight", None)
    with pytest.raises(WeightsError, match=f"lacks 1 tensors of the model: {STEM}.weight"):
        load(folder)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "hqq"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="quant_method 'hqq' is not supported; supported: gptq, awq"):
        load(folder)
