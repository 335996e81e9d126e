"""Adapters on quantised bases: the float product on top of what the base gives in its tier."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from funitel.model_server.cpu.precision import Tier
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel_testing.adapter_worker import AdaptedModel
from funitel_testing.forward_worker import run
from funitel_testing.packed import awq_tensors, gptq_tensors, random_float8, random_layer
from funitel_testing.tiny import save_tiny
from funitel_testing.tiny_adapters import EIGHT, Tensors, TinyAdapter, merge, save_adapter, write_adapter
from funitel_testing.tiny_blocks import SIZES, add_blocks, values_of

ALONE = TensorParallel()
PROMPTS = [list(range(40, 63)), list(range(200, 209))]
HIDDEN, VOCAB = 48, 288


def save_head_adapter(folder: Path, a: torch.Tensor, b: torch.Tensor) -> Path:
    made = TinyAdapter(rank=len(a), targets=("lm_head",), alpha=float(len(a)))
    tensors = {"base_model.model.lm_head.lora_A.weight": a, "base_model.model.lm_head.lora_B.weight": b}
    write_adapter(folder, made.config(), tensors)
    return folder


def folder_of(work: Path, tier: Tier) -> Path:
    if tier is not Tier.GGUF:
        return save_tiny("llama", work / "base")
    folder = save_tiny("llama", work / "base", **SIZES)
    return add_blocks(folder, lambda name: "Q8_0" if "embed" in name else "Q4_0" if "down" in name else "Q6_K")


@pytest.mark.parametrize("tier", [Tier.INT8, Tier.GGUF, Tier.BFLOAT16, Tier.FLOAT16], ids=lambda tier: tier.label)
def test_the_float_product_comes_on_top_of_the_tiers_output(tier: Tier, tmp_path: Path) -> None:
    """Hidden states are read off an adapter that copies them to the logits."""
    base = folder_of(tmp_path, tier)
    model = AdaptedModel.fused_step(base, ALONE, tier)
    hidden_size = model.spec.hidden_size
    num_read = min(64, hidden_size)
    copy = torch.eye(VOCAB, num_read)
    read = save_head_adapter(tmp_path / "read", torch.eye(num_read, hidden_size), copy)
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(5, hidden_size, generator=generator)
    a[:, num_read:] = 0
    b = torch.randn(VOCAB, 5, generator=generator)
    plain, reading, adapted = (
        model.logits(PROMPTS, model.load([folder] * 2))
        for folder in (None, read, save_head_adapter(tmp_path / "adapter", a, b))
    )
    for before, told, found in zip(plain, reading, adapted, strict=True):
        hidden = (told - before)[:, :num_read]
        expected = hidden @ a[:, :num_read].t() @ b.t()
        assert float((found - before - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize(
    ("tier", "tolerance"),
    [(Tier.INT8, 0.15), (Tier.GGUF, 0.15), (Tier.BFLOAT16, 0.05)],
    ids=["int8", "gguf", "bfloat16"],
)
def test_every_projection_of_a_tier_is_adapted(tier: Tier, tolerance: float, tmp_path: Path) -> None:
    base, made = folder_of(tmp_path, tier), EIGHT[7]
    exact = tmp_path / "exact"  # the same values in float32
    if tier is Tier.GGUF:
        save_tiny("llama", exact, **SIZES)
        save_file(values_of(base), exact / "model.safetensors", metadata={"format": "pt"})
    else:
        exact = base
    adapter = save_adapter(exact, tmp_path / "adapter", made)
    expected = run(merge(exact, adapter, made, tmp_path / "merged"), ALONE, PROMPTS, 4)
    model = AdaptedModel.fused_step(base, ALONE, tier)
    found = model.logits(PROMPTS, model.load([adapter, adapter]))
    plain = model.logits(PROMPTS)
    for ours, theirs, before in zip(found, expected, plain, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < tolerance
        assert float((before - theirs).norm() / theirs.norm()) > 2 * tolerance


def gptq(inputs: int, outputs: int, stem: str) -> tuple[torch.Tensor, Tensors]:
    layer = random_layer(inputs, outputs, group_size=16, is_reordered=False, seed=len(stem))
    return layer.weight(), gptq_tensors(layer, stem)


def awq(inputs: int, outputs: int, stem: str) -> tuple[torch.Tensor, Tensors]:
    layer = random_layer(inputs, outputs, group_size=16, is_reordered=False, seed=len(stem))
    return layer.weight(), awq_tensors(layer, stem)


def fp8(inputs: int, outputs: int, stem: str) -> tuple[torch.Tensor, Tensors]:
    floats = random_float8(inputs, outputs, block=(16, 32), seed=len(stem))
    return floats.weight(), floats.tensors(stem)


PUBLISHED: dict[str, tuple[Callable[[int, int, str], tuple[torch.Tensor, Tensors]], dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}),
    "fp8": (fp8, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_quantisations(kind: str, tmp_path: Path) -> None:
    quantise, config = PUBLISHED[kind]
    base = save_tiny("llama", tmp_path / "base", hidden_size=48, intermediate_size=96)
    exact = save_tiny("llama", tmp_path / "exact", hidden_size=48, intermediate_size=96)
    plain = load_file(base / "model.safetensors")
    packed = dict(plain)
    for name in [name for name in plain if "_proj.weight" in name]:
        outputs, inputs = plain[name].shape
        del packed[name]
        plain[name], own = quantise(inputs, outputs, name.removesuffix(".weight"))
        packed |= own
    save_file(packed, base / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in plain.items()}, exact / "model.safetensors")
    written = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(written | {"quantization_config": config}))
    made = EIGHT[7]
    adapter = save_adapter(exact, tmp_path / "adapter", made)
    expected = run(merge(exact, adapter, made, tmp_path / "merged"), ALONE, PROMPTS, 4)
    for model in (AdaptedModel.torch_step(base, ALONE), AdaptedModel.fused_step(base, ALONE)):
        found = model.logits(PROMPTS, model.load([adapter, adapter]))
        for ours, theirs in zip(found, expected, strict=True):
            assert float((ours - theirs).norm() / theirs.norm()) < 1e-4
