"""A whole model with linear layers that another program quantised: logits of the same weights in float on any ranks."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.layers.mlp import Mlp
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.models.footprint import torch_weight_bytes
from funitel.model_server.quantized.packed_matrix import CodeKind, PackedMatrix
from funitel.model_server.registry.lookup import spec_of
from funitel.proto.errors import SettingsError
from funitel_testing import forward_worker
from funitel_testing.executors import load_executor
from funitel_testing.packed import awq_tensors, compressed_tensors, gptq_tensors, random_float8, random_layer
from funitel_testing.published import MODELS, save_published
from funitel_testing.ranks import run_ranks
from funitel_testing.servers import free_port
from funitel_testing.threads import on_ranks, one_at_a_time
from funitel_testing.tiny import save_tiny
from funitel_testing.zoo import ZOO

CPU = torch.device("cpu")
NUM_DECODE = 3


def quantise_like_others(folder: Path, kind: str, *, is_reordered: bool = False) -> Path:
    """Give every linear layer of a tiny model random integers; the same weights in float go to the folder returned."""
    tensors = load_file(folder / "model.safetensors")
    plain, packed = dict(tensors), dict(tensors)
    is_transposed = any(name.startswith("transformer.") for name in tensors)
    linears = [name for name in tensors if "_proj.weight" in name or ".c_" in name and name.endswith("weight")]
    for seed, name in enumerate(sorted(linears)):
        shape = tensors[name].shape
        num_outputs, num_inputs = (shape[1], shape[0]) if is_transposed else (shape[0], shape[1])
        stem = name.removesuffix(".weight")
        if kind == "fp8":
            floats = random_float8(num_inputs, num_outputs, block=(16, 32), seed=seed)
            plain[name], packed = floats.weight(), packed | floats.tensors(stem)
            continue
        layer = random_layer(num_inputs, num_outputs, group_size=16, is_reordered=is_reordered, seed=seed)
        plain[name] = layer.weight().t().contiguous() if is_transposed else layer.weight()
        del packed[name]
        if kind == "gptq":
            packed |= gptq_tensors(layer, stem)
        elif kind == "awq":
            packed |= awq_tensors(layer, stem)
        else:
            packed |= compressed_tensors(layer, stem, is_symmetric=False, with_order=is_reordered)
    float_folder = folder.with_name("float")
    float_folder.mkdir()
    for path in folder.iterdir():
        (float_folder / path.name).write_bytes(path.read_bytes())
    save_file(plain, float_folder / "model.safetensors")
    save_file(packed, folder / "model.safetensors")
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 16}
    configs: dict[str, dict[str, Any]] = {
        "awq": {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"},
        "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]},
        "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": is_reordered, "sym": False},
        "compressed-tensors": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
            "ignore": ["lm_head"],
        },
    }
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": configs[kind]}))
    return float_folder


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 288, (length,), generator=generator).tolist() for length in (23, 6)]


def logits(folder: Path, size: int, work: Path) -> list[torch.Tensor]:
    if size == 1:
        return forward_worker.run(folder, TensorParallel(), prompts(), NUM_DECODE)
    job = {"folder": str(folder), "prompts": prompts(), "num_decode": NUM_DECODE, "size": size, "port": free_port()}
    (work / "job.json").write_text(json.dumps(job | {"tiers": [""]}))
    run_ranks(forward_worker.serve_rank, work, size)
    found: list[list[torch.Tensor]] = torch.load(work / "logits.pt", weights_only=True)
    return found[0]


# 104 hidden units: two ranks cut them at 52, three at 35 and 70: inside words of eight and groups of sixteen.
@pytest.mark.parametrize(
    ("family", "kind", "is_reordered", "size"),
    [
        ("llama", "gptq", False, 1),
        ("llama", "gptq", True, 2),
        ("qwen2", "gptq", False, 3),
        ("gpt2", "gptq", True, 1),
        ("llama", "compressed-tensors", False, 1),
        ("llama", "awq", False, 1),
        ("qwen2", "fp8", False, 1),
        ("qwen3", "compressed-tensors", True, 1),
    ],
)
def test_logits_are_those_of_the_same_weights_in_float(
    tmp_path: Path, family: str, kind: str, is_reordered: bool, size: int
) -> None:
    changes = {"n_inner": 104} if family == "gpt2" else {"intermediate_size": 104}
    folder = save_tiny(family, tmp_path / "quantised", **changes)
    float_folder = quantise_like_others(folder, kind, is_reordered=is_reordered)
    found = logits(folder, size, tmp_path)
    expected = forward_worker.run(float_folder, TensorParallel(), prompts(), NUM_DECODE)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() < 1e-4


def test_quantised_experts_and_latents_are_those_of_the_same_weights_in_float(tmp_path: Path) -> None:
    sizes = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "v_head_dim": 8}  # words hold eight of the outputs
    units = {"intermediate_size": 104, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
    tiny, folder = ZOO["deepseek_v2_lite"], tmp_path / "quantised"
    replace(tiny, config={**tiny.config, **sizes, **units}).save(folder)
    float_folder = quantise_like_others(folder, "gptq")
    found = on_ranks(2, lambda parallel: forward_worker.run(folder, parallel, prompts(), NUM_DECODE))
    expected = forward_worker.run(float_folder, TensorParallel(), prompts(), NUM_DECODE)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize(("kind", "is_reordered", "size"), [("gptq", True, 2), ("awq", False, 1), ("fp8", False, 2)])
def test_kernels_that_keep_weights_packed_give_the_same_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_reordered: bool, size: int
) -> None:
    pytest.importorskip("triton")
    from funitel.model_server.quantized import matmul_kernels

    monkeypatch.setattr(matmul_kernels, "multiply", one_at_a_time(matmul_kernels.multiply))
    folder = save_tiny("llama", tmp_path / "quantised", intermediate_size=104, num_hidden_layers=1)
    float_folder = quantise_like_others(folder, kind, is_reordered=is_reordered)
    found = on_ranks(size, lambda parallel: packed_logits(folder, parallel))
    expected = forward_worker.run(float_folder, TensorParallel(), prompts(), NUM_DECODE)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-4


def test_nvfp4_stays_four_bits_in_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from funitel.model_server.quantized import matmul_kernels

    monkeypatch.setattr(matmul_kernels, "multiply", one_at_a_time(matmul_kernels.multiply))
    kinds = []

    def recorded(codes: Any, kind: CodeKind) -> PackedMatrix:
        kinds.append(kind)
        return make(codes, kind)

    make = PackedMatrix.of
    monkeypatch.setattr(PackedMatrix, "of", recorded)
    tiny = replace(MODELS["qwen3"], config={**MODELS["qwen3"].config, "num_hidden_layers": 1, "hidden_size": 48})
    float_folder = save_published(tiny, tmp_path / "model", "nvfp4")
    expected = forward_worker.run(float_folder, TensorParallel(), prompts(), NUM_DECODE)
    found = on_ranks(2, lambda parallel: packed_logits(tmp_path / "model", parallel))
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < 1e-4
    assert set(kinds) == {CodeKind.FLOAT4}


def packed_logits(folder: Path, parallel: TensorParallel) -> list[torch.Tensor]:
    """Logits with every quantised layer in the Triton kernels; the footprint is as it was predicted."""
    from funitel.model_server.quantized.matmul_kernels import PackedProduct, TritonProducts

    spec = spec_of(read_json(folder / "config.json"))
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
    weights = Weights(folder, torch.float32, CPU, spec.names.prefix)
    weights.products = TritonProducts(16)
    predicted = torch_weight_bytes(spec, parallel.rank, parallel.size, torch.float32, CPU, checkpoint=weights)
    decoder = Decoder(spec, weights, parallel, TorchAttention(4, CPU))
    assert isinstance(decoder.layers[0].mlp, Mlp)
    assert isinstance(decoder.layers[0].mlp.down.matmul, PackedProduct)
    assert weights.held_bytes == predicted
    return forward_worker.step_through(decoder, KVCache(spec, heads, 200, 4, torch.float32, CPU), prompts(), NUM_DECODE)


def test_a_shard_detects_honours_and_checks_the_quantisation(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "quantised", intermediate_size=104)
    float_folder = quantise_like_others(folder, "gptq")
    load_executor(folder)
    load_executor(folder, quantize="gptq")
    with pytest.raises(SettingsError, match="--quantize int8: this checkpoint is quantised as gptq"):
        load_executor(folder, quantize="int8")
    with pytest.raises(SettingsError, match="--quantize gptq: the weights of this checkpoint are not quantised"):
        load_executor(float_folder, quantize="gptq")
