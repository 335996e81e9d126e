"""Mixtures of experts and latent attention in the fused step: every kind of router, in company, in blocks, counted."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu import build as building
from funitel.model_server.cpu.compiler import INSTRUCTION_SETS
from funitel.model_server.cpu.coverage import missing
from funitel.model_server.cpu.decoder import FusedDecoder
from funitel.model_server.cpu.footprint import matrix_bytes, weight_bytes
from funitel.model_server.cpu.precision import ActivationDtype, MatrixKind, Tier
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.forward.batch import Forward, ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.layers.mlp import Router
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.spec.model_spec import (
    Activation,
    ExpertScore,
    ExpertsSpec,
    LatentSpec,
    ModelSpec,
    NormPlacement,
    RotarySpec,
)
from funitel.model_server.spec.tensor_names import TensorNames
from funitel_testing.forward_worker import BLOCK_SIZE, CPU, fused_decoder, fused_library, run, step_through
from funitel_testing.random_weights import RandomWeights
from funitel_testing.threads import on_ranks
from funitel_testing.tiny_blocks import add_blocks
from funitel_testing.zoo import ZOO, Tiny

pytestmark = pytest.mark.skipif("avx2" not in building.cpu_flags(), reason="needs AVX2")

SIZES = {"vocab_size": 51, "hidden_size": 45, "num_layers": 2, "intermediate_size": 37, "max_position_embeddings": 128}
PLAIN = ModelSpec(architecture="Test", num_heads=6, num_kv_heads=3, head_dim=22, **SIZES)
AFTER = {"attention_post_norm": "layers.{i}.after", "mlp_post_norm": "layers.{i}.last"}
SHARE = TensorNames(shared_share="layers.{i}.share")
CORRECTED = TensorNames(router_correction="layers.{i}.correction")
ROUTED = ExpertsSpec(num_experts=9, num_chosen=4, intermediate_size=19)
GROUPED = {"num_groups": 3, "num_chosen_groups": 2, "group_depth": 2}
LATENT = {"latent": LatentSpec(rank=21, value_dim=13), "num_heads": 5, "num_kv_heads": 1, "rotary": RotarySpec(dims=6)}
SPECS = {
    "one of many": replace(PLAIN, experts=replace(ROUTED, num_chosen=1, num_experts=70)),
    "all of them": replace(PLAIN, experts=replace(ROUTED, num_chosen=9, scale=0.3)),
    "groups of one": replace(PLAIN, experts=replace(ROUTED, num_groups=9, num_chosen_groups=5)),
    "sigmoids in groups, corrected, normalised and scaled": replace(
        PLAIN,
        experts=replace(ROUTED, score=ExpertScore.SIGMOID, is_normalized=True, scale=2.5, shared_size=11, **GROUPED),
        has_mlp_bias=True,
        names=CORRECTED,
    ),
    "a shared MLP that tokens take a share of, not gated": replace(
        PLAIN,
        experts=replace(ROUTED, shared_size=23, dense_layers=(0,)),
        is_gated=False,
        activation=Activation.RELU_SQUARED,
        names=SHARE,
    ),
    "beside attention in a parallel block": replace(
        PLAIN, experts=replace(ROUTED, shared_size=5), is_parallel=True, residual_scale=0.6
    ),
    "normalised after the sum": replace(
        PLAIN, experts=ROUTED, norm_placement=NormPlacement.AFTER, names=TensorNames(**AFTER)
    ),
    "latents within windows under a cap": replace(
        PLAIN, **LATENT, has_qkv_bias=True, has_out_bias=True, attention_softcap=2.0, sliding_windows=(7, None)
    ),
    "latents of queries, not turned in one layer, beside experts": replace(
        PLAIN,
        **LATENT | {"latent": LatentSpec(rank=32, value_dim=7, query_rank=9, norm_eps=1e-3)},
        experts=ROUTED,
        is_parallel=True,
        unrotated_layers=(1,),
        is_scaled_by_layer=True,
        has_norm_bias=True,
    ),
    "latents of more heads than are handled together": replace(
        PLAIN, **LATENT | {"num_heads": 26, "rotary": RotarySpec(dims=4, is_interleaved=True)}
    ),
}
# As tiny as blocks allow on two ranks.
_BLOCK_SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "head_dim": 16,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
}


def make_prompts(vocab_size: int, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def pool_of(spec: ModelSpec, parallel: TensorParallel, dtype: torch.dtype = torch.float32) -> KVCache:
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
    return KVCache(spec, heads, 400, BLOCK_SIZE, dtype, CPU)


def fused(spec: ModelSpec, parallel: TensorParallel, tier: Tier = Tier.FLOAT32, **given: Any) -> FusedDecoder:
    library = fused_library(given.pop("instruction_set", None))
    sizes = {"block_size": BLOCK_SIZE, "num_threads": 2} | given
    return FusedDecoder(spec, RandomWeights(), parallel, library, tier=tier, **sizes)


def logits_of(spec: ModelSpec, parallel: TensorParallel, decoder: Forward, chunk: int = 11) -> list[torch.Tensor]:
    dtype = decoder.kv_dtype if isinstance(decoder, FusedDecoder) else torch.float32
    return step_through(decoder, pool_of(spec, parallel, dtype), make_prompts(51, 30, 4, 17), 3, chunk)


@pytest.mark.parametrize("name", SPECS)
def test_logits_are_those_of_torch_on_any_number_of_ranks(name: str) -> None:
    spec = SPECS[name]
    assert missing(spec) is None
    oracle = Decoder(spec, RandomWeights(), TensorParallel(), TorchAttention(BLOCK_SIZE, CPU))
    expected = torch.cat(logits_of(spec, TensorParallel(), oracle))
    assert expected.std() > 0.1

    def forward(parallel: TensorParallel) -> torch.Tensor:
        decoder = fused(spec, parallel, num_threads=1)
        assert weight_bytes(spec, parallel, Tier.FLOAT32, lambda layer, columns: None) == decoder.program.held_bytes
        return torch.cat(logits_of(spec, parallel, decoder))

    for size in (1, 2, 4):
        assert ((on_ranks(size, forward) - expected).norm() / expected.norm()).item() < 1e-5, size


@pytest.mark.parametrize("tier", [Tier.FLOAT32, Tier.FLOAT16, Tier.INT8], ids=lambda tier: tier.label)
@pytest.mark.parametrize("name", [list(SPECS)[i] for i in (3, 4, 8, 9)])
def test_a_row_has_the_same_bits_in_any_company_chunks_threads_and_instruction_set(name: str, tier: Tier) -> None:
    spec, alone = SPECS[name], TensorParallel()
    decoder = fused(spec, alone, tier)
    expected = logits_of(spec, alone, decoder)
    prompts = make_prompts(51, 30, 4, 17)
    pool = pool_of(spec, alone, decoder.kv_dtype)
    others = [[step_through(decoder, pool, [prompt], 3)[0] for prompt in prompts]]
    others += [logits_of(spec, alone, decoder, chunk) for chunk in (1, 2, 7, 100)]
    others += [logits_of(spec, alone, fused(spec, alone, tier, num_threads=count)) for count in (1, 5)]
    for instruction_set, needs, _ in INSTRUCTION_SETS:
        if needs <= building.cpu_flags():
            others.append(logits_of(spec, alone, fused(spec, alone, tier, instruction_set=instruction_set)))
    assert all(torch.equal(*pair) for found in others for pair in zip(found, expected, strict=True))


def test_latents_of_long_contexts_have_the_same_bits_in_every_part() -> None:
    """Contexts of several parts: split between items when decoding, walked by one item in a chunk."""
    spec = replace(SPECS["latents within windows under a cap"], max_position_embeddings=1024)
    decoder, prompts = fused(spec, TensorParallel()), make_prompts(51, 600, 290)
    oracle = Decoder(spec, RandomWeights(), TensorParallel(), TorchAttention(BLOCK_SIZE, CPU))
    expected = step_through(decoder, pool_of(spec, TensorParallel()), prompts, 30, 97)
    for found in (
        step_through(decoder, pool_of(spec, TensorParallel()), prompts, 1, 251),
        [step_through(decoder, pool_of(spec, TensorParallel()), [prompt], 60, 64)[0] for prompt in prompts],
    ):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    theirs = torch.cat(step_through(oracle, pool_of(spec, TensorParallel()), prompts, 1, 300))
    assert ((torch.cat(expected) - theirs).norm() / theirs.norm()).item() < 1e-5


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [list(SPECS)[i] for i in (3, 8)])
def test_what_one_row_holds_does_not_reach_another(name: str, poison: float) -> None:
    """A row without numbers chooses experts all the same: those of others have their own rows of them."""
    spec = SPECS[name]
    decoder, pool, prompts = fused(spec, TensorParallel()), pool_of(spec, TensorParallel()), make_prompts(51, 40, 40)
    tables = torch.arange(1, 61, dtype=torch.int32).view(2, 30).numpy()

    def step(which: list[int], start: int, end: int) -> torch.Tensor:
        spans = [RowSpan(prompts[i][start:end], start, tables[i], "all") for i in which]
        logits = decoder(ForwardBatch.build(spans, BLOCK_SIZE, CPU), pool)
        assert logits is not None
        return logits

    step([0, 1], 0, 20)
    clean = step([0], 20, 40)
    pool.pool[31:] = poison  # the blocks of row 1, the unused part of its last one included
    together = step([0, 1], 20, 40)
    assert torch.equal(together[:20], clean)
    assert together[20:].isnan().all()


# What is read ---------------------------------------------------------------------------------------------------------


def chosen_experts(spec: ModelSpec, decoder: Decoder, tokens: list[list[int]]) -> list[set[int]]:
    """Of each mixture the experts that the last tokens of some sequences pass, as torch's routers say."""
    found: list[set[int]] = []
    call = Router.__call__

    def note(router: Router, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, shares = call(router, x)
        found.append(set(chosen[-1].tolist()))
        return chosen, shares

    sets: list[set[int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "__call__", note)
        for each in tokens:
            found.clear()
            step_through(decoder, pool_of(spec, TensorParallel()), [each], 0, len(each))
            sets = [a | b for a, b in zip(sets, found, strict=True)] if sets else list(found)
    return sets


@pytest.mark.parametrize("tier", [Tier.FLOAT32, Tier.INT8], ids=lambda tier: tier.label)
def test_a_step_reads_the_experts_that_its_rows_pass_and_no_others(tier: Tier) -> None:
    spec = replace(PLAIN, num_layers=3, experts=replace(ROUTED, num_experts=40, shared_size=8, dense_layers=(1,)))
    assert spec.experts is not None
    oracle = Decoder(spec, RandomWeights(), TensorParallel(), TorchAttention(BLOCK_SIZE, CPU))
    decoder = fused(spec, TensorParallel(), tier)
    prompts, pool = make_prompts(51, 9, 12, 5), pool_of(spec, TensorParallel(), decoder.kv_dtype)
    tables = torch.arange(1, 61, dtype=torch.int32).view(3, 20).numpy()

    def step(which: list[int]) -> int:
        """Decode the last token of some prompts, and say what that read."""
        for start, end in (0, -1), (-1, 0):
            spans = [
                RowSpan(prompts[i][start : end or None], start % len(prompts[i]), tables[i], "last") for i in which
            ]
            decoder(ForwardBatch.build(spans, BLOCK_SIZE, CPU), pool)
        return decoder.program.engine.bytes_read

    def both(units: int) -> int:
        """Bytes of an MLP's matrices."""
        return matrix_bytes(tier.kind, units, 45, 2) + matrix_bytes(tier.kind, 45, units)

    router = matrix_bytes(MatrixKind.FLOAT32, 40, 45)
    heads = matrix_bytes(tier.kind, 12 * 22, 45) + matrix_bytes(tier.kind, 45, 6 * 22)
    always = 3 * heads + both(37) + 2 * (router + both(8)) + matrix_bytes(tier.kind, 51, 45)
    for which in ([0], [2], [0, 1, 2]):
        passed = chosen_experts(spec, oracle, [prompts[i] for i in which])
        if tier is Tier.FLOAT32 or len(which) == 1:  # rounded, another expert may be chosen, but as many
            assert step(which) == always + sum(map(len, passed)) * both(19), which


# Blocks ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders with tiny mixtures whose matrices are blocks."""
    types = {"up_proj": "Q4_0", "gate_proj": "Q4_0", "down_proj": "Q8_0", "gate": None, "shared_expert_gate": None}

    @cache
    def save(name: str) -> Path:
        folder, tiny = tmp_path_factory.mktemp(name), ZOO[name]
        config = dict(tiny.config) | {key: size for key, size in _BLOCK_SIZES.items() if key in _known(tiny)}
        replace(tiny, config=config).save(folder)
        return add_blocks(folder, lambda tensor: types.get(tensor.split(".")[-2], "Q4_1"))

    return save


def _known(tiny: Tiny) -> set[str]:
    return set(tiny.configure().to_dict())


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe"])
def test_blocks_of_experts_lose_next_to_nothing_and_keep_bits(
    name: str, saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tier, "kv_kind", lambda *arguments: MatrixKind.FLOAT32)
    folder, alone = saved(name), TensorParallel()
    spec, prompts = spec_of(read_json(folder / "config.json")), make_prompts(288, 33, 7, 18)
    expected = torch.cat(run(folder, alone, prompts, 4))
    decoder = fused_decoder(folder, Tier.GGUF, alone, activations=ActivationDtype.INT16)
    kinds = {layers[0]: kind for layers, kind in decoder.program.kinds.items()}
    assert kinds["model.layers.1.mlp.experts.7.gate_proj"] is MatrixKind.Q4_0
    assert kinds["model.layers.1.mlp.experts.7.down_proj"] is MatrixKind.Q8_0
    assert MatrixKind.INT8 not in kinds.values()
    found = step_through(decoder, pool_of(spec, alone), prompts, 4)
    rows = (torch.cat(found) - expected).norm(dim=1) / expected.norm(dim=1)
    assert rows.median() < 1e-3
    others = [[step_through(decoder, pool_of(spec, alone), [prompt], 4)[0] for prompt in prompts]]
    others.append(step_through(decoder, pool_of(spec, alone), prompts, 4, 100))
    for instruction_set, needs, _ in INSTRUCTION_SETS:
        if needs <= building.cpu_flags():
            other = fused_decoder(
                folder,
                Tier.GGUF,
                alone,
                instruction_set=instruction_set,
                num_threads=3,
                activations=ActivationDtype.INT16,
            )
            others.append(step_through(other, pool_of(spec, alone), prompts, 4))
    assert all(torch.equal(*pair) for each in others for pair in zip(each, found, strict=True))


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe"])
def test_blocks_of_experts_take_what_was_predicted_on_every_rank(name: str, saved: Callable[[str], Path]) -> None:
    folder = saved(name)
    spec = spec_of(read_json(folder / "config.json"))
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        parallel = TensorParallel(rank, size)
        weights = Weights(folder, torch.float32, CPU, spec.names.prefix, is_shown=False)
        predicted = weight_bytes(spec, parallel, Tier.GGUF, weights.block_type)
        assert predicted == fused_decoder(folder, Tier.GGUF, parallel, num_threads=1).program.held_bytes
