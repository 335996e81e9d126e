"""The fused step against torch on every checkpoint of the zoo: precisions, ranks, company, memory, what is left out."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from funitel.model_server.cpu import build as building
from funitel.model_server.cpu.compiler import INSTRUCTION_SETS
from funitel.model_server.cpu.coverage import missing
from funitel.model_server.cpu.footprint import weight_bytes
from funitel.model_server.cpu.precision import Tier
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.registry.lookup import spec_of
from funitel_testing.forward_worker import BLOCK_SIZE, CPU, fused_decoder, run, step_through
from funitel_testing.threads import ThreadParallel, on_ranks
from funitel_testing.zoo import LAYERS, VOCAB_SIZE, ZOO

pytestmark = pytest.mark.skipif("avx2" not in building.cpu_flags(), reason="needs AVX2")

LEFT_TO_TORCH = {
    "llama_dynamic": "rotary scaling dynamic",
    "internlm2": "rotary scaling dynamic",
    "phi3_longrope": "rotary scaling longrope",
    "opt_350m": "embedding_size 24",
    "ministral3": "query_growth",
    "mistral4": "query_growth",
    "apertus": "activation xielu",
    "phimoe": "experts.score sparsemixer",
    "hunyuan": "is_qk_norm_last True",
    "hunyuan_moe": "is_qk_norm_last True",
    "cohere2_moe": "experts.shared_scale 0.5",
    "gpt_oss": "gate_limit 1.3",
    "gpt_oss_square": "gate_limit 7.0",
    **dict.fromkeys(("gemma3n", "gemma3n_flat", "gemma4", "gemma4_shared", "gemma4_unified"), "has_value_norm True"),
    "gemma4_moe": "has_value_norm True",
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), "indexer"),
    "afmoe": "has_output_gate True",
    "granite_swa": "has_sinks True",
    "granite_moe_swa": "has_sinks True",
    "llama4": "qk_norm plain",
    "qwen3_next": "layers with a state (delta_net)",
    "qwen3_next_biased": "layers with a state (delta_net)",
    "qwen3_5": "layers with a state (delta_net)",
    "qwen3_5_moe": "layers with a state (delta_net)",
    "lfm2": "layers with a state (short_conv)",
    "lfm2_moe": "layers with a state (short_conv)",
    "granite_hybrid": "layers with a state (mamba2)",
    "granite_hybrid_dense": "layers with a state (mamba2)",
    "nemotron_h": "layers with a state (mamba2)",
    "bamba": "layers with a state (mamba2)",
    "olmo_hybrid": "layers with a state (delta_net)",
    "olmo_hybrid_rope": "layers with a state (delta_net)",
    **dict.fromkeys(("falcon_h1", "falcon_h1_normed", "falcon_h1_gated_first"), "layers with a state (mamba2)"),
    "kimi_linear": "layers with a state (delta_net)",
    "mamba2": "layers with a state (mamba2)",
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba"), "layers with a state (mamba)"),
    "minimax": "layers with a state (lightning)",
}
FUSED = [name for name in ZOO if name not in LEFT_TO_TORCH]
# One for each thing that the step of a Llama lacks.
VARIED = ["gemma2", "gptj", "mpt", "olmo2", "cohere_plus", "bloom", "stablelm_2_12b", "granite"]
VARIED += ["mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v3"]
TOLERANCE = {Tier.FLOAT32: 1e-5, Tier.FLOAT16: 5e-3, Tier.INT8: 0.08}
NUM_DECODE = 4

Prompts = list[list[int]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders with the checkpoints of the zoo, each saved once."""

    @cache
    def save(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        ZOO[name].save(folder)
        return folder

    return save


def make_prompts(*lengths: int) -> Prompts:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def logits_of(
    folder: Path, prompts: Prompts, chunk: int = 11, instruction_set: str | None = None
) -> list[torch.Tensor]:
    spec = spec_of(read_json(folder / "config.json"))
    decoder = fused_decoder(folder, Tier.FLOAT32, TensorParallel(), instruction_set=instruction_set)
    pool = KVCache(spec, HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0), 200, BLOCK_SIZE, torch.float32, CPU)
    return step_through(decoder, pool, prompts, NUM_DECODE, chunk)


@pytest.mark.parametrize("name", FUSED)
def test_logits_are_those_of_torch_on_one_rank_and_on_two(name: str, saved: Callable[[str], Path]) -> None:
    folder = saved(name)
    spec = spec_of(read_json(folder / "config.json"))
    assert missing(spec) is None
    prompts = make_prompts(41, 9, 74)
    expected = torch.cat(run(folder, TensorParallel(), prompts, NUM_DECODE))
    forms = [(Tier.FLOAT32, 1), (Tier.FLOAT32, 2), (Tier.FLOAT16, 1), (Tier.INT8, 1), (Tier.INT8, 2)]
    for tier, size in forms if spec.experts is None else (forms[0], forms[1], forms[4]):

        def forward(parallel: TensorParallel, tier: Tier = tier) -> list[torch.Tensor]:
            return run(folder, parallel, prompts, NUM_DECODE, tier)

        found = torch.cat(on_ranks(size, forward))
        if spec.experts is None or tier is Tier.FLOAT32:
            difference = (found - expected).norm() / expected.norm()
        else:  # rounding sends a token to another expert now and then, and that one alone is far off
            difference = ((found - expected).norm(dim=1) / expected.norm(dim=1)).median()
        assert difference.item() < TOLERANCE[tier], (tier, size)


@pytest.mark.parametrize("name", FUSED)
def test_weights_take_what_was_predicted_on_every_rank(name: str, saved: Callable[[str], Path]) -> None:
    folder = saved(name)
    spec = spec_of(read_json(folder / "config.json"))
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        parallel = TensorParallel(rank, size)
        held = fused_decoder(folder, Tier.INT8, parallel, num_threads=1).program.held_bytes
        assert weight_bytes(spec, parallel, Tier.INT8, lambda layer, columns: None) == held


@pytest.mark.parametrize("name", VARIED)
def test_a_row_has_the_same_bits_in_any_company_and_on_every_instruction_set(
    name: str, saved: Callable[[str], Path]
) -> None:
    folder = saved(name)
    prompts = make_prompts(41, 9, 74)
    expected = logits_of(folder, prompts)
    others = [[logits_of(folder, [prompt])[0] for prompt in prompts], logits_of(folder, prompts, chunk=100)]
    for instruction_set, needs, _ in INSTRUCTION_SETS:
        if needs <= building.cpu_flags():
            others.append(logits_of(folder, prompts, instruction_set=instruction_set))
    assert all(torch.equal(*pair) for found in others for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["gemma2", "bloom"])
def test_scores_of_long_contexts_are_changed_alike_in_every_part(name: str, saved: Callable[[str], Path]) -> None:
    """Caps and slopes in contexts of several parts: split between items when decoding, walked by one in a chunk."""
    folder = saved(name)
    prompts = make_prompts(340)
    expected = run(folder, TensorParallel(), prompts, 1)[0]
    spec = spec_of(read_json(folder / "config.json"))
    decoder = fused_decoder(folder, Tier.FLOAT32, TensorParallel())
    pool = KVCache(spec, HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0), 200, BLOCK_SIZE, torch.float32, CPU)
    found = step_through(decoder, pool, prompts, 1, 97)[0]
    assert ((found - expected).norm() / expected.norm()).item() < TOLERANCE[Tier.FLOAT32]
    assert torch.equal(step_through(decoder, pool, prompts, 150, 97)[0], found)


@pytest.mark.parametrize(("name", "per_layer"), [("gpt_neox", 1), ("gpt_neox_sequential", 2)])
def test_a_parallel_block_is_summed_over_the_ranks_once(
    name: str, per_layer: int, saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sums, all_reduce = [], ThreadParallel.all_reduce

    def count(parallel: ThreadParallel, x: torch.Tensor) -> torch.Tensor:
        sums.append(parallel.rank)
        return all_reduce(parallel, x)

    monkeypatch.setattr(ThreadParallel, "all_reduce", count)
    folder = saved(name)
    on_ranks(2, lambda parallel: run(folder, parallel, [[1, 2, 3]], 0, Tier.FLOAT32))
    assert sums.count(0) == sums.count(1) == 1 + LAYERS * per_layer  # the embedding's first


@pytest.mark.parametrize("name", LEFT_TO_TORCH)
def test_what_the_step_does_not_know_is_left_to_torch(name: str) -> None:
    tiny = ZOO[name]
    config = tiny.family_config or {**tiny.configure().to_dict(), "architectures": [tiny.architecture]}
    assert missing(spec_of(dict(config))) == LEFT_TO_TORCH[name]
