"""What the precisions of the fused CPU step add to the rounding of weights: little."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from funitel.model_server.cpu.build import cpu_flags
from funitel.model_server.cpu.precision import ActivationDtype, Tier
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel_testing.forward_worker import run
from funitel_testing.tiny import save_tiny

pytestmark = pytest.mark.skipif("avx2" not in cpu_flags(), reason="needs AVX2")

FAMILIES = pytest.mark.parametrize("family", ["llama", "smollm", "mistral", "qwen3"])
PROMPTS = [[(7 * i * i + 3 * i) % 256 for i in range(length)] for length in (90, 31)]


def logits_of(
    folder: Path, tier: Tier | None = None, activations: ActivationDtype = ActivationDtype.INT8
) -> torch.Tensor:
    return torch.cat(run(folder, TensorParallel(), PROMPTS, 6, tier, activations=activations))


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def save_rounded(folder: Path, target: Path) -> Path:
    """A copy of a model with matrices as int8 rounds them: 127 levels to either side for each output."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    for name, weight in tensors.items():
        if weight.dim() == 2:
            most = weight.abs().amax(dim=1, keepdim=True)
            tensors[name] = (weight * (127 / most)).round() * (most / 127)
    save_file(tensors, target / "model.safetensors")
    return target


@FAMILIES
def test_float16_is_within_a_hundredth_of_float32(family: str, tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path)
    assert error_of(logits_of(folder, Tier.FLOAT16), logits_of(folder)) < 1e-2


@FAMILIES
@pytest.mark.parametrize(("activations", "most"), [(ActivationDtype.INT16, 2e-3), (ActivationDtype.INT8, 6e-2)])
def test_int8_is_near_torch_with_the_same_weights(
    activations: ActivationDtype, most: float, family: str, tmp_path: Path
) -> None:
    folder = save_tiny(family, tmp_path / "exact")
    found = logits_of(folder, Tier.INT8, activations)
    assert error_of(found, logits_of(save_rounded(folder, tmp_path / "rounded"))) < most
    assert error_of(found, logits_of(folder)) > 5e-3  # weights have been rounded
