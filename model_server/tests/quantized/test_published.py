"""Checkpoints as they are published: logits of transformers' class with the weights that the format stands for."""

import json
from pathlib import Path

import pytest
import torch

from funitel.model_server.cpu import build as building
from funitel.model_server.cpu.precision import Tier
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel_testing import forward_worker
from funitel_testing.published import FORMATS, MODELS, PROMPTS, expected_logits, save_published
from funitel_testing.ranks import run_ranks
from funitel_testing.servers import free_port
from funitel_testing.threads import on_ranks

NUM_DECODE = 3
TOLERANCE = 1e-4
MIXTURES = (("deepseek_v3", "fp8_blocks"), ("qwen3_moe", "gptq"), ("qwen3_moe_stacked", "fp8_blocks"))
CASES = [*MIXTURES, ("qwen3_moe", "nvfp4"), ("qwen3_moe", "int4"), *(("qwen3", kind) for kind in FORMATS)]


def worst(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((ours - theirs).abs().max()) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_logits_are_those_of_transformers_dequantised(name: str, kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    expected = expected_logits(save_published(MODELS[name], folder, kind))
    for size in (1, 2):
        found = on_ranks(size, lambda parallel: forward_worker.run(folder, parallel, PROMPTS, NUM_DECODE))
        assert worst(found, expected) < TOLERANCE


@pytest.mark.skipif("avx2" not in building.cpu_flags(), reason="the fused step needs AVX2")
@pytest.mark.parametrize(("name", "kind"), MIXTURES)
def test_the_fused_step_says_the_same_on_one_rank_and_on_two(name: str, kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    expected = expected_logits(save_published(MODELS[name], folder, kind))
    assert worst(forward_worker.run(folder, TensorParallel(), PROMPTS, NUM_DECODE, Tier.FLOAT32), expected) < 1e-3
    job = {"folder": str(folder), "prompts": PROMPTS, "num_decode": NUM_DECODE, "size": 2, "port": free_port()}
    (tmp_path / "job.json").write_text(json.dumps(job | {"tiers": [Tier.FLOAT32.name, Tier.FLOAT16.name]}))
    run_ranks(forward_worker.serve_rank, tmp_path, 2)
    exact, halves, shared = torch.load(tmp_path / "logits.pt", weights_only=True)
    assert worst(exact, expected) < 1e-3
    scale = max(float(each.abs().max()) for each in expected)
    assert worst(halves, expected) < 0.02 * scale
    assert worst(shared, expected) < 0.02 * scale
