"""Small random LoRA adapters in PEFT's layout, and the models that they merge into."""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class TinyAdapter:
    """What a random adapter is made of.

    `targets` are ends of module names, `saved` modules with a weight of their own; patterns are PEFT's. Modules have
    the names of the checkpoint's tensors, without `.weight`.
    """

    rank: int
    targets: Sequence[str]
    alpha: float = 16.0
    is_rank_stabilised: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    layers: Sequence[int] | None = None
    saved: Sequence[str] = ()
    scale: float = 0.2  # of random numbers

    def config(self) -> dict[str, Any]:
        """The content of adapter_config.json."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "tiny",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "use_rslora": self.is_rank_stabilised,
            "use_dora": False,
            "rank_pattern": dict(self.rank_pattern),
            "alpha_pattern": dict(self.alpha_pattern),
            "layers_to_transform": None if self.layers is None else list(self.layers),
            "target_modules": list(self.targets),
            "modules_to_save": list(self.saved) or None,
        }

    def rank_of(self, module: str) -> int:
        """The rank of a module."""
        return next((rank for end, rank in self.rank_pattern.items() if module.endswith(end)), self.rank)

    def scale_of(self, module: str) -> float:
        """What the product of its matrices is multiplied by."""
        alpha = next((value for end, value in self.alpha_pattern.items() if module.endswith(end)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)

    def has(self, module: str) -> bool:
        """Whether a module is a target."""
        numbers = [int(part) for part in module.split(".") if part.isdigit()]
        if self.layers is not None and not set(numbers) & set(self.layers):
            return False
        return any(module.endswith(f".{end}") or module == end for end in self.targets)


EIGHT = (
    TinyAdapter(rank=4, targets=("q_proj", "v_proj")),
    TinyAdapter(rank=8, targets=("q_proj", "k_proj", "v_proj", "o_proj"), alpha=8.0, is_rank_stabilised=True),
    TinyAdapter(rank=3, targets=("gate_proj", "up_proj", "down_proj")),
    TinyAdapter(rank=16, targets=("up_proj", "o_proj"), rank_pattern={"o_proj": 5}, alpha_pattern={"up_proj": 4.0}),
    TinyAdapter(rank=1, targets=("down_proj", "k_proj"), layers=(1,)),
    TinyAdapter(rank=6, targets=("q_proj", "lm_head", "embed_tokens")),
    TinyAdapter(rank=7, targets=("v_proj", "gate_proj"), saved=("lm_head", "embed_tokens")),
    TinyAdapter(rank=2, targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
)
"""Adapters of a Llama: of different ranks and targets, with rslora, patterns, layers, embeddings and saved heads."""


def base_tensors(folder: Path) -> Tensors:
    """The tensors of a checkpoint of one file."""
    return load_file(folder / "model.safetensors")


def save_adapter(base: Path, folder: Path, made: TinyAdapter, seed: int = 0, *, is_transposed: bool = False) -> Path:
    """Save a random adapter of the checkpoint in `base` to `folder`; `is_transposed` as the family stores matrices."""
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * made.scale

    for name, weight in sorted(base_tensors(base).items()):
        module = name.removesuffix(".weight")
        if not name.endswith(".weight") or weight.dim() != 2:
            continue
        rank, (outputs, inputs) = made.rank_of(module), weight.shape
        if is_transposed:
            outputs, inputs = inputs, outputs
        if made.has(module) and module.endswith("embed_tokens"):
            tensors[f"base_model.model.{module}.lora_embedding_A"] = drawn(rank, outputs)
            tensors[f"base_model.model.{module}.lora_embedding_B"] = drawn(inputs, rank)
        elif made.has(module):
            tensors[f"base_model.model.{module}.lora_A.weight"] = drawn(rank, inputs)
            tensors[f"base_model.model.{module}.lora_B.weight"] = drawn(outputs, rank)
        if any(module.endswith(end) for end in made.saved):
            tensors[f"base_model.model.{module}.weight"] = weight + drawn(*weight.shape)
    write_adapter(folder, made.config(), tensors)
    return folder


def write_adapter(folder: Path, config: dict[str, Any], tensors: Tensors) -> None:
    """Write the two files of a PEFT folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def merge(base: Path, adapter: Path, made: TinyAdapter, folder: Path, *, is_transposed: bool = False) -> Path:
    """Save the checkpoint of `base` with the adapter added to its weights."""
    weights, tensors = base_tensors(base), load_file(adapter / "adapter_model.safetensors")
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    for name, tensor in tensors.items():
        inner = name.removeprefix("base_model.model.")
        if inner in weights:
            weights[inner] = tensor.clone()
    for name, a in tensors.items():
        module, _, kind = name.removeprefix("base_model.model.").partition(".lora_")
        if kind not in ("A.weight", "embedding_A"):
            continue
        b = tensors[name.replace("lora_A", "lora_B").replace("embedding_A", "embedding_B")]
        grown = (b @ a) * made.scale_of(module)
        weights[f"{module}.weight"] += grown.t() if is_transposed or kind == "embedding_A" else grown
    shutil.copytree(base, folder, dirs_exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
