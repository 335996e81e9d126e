"""Tiny checkpoints in the formats of those that are published, and the same weights in floating point beside them.

Weights are rounded here from each format's description, and share nothing with the code that reads them.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from funitel_testing.packed import Layer, awq_tensors, compressed_tensors, gptq_tensors
from funitel_testing.sparse import pruned_24, sparse_24, sparse_rows, sparsity
from funitel_testing.zoo import LAYERS, VOCAB_SIZE, ZOO, Tiny

Tensors = dict[str, torch.Tensor]
Pack = Callable[[torch.Tensor, str], tuple[Tensors, torch.Tensor]]
"""Of the weights [outputs, inputs] of a layer and its name: its tensors, and the weights that they stand for."""

_LINEAR = re.compile(r"layers\.\d+\..*_proj(_with_mqa)?\.weight$")
_STACK = re.compile(r"experts\.(gate_up|down)_proj$")
_MAX_FLOAT8 = 448.0
_FLOAT4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _rounded(weight: torch.Tensor, bits: int, group_size: int, *, is_symmetric: bool) -> Layer:
    """Weights rounded to the levels of each group; a last group may be shorter."""
    num_inputs = weight.shape[1]
    size = num_inputs if group_size == -1 else group_size
    groups = [i // size for i in range(num_inputs)]
    top = 2**bits - 1
    scales, zeros = [], []
    for part in weight.split(size, dim=1):
        if is_symmetric:
            scale = (2 * part.abs().amax(1) / top).half()
            zero = torch.full_like(scale, (top + 1) // 2)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale = ((high - low) / top).half()
            zero = (-low / scale.float()).round().clamp(0, top)
        scales.append(scale)
        zeros.append(zero.int())
    by_input = torch.stack(scales)[groups].float(), torch.stack(zeros)[groups]
    codes = ((weight.t() / by_input[0]).round() + by_input[1]).clamp(0, top).int()
    return Layer(bits, codes.tolist(), torch.stack(zeros).tolist(), torch.stack(scales), groups)


def _gptq(weight: torch.Tensor, stem: str) -> tuple[Tensors, torch.Tensor]:
    layer = _rounded(weight, 4, 128, is_symmetric=True)
    return gptq_tensors(layer, stem), layer.weight()


def _awq(weight: torch.Tensor, stem: str) -> tuple[Tensors, torch.Tensor]:
    layer = _rounded(weight, 4, 128, is_symmetric=False)
    return awq_tensors(layer, stem), layer.weight()


def _packed(weight: torch.Tensor, stem: str, *, bits: int, group_size: int) -> tuple[Tensors, torch.Tensor]:
    layer = _rounded(weight, bits, group_size, is_symmetric=True)
    return compressed_tensors(layer, stem, is_symmetric=True), layer.weight()


def _bytes(weight: torch.Tensor, stem: str, *, is_symmetric: bool = True) -> tuple[Tensors, torch.Tensor]:
    """int8 of -128 to 127, a scale for each output."""
    layer = _rounded(weight, 8, -1, is_symmetric=is_symmetric)
    codes, zeros = torch.tensor(layer.codes).t() - 128, torch.tensor(layer.zeros).t() - 128
    tensors = {f"{stem}.weight": codes.to(torch.int8).contiguous(), f"{stem}.weight_scale": layer.scales.t().bfloat16()}
    scales = tensors[f"{stem}.weight_scale"] = tensors[f"{stem}.weight_scale"].contiguous()
    if not is_symmetric:
        tensors[f"{stem}.weight_zero_point"] = zeros.to(torch.int8).contiguous()
    return tensors, (codes - zeros).float() * scales.float()


def _float8(
    weight: torch.Tensor, stem: str, *, block: tuple[int, int], scale: str, is_scalar: bool = False
) -> tuple[Tensors, torch.Tensor]:
    """e4m3, with the largest weight of each block of outputs and inputs at its largest number."""
    sizes = [size if each == -1 else each for size, each in zip(weight.shape, block, strict=True)]
    places = [torch.arange(size) // each for size, each in zip(weight.shape, sizes, strict=True)]
    counts = [int(each[-1]) + 1 for each in places]
    scales = torch.zeros(counts)
    for i in range(counts[0]):
        for j in range(counts[1]):
            part = weight[i * sizes[0] : (i + 1) * sizes[0], j * sizes[1] : (j + 1) * sizes[1]]
            scales[i, j] = part.abs().max() / _MAX_FLOAT8
    spread = scales[places[0]][:, places[1]]
    codes = (weight / spread).clamp(-_MAX_FLOAT8, _MAX_FLOAT8).to(torch.float8_e4m3fn)
    kept = scales.reshape(()) if is_scalar else scales
    tensors = {f"{stem}.weight": codes, f"{stem}.{scale}": kept.clone()}
    if is_scalar:
        tensors[f"{stem}.input_scale"] = torch.tensor(0.02)
    return tensors, codes.float() * spread


def _float4(weight: torch.Tensor, stem: str, *, is_modelopt: bool) -> tuple[Tensors, torch.Tensor]:
    """e2m1, a scale in e4m3 for each 16 inputs, and one in float32 for the matrix."""
    largest = float(weight.abs().max())
    globally = torch.tensor(largest / (6 * _MAX_FLOAT8) if is_modelopt else 6 * _MAX_FLOAT8 / largest)
    multiplier = float(globally) if is_modelopt else 1 / float(globally)
    scales = (weight.unflatten(1, (-1, 16)).abs().amax(2) / 6 / multiplier).to(torch.float8_e4m3fn)
    spread = scales.float().repeat_interleave(16, dim=1) * multiplier
    places = ((weight / spread).abs()[..., None] - _FLOAT4).abs().argmin(-1)
    codes = (places + 8 * (weight < 0)).to(torch.uint8)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    values = _FLOAT4[places] * torch.where(weight < 0, -1.0, 1.0) * spread
    if is_modelopt:
        parts = {
            "weight": packed,
            "weight_scale": scales,
            "weight_scale_2": globally,
            "input_scale": torch.tensor(0.01),
        }
    else:
        parts = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": globally.reshape(1)}
        parts["input_global_scale"] = torch.tensor([300.0])
    return {f"{stem}.{part}": tensor for part, tensor in parts.items()}, values


def _halves(weight: torch.Tensor, stem: str) -> tuple[Tensors, torch.Tensor]:
    """bfloat16."""
    return {f"{stem}.weight": weight.bfloat16()}, weight.bfloat16().float()


def _sparse(
    weight: torch.Tensor, stem: str, *, pack: Pack, encode: Callable[[torch.Tensor, str], Tensors]
) -> tuple[Tensors, torch.Tensor]:
    """2:4 of another format, whose matrix is then stored without its zeros."""
    tensors, values = pack(pruned_24(weight), stem)
    return tensors | encode(tensors.pop(f"{stem}.weight"), stem), values


@dataclass(frozen=True, kw_only=True)
class PublishedFormat:
    """How one kind of published checkpoint is quantised: its configuration, and its layers.

    `error` bounds the relative error of a matrix of normally distributed weights.
    """

    config: Mapping[str, Any]
    pack: Pack
    error: float
    file: str = "config.json"


def _groups(name: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    group = {"input_activations": inputs, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": group},
        "format": name,
        "global_compression_ratio": None,
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    }


def _only_sparse(kind: str) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "sparsity_config": sparsity(kind),
        "transform_config": {},
        "version": "0.12.2",
    }


def _weights(bits: int, kind: str, strategy: str, group_size: int | None, **more: Any) -> dict[str, Any]:
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": group_size,
        "num_bits": bits,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": strategy,
        "symmetric": True,
        "type": kind,
    } | more


_GPTQ_CONFIG = {
    "bits": 4,
    "checkpoint_format": "gptq",
    "desc_act": False,
    "dynamic": {"-:.*\\.gate$": {}},
    "group_size": 128,
    "lm_head": False,
    "meta": {"quantizer": ["gptqmodel:2.2.0"], "damp_percent": 0.01, "static_groups": False, "true_sequential": True},
    "pack_dtype": "int32",
    "quant_method": "gptq",
    "sym": True,
}
_AWQ_CONFIG = {
    "backend": "autoawq",
    "bits": 4,
    "do_fuse": False,
    "group_size": 128,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}
_BLOCK_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
_MODELOPT_GROUP = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
_MODELOPT_CONFIG = {
    "config_groups": {
        "group_0": {"input_activations": _MODELOPT_GROUP, "weights": _MODELOPT_GROUP, "targets": ["Linear"]}
    },
    "ignore": ["lm_head"],
    "quant_algo": "NVFP4",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.37.0"},
    "quant_method": "modelopt",
}
_MODELOPT_FILE = {
    "producer": {"name": "modelopt", "version": "0.23.0"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}
_TOKEN_INPUTS = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True, "type": "int"}

FORMATS: Mapping[str, PublishedFormat] = {
    "gptq": PublishedFormat(config=_GPTQ_CONFIG, pack=_gptq, error=0.15),
    "awq": PublishedFormat(config=_AWQ_CONFIG, pack=_awq, error=0.15),
    "fp8_blocks": PublishedFormat(
        config=_BLOCK_CONFIG, pack=partial(_float8, block=(128, 128), scale="weight_scale_inv"), error=0.04
    ),
    "int4": PublishedFormat(
        config=_groups("pack-quantized", _weights(4, "int", "group", 128)),
        pack=partial(_packed, bits=4, group_size=128),
        error=0.15,
    ),
    "int8": PublishedFormat(
        config=_groups("pack-quantized", _weights(8, "int", "channel", None)),
        pack=partial(_packed, bits=8, group_size=-1),
        error=0.02,
    ),
    "int8_activations": PublishedFormat(
        config=_groups("int-quantized", _weights(8, "int", "channel", None), _TOKEN_INPUTS), pack=_bytes, error=0.02
    ),
    "int8_zeros": PublishedFormat(
        config=_groups("int-quantized", _weights(8, "int", "channel", None, symmetric=False), _TOKEN_INPUTS),
        pack=partial(_bytes, is_symmetric=False),
        error=0.02,
    ),
    "fp8_channel": PublishedFormat(
        config=_groups("float-quantized", _weights(8, "float", "channel", None), _TOKEN_INPUTS | {"type": "float"}),
        pack=partial(_float8, block=(1, -1), scale="weight_scale"),
        error=0.04,
    ),
    "fp8_tensor": PublishedFormat(
        config=_groups("naive-quantized", _weights(8, "float", "tensor", None)),
        pack=partial(_float8, block=(-1, -1), scale="weight_scale", is_scalar=True),
        error=0.04,
    ),
    "fp8_modelopt": PublishedFormat(
        config=_MODELOPT_FILE,
        pack=partial(_float8, block=(-1, -1), scale="weight_scale", is_scalar=True),
        error=0.04,
        file="hf_quant_config.json",
    ),
    "nvfp4": PublishedFormat(
        config=_groups(
            "nvfp4-pack-quantized",
            _weights(4, "float", "tensor_group", 16),
            _weights(4, "float", "tensor_group", 16, dynamic="local"),
        ),
        pack=partial(_float4, is_modelopt=False),
        error=0.12,
    ),
    "nvfp4_modelopt": PublishedFormat(config=_MODELOPT_CONFIG, pack=partial(_float4, is_modelopt=True), error=0.12),
    "sparse_24": PublishedFormat(
        config=_only_sparse("sparse-24-bitmask"), pack=partial(_sparse, pack=_halves, encode=sparse_24), error=0.45
    ),
    "sparse_rows": PublishedFormat(
        config=_only_sparse("sparse-bitmask"), pack=partial(_sparse, pack=_halves, encode=sparse_rows), error=0.45
    ),
    "fp8_sparse_24": PublishedFormat(
        config=_groups("float-quantized", _weights(8, "float", "channel", None))
        | {"sparsity_config": sparsity("sparse-24-bitmask")},
        pack=partial(_sparse, pack=partial(_float8, block=(1, -1), scale="weight_scale"), encode=sparse_24),
        error=0.45,
    ),
    "int8_sparse_24": PublishedFormat(
        config=_groups("int-quantized", _weights(8, "int", "channel", None))
        | {"sparsity_config": sparsity("sparse-24-bitmask")},
        pack=partial(_sparse, pack=_bytes, encode=sparse_24),
        error=0.45,
    ),
    "int8_sparse_rows": PublishedFormat(
        config=_groups("int-quantized", _weights(8, "int", "channel", None))
        | {"sparsity_config": sparsity("sparse-bitmask")},
        pack=partial(_sparse, pack=_bytes, encode=sparse_rows),
        error=0.45,
    ),
}


# Sizes that neither blocks of 128 nor two ranks' cuts divide.
_SIZES = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32}
MODELS: Mapping[str, Tiny] = {
    "qwen3": Tiny(kind="Qwen3", config={**ZOO["qwen3"].config, **_SIZES, "intermediate_size": 304}),
    "qwen3_moe": Tiny(
        kind="Qwen3Moe",
        config={**ZOO["qwen3_moe"].config, **_SIZES, "intermediate_size": 304, "moe_intermediate_size": 160},
    ),
    "qwen3_moe_stacked": Tiny(
        kind="Qwen3Moe",
        config={**ZOO["qwen3_moe"].config, **_SIZES, "intermediate_size": 304, "moe_intermediate_size": 160},
        is_stacked=True,
    ),
    "deepseek_v3": Tiny(
        kind="DeepseekV3",
        config={
            **ZOO["deepseek_v3"].config,
            **{"hidden_size": 192, "intermediate_size": 304, "moe_intermediate_size": 160, "kv_lora_rank": 136},
            **{"q_lora_rank": 144, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
        },
    ),
}


def save_published(tiny: Tiny, folder: Path, kind: str) -> Path:
    """Save a checkpoint in one of the formats; the same weights in floating point go to the folder returned.

    Every linear layer but the routers and the head is quantised, as publishers do, and stacks of experts where the
    format has a name for their scales. A DeepSeek-V3 has a layer more, which predicts tokens beyond the next.
    """
    given = FORMATS[kind]
    tiny.save(folder)
    plain = load_file(folder / "model.safetensors")
    if tiny.kind == "DeepseekV3":
        plain |= _further_layer(plain)
    packed = dict(plain)
    for name, tensor in list(plain.items()):
        if _LINEAR.search(name):
            del packed[name]
            tensors, plain[name] = given.pack(tensor, name.removesuffix(".weight"))
            packed |= tensors
        elif _STACK.search(name):
            found = [given.pack(matrix, "x") for matrix in tensor]
            plain[name] = torch.stack([weight for _, weight in found])
            packed[name] = torch.stack([tensors["x.weight"] for tensors, _ in found])
            packed[f"{name}_scale_inv"] = torch.stack([tensors["x.weight_scale_inv"] for tensors, _ in found])
        else:
            continue
        assert (plain[name] - tensor).norm() <= given.error * tensor.norm()
    float_folder = folder.with_name(f"{folder.name}-float")
    float_folder.mkdir()
    for path in folder.iterdir():
        (float_folder / path.name).write_bytes(path.read_bytes())
    for tensors, place in ((plain, float_folder), (packed, folder)):
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, place / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    if given.file == "config.json":
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": given.config}))
    else:
        (folder / given.file).write_text(json.dumps(given.config))
    return float_folder


def save_mxfp4(folder: Path) -> Any:
    """Save a gpt-oss with experts in MXFP4; returns the model in transformers with the weights that they stand for.

    Two ranks cut its blocks of 32 in half.
    """
    tiny = Tiny(kind="GptOss", config=dict(ZOO["gpt_oss"].config) | {"hidden_size": 64, "intermediate_size": 96})
    model = tiny.save(folder)
    path, generator = folder / "model.safetensors", torch.Generator().manual_seed(5)
    tensors = load_file(path)
    for name, parameter in model.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        stack, num_inputs, num_outputs = parameter.shape
        shape = (stack, num_outputs, num_inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, shape, generator=generator, dtype=torch.uint8)
        parameter.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    return model


PROMPTS = [list(range(40, 63)), [7, 8, 9, 10, 11, 12]]


def expected_logits(float_folder: Path) -> list[torch.Tensor]:
    """What transformers computes of the prompts with the checkpoint of a folder, by its slowest and plainest code."""
    model = AutoModelForCausalLM.from_pretrained(float_folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return [model(torch.tensor([ids])).logits[0] for ids in PROMPTS]


def _further_layer(tensors: Tensors) -> Tensors:
    """The layer of DeepSeek-V3 that lies behind the last."""
    stem, last = f"model.layers.{LAYERS}.", f"model.layers.{LAYERS - 1}."
    found = {
        stem + name.removeprefix(last): tensor.clone() for name, tensor in tensors.items() if name.startswith(last)
    }
    size = tensors["model.norm.weight"].numel()
    for name in ("enorm", "hnorm", "shared_head.norm"):
        found[f"{stem}{name}.weight"] = torch.ones(size)
    for name in ("embed_tokens", "shared_head.head"):
        found[f"{stem}{name}.weight"] = torch.ones(VOCAB_SIZE, size)
    return found | {f"{stem}eh_proj.weight": torch.randn(size, 2 * size)}
