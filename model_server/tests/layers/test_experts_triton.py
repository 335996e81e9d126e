"""Mixtures of experts as Triton kernels: what torch computes expert by expert, over cases drawn at random.

Without a GPU they run in Triton's interpreter, so this proves what they compute and nothing about their speed.
"""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from funitel.model_server.attention.triton_kernels import TritonAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.parked_tensors import ParkedTensors, tensors_of
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.files.integrity import read_json
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.layers.expert_ops import HeldExperts, TorchExpertOps
from funitel.model_server.layers.experts.choice_kernels import TritonChoice, check_choice, choice_of
from funitel.model_server.layers.experts.kernels import (
    TILE_SHAPES,
    TileShape,
    TritonExpertOps,
    check_experts,
    tile_shape,
)
from funitel.model_server.layers.experts.layout_kernels import lay_out, max_tiles, sort_pairs
from funitel.model_server.layers.experts.stack import refusal, stack_experts
from funitel.model_server.layers.linear import Matmul
from funitel.model_server.layers.mlp import Router
from funitel.model_server.models.cuda_graphs import GraphedDecoder, recorded
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.models.fuse_experts import fuse_experts
from funitel.model_server.registry.lookup import spec_of
from funitel_testing.elementwise_cases import error_of
from funitel_testing.expert_cases import BOUNDS, ExpertCase, draw_experts
from funitel_testing.forward_worker import step_through
from funitel_testing.zoo import ZOO

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK = 4


class NoExpertOps(TorchExpertOps):
    """A reference that must not be asked."""

    def add(self, *_: object) -> torch.Tensor:  # type: ignore[override]
        raise AssertionError("experts fell back to torch")


def no_fall_back() -> TritonExpertOps:
    ops = TritonExpertOps()
    ops._reference = NoExpertOps()
    return ops


@pytest.mark.parametrize("seed", range(30))
def test_the_experts_of_each_token(seed: int) -> None:
    case = draw_experts(seed, DEVICE)
    expected = case.exact().through(TorchExpertOps())
    found = case.through(no_fall_back())
    if not expected.any():  # no token chose an expert of this rank
        assert not found.any()
    else:
        assert error_of([found], [expected]) <= BOUNDS[case.x.dtype]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_the_experts_of_each_token_over_many_cases(seed: int) -> None:
    test_the_experts_of_each_token(seed)


@pytest.mark.parametrize("shape", TILE_SHAPES, ids=lambda shape: str(shape.rows))
def test_tiles_of_every_shape(shape: TileShape) -> None:
    """Of experts that all have tokens; those with most are more pairs than a kernel sorts."""
    case = draw_experts(7, DEVICE, dtype=torch.float16)
    num_held, num_chosen = len(case.experts.held), case.chosen.shape[1]
    assert num_held == case.experts.num_experts == 33
    num_tokens = 2 * shape.rows * num_held // (3 * num_chosen)
    assert tile_shape(num_tokens * num_chosen, num_held, torch.float16) == shape
    case = draw_experts(7, DEVICE, num_tokens, torch.float16)
    error = error_of([case.through(no_fall_back())], [case.exact().through(TorchExpertOps())])
    assert error <= BOUNDS[torch.float16]


def router_of(family: str, folder: Path) -> Router:
    ZOO[family].save(folder)
    spec = spec_of(read_json(folder / "config.json"))
    assert spec.experts is not None
    weights = Weights(folder, torch.float16, CPU, spec.names.prefix, is_shown=False)
    return Router(spec, spec.experts, weights, 1)


@pytest.mark.parametrize("num_experts", [None, 130])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "glm4_moe", "gemma4_moe", "llama4"])
def test_the_choice_of_experts(family: str, num_experts: int | None, tmp_path: Path) -> None:
    """Softmax and sigmoid, normalised and not, with a correction, a scale, and a scale of each expert."""
    router, generator = router_of(family, tmp_path), torch.Generator().manual_seed(3)
    if num_experts is not None:
        router.spec = replace(router.spec, num_experts=num_experts, num_chosen=7)
        router.correction = torch.rand(num_experts, generator=generator)
        router.expert_scale = torch.rand(num_experts, generator=generator)
    choice = choice_of(router)
    assert choice is not None
    logits = 3 * torch.randn(40, router.spec.num_experts, generator=generator)
    for some in (logits, logits[:1], logits[:0]):
        (chosen, shares), (numbers, expected) = choice(some), router.choose(some)
        assert torch.equal(chosen, numbers)
        assert chosen.dtype is numbers.dtype
        assert torch.allclose(shares, expected, rtol=1e-5)
    check_choice(router, CPU)


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
def test_logits_that_are_no_numbers_choose_experts_that_there_are(tmp_path: Path) -> None:
    choice = choice_of(router_of("mixtral", tmp_path))
    assert choice is not None
    chosen, _ = choice(torch.full((3, 5), torch.nan))
    assert int(chosen.min()) >= 0
    assert int(chosen.max()) < 5


@pytest.mark.parametrize("family", ["deepseek_v3", "phimoe"])
def test_groups_and_choices_one_after_the_other_are_left_to_torch(family: str, tmp_path: Path) -> None:
    router = router_of(family, tmp_path)
    assert choice_of(router) is None
    check_choice(router, CPU)


def test_a_choice_that_is_wrong_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    router = router_of("mixtral", tmp_path)
    monkeypatch.setattr(TritonChoice, "__call__", lambda _, logits: router.choose(-logits))
    with pytest.raises(ValueError, match="is off by"):
        check_choice(router, CPU)


def naive_layout(chosen: list[int], held: range, num_rows: int) -> tuple[list[list[int]], list[int]]:
    """The tiles with pairs, and their experts counted from the first held one, in plain Python."""
    pairs, experts = [], []
    for expert in held:
        own = [pair for pair, each in enumerate(chosen) if each == expert]
        for begin in range(0, len(own), num_rows):
            tile = own[begin : begin + num_rows]
            pairs.append(tile + [-1] * (num_rows - len(tile)))
            experts.append(expert - held.start)
    return pairs, experts


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(i, marks=pytest.mark.slow) for i in range(12, 60))])
def test_the_layout_of_pairs(seed: int) -> None:
    random = np.random.default_rng(seed)
    num_experts = int(random.choice([1, 3, 8, 33, 100]))
    num_chosen, num_tokens = int(random.integers(1, min(8, num_experts) + 1)), int(random.choice([1, 2, 17, 70, 200]))
    start = int(random.integers(0, num_experts)) if seed % 2 else 0
    held = range(start, int(random.integers(start + 1, num_experts + 1)) if seed % 4 else num_experts)
    numbers = [random.permutation(num_experts)[:num_chosen] for _ in range(num_tokens)]
    if seed % 5 == 0:
        numbers = [np.arange(num_chosen)] * num_tokens
    chosen = torch.from_numpy(np.stack(numbers)).to(DEVICE)
    for num_rows in (16, 128):
        pairs, experts = naive_layout(chosen.flatten().tolist(), held, num_rows)
        for found in (lay_out(chosen, held, num_rows), sort_pairs(chosen, held, num_rows)):
            assert len(found.experts) == len(found.pairs) == max_tiles(chosen.numel(), len(held), num_rows)
            is_used = found.experts >= 0
            assert set(found.experts[~is_used].tolist()) <= {-1}
            assert found.experts[is_used].tolist() == experts
            assert found.pairs[is_used].tolist() == pairs


def test_a_layout_never_needs_more_tiles_than_there_are() -> None:
    """The worst case: as many experts as possible with one pair in their last tile."""
    for num_experts in (1, 2, 7):
        for num_pairs in range(1, 80):
            most = max(
                sum(-(-size // 16) for size in sizes)
                for first in range(num_pairs + 1)
                for sizes in [[first, *spread(num_pairs - first, num_experts - 1)]]
                if sum(sizes) == num_pairs
            )
            assert most <= max_tiles(num_pairs, num_experts, 16)


def spread(num_pairs: int, num_experts: int) -> list[int]:
    """A pair for each expert, the rest for the last."""
    if not num_experts:
        return []
    sizes = [1] * min(num_pairs, num_experts)
    return [*sizes[:-1], sizes[-1] + num_pairs - len(sizes)] if sizes else []


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "phimoe"])
def test_neither_the_router_nor_the_layout_reads_what_tensors_hold(family: str, tmp_path: Path) -> None:
    """Fake tensors hold nothing, and refuse what the host would have to know: the loop over experts, for one."""
    router = router_of(family, tmp_path)
    num_experts, num_chosen = router.spec.num_experts, router.spec.num_chosen
    router.product = lambda x: x[:, :num_experts]  # type: ignore[assignment]
    with FakeTensorMode(allow_non_fake_inputs=True):
        chosen, _ = router(torch.empty(30, 48))
        assert chosen.shape == (30, num_chosen)
        layout = sort_pairs(chosen, range(1, num_experts), 16)
        assert len(layout.experts) == max_tiles(30 * num_chosen, num_experts - 1, 16)
        with pytest.raises(DynamicOutputShapeException):
            chosen.flatten().bincount(minlength=num_experts)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_a_token_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    """Of steps with tiles of one shape. Triton's interpreter sums rows of a product as their place has it."""
    case = draw_experts(33, DEVICE, 20, dtype)
    order = torch.from_numpy(np.random.default_rng(1).permutation(20)).to(DEVICE)
    shared = None if case.shared is None else case.shared[order]
    other = replace(case, x=case.x[order], chosen=case.chosen[order], shares=case.shares[order], shared=shared)
    found, expected = other.through(no_fall_back()), case.through(no_fall_back())[order]
    if DEVICE.type == "cuda":
        assert torch.equal(found, expected)
    else:
        assert torch.allclose(found, expected, rtol=1e-6 if dtype is torch.float32 else 2e-3, atol=1e-5)


def decoder_of(folder: Path, parallel: TensorParallel | None = None, dtype: torch.dtype = torch.float16) -> Decoder:
    spec = spec_of(read_json(folder / "config.json"))
    heads = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
    attention = TritonAttention(BLOCK, CPU, **heads, dtype=dtype, num_processors=16)
    weights = Weights(folder, dtype, CPU, spec.names.prefix, is_shown=False)
    return Decoder(spec, weights, parallel or TensorParallel(), attention)


def fuse(decoder: Decoder) -> None:
    for mixture in decoder.mixtures():
        stack_experts(mixture)
        mixture.ops, mixture.router.choice = no_fall_back(), choice_of(mixture.router)


SLOW = ("olmoe", "glm4_moe", "granite_moe_shared", "llama4")
STACKED = ["mixtral", "qwen2_moe", "qwen3_moe", *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW)]


@torch.inference_mode()
@pytest.mark.parametrize("family", STACKED)
def test_logits_of_the_reference_also_where_steps_are_replayed(family: str, tmp_path: Path) -> None:
    """A replay is the recorded work done again on the same fixed tensors, with other tokens in them."""
    ZOO[family].save(tmp_path)
    decoder = decoder_of(tmp_path)
    spec = decoder.spec
    prompts = [torch.randint(0, 200, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (13, 5, 24)]

    def cache() -> KVCache:
        return KVCache(spec, HeadSplit(0, spec.num_heads, 0, spec.num_kv_heads), 120, BLOCK, torch.float16, CPU)

    expected = step_through(decoder, cache(), prompts, 4)
    assert not any(mixture.is_fixed for mixture in decoder.mixtures())
    fuse(decoder)
    assert all(mixture.is_fixed for mixture in decoder.mixtures())
    attention = decoder.attention
    assert isinstance(attention, TritonAttention)
    graphed = GraphedDecoder(decoder, attention, (1, 3), spec.max_position_embeddings, lambda body: body)
    for forward in (decoder, graphed):
        found = step_through(forward, cache(), prompts, 4)
        assert error_of(found, expected) <= 2e-2
    assert len(graphed._steps) == 2


@pytest.mark.parametrize("is_spread", [False, True], ids=["units", "experts"])
def test_ranks_add_up(is_spread: bool, tmp_path: Path) -> None:
    """Hidden units of each expert, or whole experts, of three ranks."""
    ZOO["qwen2_moe"].save(tmp_path)
    whole = decoder_of(tmp_path).mixtures()[0]
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(1)).half()
    total = torch.zeros(9, 48)
    for rank in range(3):
        parallel = TensorParallel(rank, 3)
        parallel.spreads_experts = is_spread
        parallel.all_reduce = lambda part: part  # type: ignore[method-assign]
        spec = spec_of(read_json(tmp_path / "config.json"))
        weights = Weights(tmp_path, torch.float16, CPU, spec.names.prefix, is_shown=False)
        assert spec.experts is not None
        mixture = type(whole)(spec, spec.experts, weights, parallel, 1)
        stack_experts(mixture)
        mixture.ops = no_fall_back()
        total += mixture(x).float()
    assert error_of([total], [whole(x)]) <= 3e-3


def test_stacked_weights_are_there_once_and_sleep_once(tmp_path: Path) -> None:
    ZOO["mixtral"].save(tmp_path)
    mixture = decoder_of(tmp_path).mixtures()[0]
    before = [(mlp.up.matmul.weight.clone(), mlp.down.matmul.weight.clone()) for mlp in mixture.experts]  # type: ignore[union-attr]
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(1)).half()
    expected = mixture(x)
    stack_experts(mixture)
    stack = mixture.held_experts.stack
    assert stack is not None
    for i, (mlp, (up, down)) in enumerate(zip(mixture.experts, before, strict=True)):
        assert isinstance(mlp.up.matmul, Matmul)
        assert torch.equal(mlp.up.matmul.weight, up)
        assert torch.equal(stack.down[i], down)
        assert mlp.up.matmul.weight.untyped_storage().data_ptr() == stack.gate_up.untyped_storage().data_ptr()
    assert torch.equal(mixture(x), expected)
    found = tensors_of(mixture, CPU)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in found}
    parked = ParkedTensors(found, CPU)
    assert parked.num_bytes == sum(storages.values())
    assert stack.down.untyped_storage().nbytes() == 0
    parked.restore()
    mixture.ops = no_fall_back()
    assert error_of([mixture(x)], [expected]) <= 3e-3


@pytest.mark.parametrize(
    ("family", "reason"),
    [("gpt_oss", "interleaved, limited or scaled"), ("mixtral", "quantised or repacked")],
)
def test_what_kernels_do_not_compute_is_said(
    family: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ZOO[family].save(tmp_path)
    decoder = decoder_of(tmp_path, dtype=torch.float32)  # which is repacked on a CPU
    with pytest.raises(ValueError, match=reason):
        stack_experts(decoder.mixtures()[0])
    with caplog.at_level(logging.INFO):
        fuse_experts(decoder, CUDA)
        assert recorded(decoder, None) is decoder
    assert reason in caplog.text
    assert "what" in caplog.text
    assert "computes depends on tokens" in caplog.text


def test_experts_are_fused_after_a_check_and_looped_over_where_it_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ZOO["mixtral"].save(tmp_path)

    def refuse(*_: object) -> None:
        raise ValueError("no such kernel")

    for check, name in ((refuse, "torch"), (lambda *_: None, "triton")):
        decoder = decoder_of(tmp_path)
        fuse_experts(decoder, CPU)
        assert {mixture.ops.name for mixture in decoder.mixtures()} == {"torch"}
        monkeypatch.setattr("funitel.model_server.layers.experts.choice_kernels.check_choice", lambda *_: None)
        monkeypatch.setattr("funitel.model_server.layers.experts.kernels.check_experts", check)
        fuse_experts(decoder, CUDA)
        assert {mixture.ops.name for mixture in decoder.mixtures()} == {name}
        assert {mixture.router.choice is not None for mixture in decoder.mixtures()} == {name == "triton"}
        assert isinstance(recorded(decoder, None), GraphedDecoder) is (name == "triton")
    assert "without the Triton kernels: ValueError: no such kernel" in caplog.text


def is_small(case: ExpertCase) -> bool:
    return len(case.experts.held) == 2 < case.experts.num_experts and case.chosen.shape[1] > 1


def test_the_check_finds_the_kernels_right_and_wrong_ones_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in (draw_experts(i, DEVICE, 1, torch.float16) for i in range(99)) if is_small(case))
    experts, num_chosen, hidden_size = case.experts, case.chosen.shape[1], case.x.shape[1]
    check_experts(experts, num_chosen, hidden_size, DEVICE)
    add = TritonExpertOps.add

    def wrong(self: TritonExpertOps, experts: HeldExperts, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return 1.1 * add(self, experts, x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(TritonExpertOps, "add", wrong)
    with pytest.raises(ValueError, match="is off by"):
        check_experts(experts, num_chosen, hidden_size, DEVICE)


def test_refusals() -> None:
    assert refusal([]) == "this rank has no experts"
