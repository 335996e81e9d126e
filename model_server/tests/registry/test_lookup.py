"""Every family of the table against transformers: same logits in torch and fused, chunked, decoded, on 1 to 4 ranks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from funitel.model_server.cpu.precision import Tier
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.registry.lookup import spec_of
from funitel.proto.errors import UnsupportedModel
from funitel_testing import forward_worker
from funitel_testing.ranks import run_ranks
from funitel_testing.servers import free_port
from funitel_testing.tiny import FAMILIES, save_tiny
from funitel_testing.zoo import ZOO

TOLERANCE = 1e-4
# (row lengths of the prompt chunks of each sequence): contexts of uneven length, one longer than the small windows
PROMPTS = (37, 5, 70)
NUM_DECODE = 6


def make_prompts(vocab_size: int) -> list[list[int]]:
    """Fixed random prompts plus the tokens each is then decoded with."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, vocab_size, (length + NUM_DECODE,), generator=generator).tolist() for length in PROMPTS]


def oracle_logits(folder: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [model(torch.tensor([ids])).logits[0] for ids in prompts]


def rank_logits(folder: Path, prompts: list[list[int]], size: int, tmp_path: Path) -> list[list[torch.Tensor]]:
    """Run `size` ranks, each a process of its own, and return rank 0's logits.

    In torch and by the fused step through gloo, and by the fused step in shared memory.
    """
    job = {"folder": str(folder), "prompts": prompts, "num_decode": NUM_DECODE, "size": size, "port": free_port()}
    (tmp_path / "job.json").write_text(json.dumps(job | {"tiers": ["", Tier.FLOAT32.name]}))
    run_ranks(forward_worker.serve_rank, tmp_path, size)
    logits: list[list[torch.Tensor]] = torch.load(tmp_path / "logits.pt", weights_only=True)
    return logits


@pytest.mark.parametrize("tier", [None, Tier.FLOAT32], ids=["torch", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tier: Tier | None, tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path / "model")
    prompts = make_prompts(288)
    expected = oracle_logits(folder, prompts)
    found = forward_worker.run(folder, TensorParallel(), prompts, NUM_DECODE, tier)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() < TOLERANCE


@pytest.mark.parametrize(("family", "size"), [("llama", 2), ("llama_bias", 3), ("gpt2", 3), ("qwen3", 2), ("olmo2", 4)])
def test_ranks_together_equal_transformers(family: str, size: int, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if family in FAMILIES:
        save_tiny(family, folder)
    else:
        ZOO[family].save(folder)  # rows of heads are normalised together, and some keys are on two ranks
    prompts = make_prompts(288)
    expected = oracle_logits(folder, prompts)
    logits = rank_logits(folder, prompts, size, tmp_path)
    for found in logits:
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours - theirs).abs().max() < TOLERANCE
    _, through_gloo, in_shared_memory = logits
    if size == 2:  # there is but one order to add two numbers in
        assert all(map(torch.equal, through_gloo, in_shared_memory))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["RwkvForCausalLM"]}, "RwkvForCausalLM is not supported: the nearest of"),
        ({}, "not named in config.json"),
        ({"architectures": ["BaichuanForCausalLM"]}, "lacks the field"),
    ],
)
def test_unknown_configs_are_refused_in_one_line(config: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        spec_of(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": "x"}, "value of the wrong kind"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": "a"}}, "value of the wrong kind"),
        ({"num_key_value_heads": 4}, "6 query heads do not divide into 4 key-value heads"),
        ({"num_attention_heads": 0, "head_dim": None}, "value of the wrong kind"),
    ],
)
def test_impossible_values_are_refused_in_one_line(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    folder = save_tiny("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match=message):
        spec_of(config | changes)


def test_a_stretched_spec_is_that_of_a_checkpoint_with_linear_scaling(tmp_path: Path) -> None:
    plain, linear = (save_tiny(family, tmp_path / family) for family in ("llama", "linear_rope"))
    found, expected = (spec_of(json.loads((folder / "config.json").read_text())) for folder in (plain, linear))
    stretched = found.stretched(2.0)
    assert stretched.max_position_embeddings == 2 * expected.max_position_embeddings
    assert expected.rotary.scaling.kind == "linear"
    assert replace(stretched, max_position_embeddings=256) == expected


def test_unknown_rope_is_refused(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "axial", "factor": 2.0}
    with pytest.raises(UnsupportedModel, match="axial"):
        spec_of(config)
