"""gpt-oss as published, experts in MXFP4: the same numbers as transformers makes of them, on one rank and on two."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.models.footprint import torch_weight_bytes
from funitel.model_server.registry.lookup import choose_spec
from funitel.model_server.tools.spec import check
from funitel.proto.errors import WeightsError
from funitel_testing import forward_worker
from funitel_testing.families import TOLERANCE
from funitel_testing.published import save_mxfp4
from funitel_testing.threads import on_ranks

CPU = torch.device("cpu")
STEM = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize("size", [1, 2])
def test_logits_are_those_of_transformers(size: int, tmp_path: Path) -> None:
    model = save_mxfp4(tmp_path)
    prompts = [list(range(40)), [7, 8, 9, 10, 11]]
    with torch.inference_mode():
        expected = [model(torch.tensor([ids])).logits[0] for ids in prompts]
    found = on_ranks(size, lambda parallel: forward_worker.run(tmp_path, parallel, prompts, 3))
    assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) < TOLERANCE


def test_numbers_are_exact_in_bfloat16_and_in_parts(tmp_path: Path) -> None:
    model = save_mxfp4(tmp_path)
    expected = model.get_parameter(STEM)[2].t()
    weights = Weights(tmp_path, torch.bfloat16, CPU, "model.", is_shown=False)
    name = f"{STEM}[2]"
    assert torch.equal(weights.read_linear(name, 64, 96, is_transposed=True).float(), expected)
    part = weights.read_linear(name, 64, 96, rows=(3, 50), columns=(17, 71), is_transposed=True)
    assert torch.equal(part.float(), expected[3:50, 17:71])


def test_the_memory_is_that_of_floating_point(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    spec = choose_spec(None, tmp_path)
    weights = Weights(tmp_path, torch.float32, CPU, spec.names.prefix, is_shown=False)
    forward_worker.Decoder(spec, weights, TensorParallel(), forward_worker.TorchAttention(4, CPU))
    assert torch_weight_bytes(spec, 0, 1, torch.float32, CPU) == weights.held_bytes


def test_what_is_missing_or_misshapen_is_one_line(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    assert check(tmp_path, None) == []
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    scales = tensors.pop(f"{STEM}_scales")
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(WeightsError, match=f"the checkpoint lacks tensor {STEM}_scales"):
        forward_worker.run(tmp_path, TensorParallel(), [[1, 2]], 1)
    for exponent in (253, 255):
        bad = scales.clone()
        bad[3, 5, 1] = exponent
        save_file(tensors | {f"{STEM}_scales": bad}, path, {"format": "pt"})
        line = f"tensor {STEM}_scales holds the scale {exponent}; scales must be at most 252"
        with pytest.raises(WeightsError, match=line):
            forward_worker.run(tmp_path, TensorParallel(), [[1, 2]], 1)
    save_file(tensors | {f"{STEM}_scales": scales[:, 1:].contiguous()}, path, {"format": "pt"})
    with pytest.raises(WeightsError, match=rf"tensor {STEM}_scales has shape \[6, 63, 3\], expected \[6, 64, 3\]"):
        forward_worker.run(tmp_path, TensorParallel(), [[1, 2]], 1)
