"""The demo model with small weights and small keys and values: as close to float32 as the documentation says."""

from pathlib import Path

import pytest
import torch

from funitel.model_server.cpu.build import cpu_flags
from funitel.model_server.cpu.precision import ActivationDtype, Tier
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.loading.generator import load_generator
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.model_server.settings import ModelServerSettings
from funitel_testing.executors import ids_of, load_executor, run_alone, start
from funitel_testing.forward_worker import run

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a fox",
    "Water boils at a temperature of",
    "def add(a, b):\n    return",
    "The three primary colours are",
]
NUM_TOKENS = 32


@pytest.fixture(scope="module")
def prompts(demo_model: Path) -> list[list[int]]:
    codec = TextCodec(demo_model)
    return [codec.encode(text, add_special_tokens=False) for text in PROMPTS]


@pytest.fixture(autouse=True)
def _fused() -> None:
    if "avx2" not in cpu_flags():
        pytest.skip("the fused step needs AVX2")


def texts(folder: Path, prompts: list[list[int]], kind: str) -> list[list[int]]:
    executor = load_executor(folder, kv_cache_dtype=kind, enable_prefill_logprobs=False)
    return [ids_of(run_alone(executor, start(1 + i, ids, NUM_TOKENS))) for i, ids in enumerate(prompts)]


def test_keys_and_values_of_8_bits_change_no_greedy_text(demo_model: Path, prompts: list[list[int]]) -> None:
    """Beside weights in float32; activations of 8 bits decide ties otherwise, with any keys and values."""
    expected = texts(demo_model, prompts, "float16")
    assert [len(ids) for ids in expected] == [NUM_TOKENS] * len(prompts)
    assert texts(demo_model, prompts, "int8") == expected


def test_weights_and_activations_of_8_bits_give_nearly_the_same_logits(
    demo_model: Path, prompts: list[list[int]]
) -> None:
    """Of all of them, and of the worst position somewhat less."""
    exact = torch.cat(run(demo_model, TensorParallel(), prompts, 4, Tier.FLOAT32))
    for activations in ActivationDtype:
        found = torch.cat(run(demo_model, TensorParallel(), prompts, 4, Tier.INT8, activations=activations))
        assert torch.cosine_similarity(found.flatten(), exact.flatten(), dim=0) > 0.999
        assert torch.cosine_similarity(found, exact, dim=1).min() > 0.97
        assert not torch.equal(found, exact)


def test_memory_is_the_sum_over_formats_of_tensors(demo_model: Path) -> None:
    """Layers of the MLP with 4 bits, those of attention with 8; norms stay in float32."""
    chosen = {"device": "cpu", "num_threads": 1, "quantize": "q8", "quantize_tensors": "mlp=q4_b32t1a"}
    _, info = load_generator(ModelServerSettings(model_id=str(demo_model), **chosen), demo_model)
    attention, mlp = (576 + 2 * 192 + 576) * 576, 3 * 576 * 1536
    norms, table = 61 * 576 * 4, 49152 * 576
    assert info.weight_bytes == (30 * attention + table) // 32 * 34 + 30 * mlp // 32 * 20 + norms
