"""Pipeline stages and whole experts against the model in one piece, each rank a thread."""

from pathlib import Path

import pytest
import torch

from funitel.model_server.cpu.precision import Tier
from funitel.model_server.device.stages import StageLink
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.layers.mlp import held_experts
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.spec.stage_spec import with_experts
from funitel_testing import forward_worker
from funitel_testing.stages import Part, on_stages
from funitel_testing.threads import on_ranks
from funitel_testing.zoo import VOCAB_SIZE, ZOO

NUM_DECODE, SEED, TOLERANCE = 4, 5, 1e-4
# One of each data flow: tied, learned positions, states, shared keys with several streams and embeddings of layers,
# keys of two kinds of layers, latent attention with an indexer, MLPs alone between states.
FAMILIES = ("llama", "gpt2", "qwen3_next", "gemma3n", "gemma3", "deepseek_v32", "nemotron_h", "qwen2_moe")
FUSED = ("llama", "gpt2", "gemma3", "qwen2_moe", "deepseek_v2")


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCAB_SIZE, (n + NUM_DECODE,), generator=generator).tolist() for n in (37, 5, 20)]


def worst(expected: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    return max(float((ours - theirs).abs().max()) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("family", "tier"), [*((name, None) for name in FAMILIES), *((name, Tier.FLOAT32) for name in FUSED)]
)
def test_stages_of_two_ranks_give_the_logits_of_one(family: str, tier: Tier | None, tmp_path: Path) -> None:
    ZOO[family].save(tmp_path)
    expected = forward_worker.run(tmp_path, TensorParallel(), prompts(), NUM_DECODE, tier, seed=SEED)

    def work(parallel: TensorParallel, part: Part, link: StageLink) -> list[torch.Tensor]:
        return forward_worker.run(tmp_path, parallel, prompts(), NUM_DECODE, tier, seed=SEED, part=part, link=link)

    assert worst(expected, on_stages(2, 2, work)) < TOLERANCE


@pytest.mark.parametrize("tier", [None, Tier.INT8], ids=["torch", "int8"])
def test_stages_change_no_bit(tier: Tier | None, tmp_path: Path) -> None:
    ZOO["llama"].save(tmp_path)
    expected = forward_worker.run(tmp_path, TensorParallel(), prompts(), NUM_DECODE, tier, seed=SEED)

    def work(parallel: TensorParallel, part: Part, link: StageLink) -> list[torch.Tensor]:
        return forward_worker.run(tmp_path, parallel, prompts(), NUM_DECODE, tier, seed=SEED, part=part, link=link)

    assert all(map(torch.equal, on_stages(2, 1, work), expected))


@pytest.mark.parametrize("tier", [None, Tier.FLOAT32], ids=["torch", "fused"])
@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral", "deepseek_v3"])
def test_whole_experts_on_ranks_give_the_logits_of_parts(family: str, tier: Tier | None, tmp_path: Path) -> None:
    ZOO[family].save(tmp_path)

    def in_parts(parallel: TensorParallel) -> list[torch.Tensor]:
        return forward_worker.run(tmp_path, parallel, prompts(), NUM_DECODE, tier, seed=SEED)

    def whole(parallel: TensorParallel) -> list[torch.Tensor]:
        def part(spec: ModelSpec) -> ModelSpec:
            assert spec.experts is not None
            return with_experts(spec, held_experts(parallel, spec.experts.num_experts))

        parallel.spreads_experts = True
        return forward_worker.run(tmp_path, parallel, prompts(), NUM_DECODE, tier, seed=SEED, part=part)

    expected = on_ranks(2, in_parts)
    assert worst(expected, on_ranks(2, whole)) < TOLERANCE
    if family == "mixtral":
        assert worst(expected, on_ranks(4, whole)) < TOLERANCE
