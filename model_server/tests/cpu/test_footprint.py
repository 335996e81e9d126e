"""Memory is known before it is taken: weights by the spec alone, and what the system then says the process has."""

import json
from pathlib import Path

import pytest
import torch

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu.footprint import weight_bytes
from funitel.model_server.cpu.precision import Tier
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.models.footprint import torch_weight_bytes
from funitel.model_server.registry.lookup import spec_of
from funitel_testing import memory_worker
from funitel_testing.forward_worker import fused_decoder
from funitel_testing.ranks import run_ranks
from funitel_testing.tiny import FAMILIES, save_tiny
from funitel_testing.tiny_blocks import add_blocks
from funitel_testing.zoo import ZOO

CPU = torch.device("cpu")


@pytest.mark.parametrize("tier", [Tier.INT8, Tier.FLOAT16, Tier.FLOAT32], ids=lambda tier: tier.label)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_take_what_was_predicted_on_every_rank(family: str, tier: Tier, tmp_path: Path) -> None:
    folder = save_tiny(family, tmp_path)
    spec = spec_of(read_json(folder / "config.json"))
    for rank, size in ((0, 1), (0, 3), (2, 3), (3, 4)):
        parallel = TensorParallel(rank, size)
        assert (
            weight_bytes(spec, parallel, tier, lambda layer, columns: None)
            == fused_decoder(folder, tier, parallel).program.held_bytes
        )


@pytest.mark.parametrize("name", ["gemma2", "opt_350m", "qwen2_moe", "deepseek_v2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_takes_what_was_predicted_on_every_rank(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    ZOO[name].save(tmp_path)
    spec = spec_of(read_json(tmp_path / "config.json"))
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        weights = Weights(tmp_path, dtype, CPU, spec.names.prefix, is_shown=False)
        Decoder(spec, weights, TensorParallel(rank, size), TorchAttention(4, CPU))
        assert torch_weight_bytes(spec, rank, size, dtype, CPU) == weights.held_bytes


def test_the_process_has_as_much_memory_as_was_predicted(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(demo_model)
    run_ranks(memory_worker.load_and_fill_pools, tmp_path, 1)
    results = json.loads((tmp_path / "loads.json").read_text())
    assert results.keys() == {"gguf", "int8", "torch.float16", "torch.float32"}
    for tier, (weights, measured, pool, used) in results.items():
        assert measured == pytest.approx(weights, rel=0.1), tier
        assert used == pytest.approx(pool, rel=0.1), tier


def test_a_step_takes_what_was_predicted_at_its_peak(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4}
    folder = save_tiny("llama", tmp_path / "model", **sizes, head_dim=64, num_hidden_layers=1)
    add_blocks(folder, lambda name: "Q4_0")
    run_ranks(memory_worker.take_steps, tmp_path, 1)
    results = json.loads((tmp_path / "steps.json").read_text())
    assert results.keys() == {"gguf", "int8", "float32"}
    for tier, (predicted, measured) in results.items():
        assert measured == pytest.approx(predicted, rel=0.1), tier
