"""The fused maths of sampling against torch's: what is allowed and kept, the best, the draw, and no row of another."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from funitel.model_server.cpu.compiler import INSTRUCTION_SETS, CannotBuild
from funitel.model_server.cpu.decoder import FusedLogitsProcessors
from funitel.model_server.cpu.native import NativeEngine, Shape, load_library
from funitel.model_server.sampling.grammar import TokenMasks
from funitel.model_server.sampling.gumbel_noise import noise_key
from funitel.model_server.sampling.logits_processors import TorchLogitsProcessors, logprobs_of
from funitel.model_server.sampling.sampler import SamplingState, sample
from funitel.proto.step import SamplingParams
from funitel_testing.cache import usual_cache

VOCAB_SIZES = (1, 15, 16, 200, 49_152)
TORCH = TorchLogitsProcessors()


@pytest.fixture(params=[name for name, *_ in INSTRUCTION_SETS])
def fused(request: pytest.FixtureRequest) -> FusedLogitsProcessors:
    try:
        library = load_library(usual_cache(), request.param)
    except CannotBuild as reason:
        pytest.skip(str(reason))
    return FusedLogitsProcessors(NativeEngine(library, Shape(num_threads=2, block_size=16)))


def make_scores(rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 4


def make_masks(rows: list[int], vocab_size: int) -> TokenMasks:
    numbers = np.random.default_rng(4).integers(-(2**31), 2**31, (len(rows), -(-vocab_size // 32)))
    bits = numbers.astype(np.int32)
    bits[:, 0] |= 1
    return TokenMasks(rows, bits)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_allowed_tokens_are_torchs(fused: FusedLogitsProcessors, vocab_size: int) -> None:
    scores = make_scores(3, vocab_size)
    scores[1, :: vocab_size // 2 + 1] = torch.nan
    scores[2, 0] = torch.inf
    expected = scores.clone()
    for masks in (None, make_masks([0, 2], vocab_size)):
        fused.allow(scores, masks)
        TORCH.allow(expected, masks)
        assert torch.equal(scores, expected)


WARPS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10**6},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"typical_p": 0.4},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.8, "min_p": 0.01, "typical_p": 0.9},
    {"temperature": 1e-30, "top_p": 0.5},
    {"temperature": 0.05, "top_k": 5000},  # most of what is kept is far behind the best
)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("params", WARPS, ids=str)
def test_warped_scores_are_torchs(fused: FusedLogitsProcessors, params: dict[str, Any], vocab_size: int) -> None:
    scores = make_scores(4, vocab_size, seed=1)
    TORCH.allow(scores, make_masks([1], vocab_size))
    expected = scores.clone()
    rows = [0, 1, 3]
    fused.warp(scores, rows, [SamplingParams(**params)] * 3)
    TORCH.warp(expected, rows, [SamplingParams(**params)] * 3)
    assert torch.equal(scores[2], expected[2]), "a row that was not asked for"
    assert torch.equal(scores > -torch.inf, expected > -torch.inf)
    assert torch.allclose(scores, expected, rtol=1e-6, atol=1e-6)


def test_ties_of_the_last_kept_score_stay_in_top_k_only(fused: FusedLogitsProcessors) -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]] * 2)
    fused.warp(scores, [0, 1], [SamplingParams(top_k=2), SamplingParams(top_p=0.5)])
    assert (scores > -torch.inf).tolist() == [
        [False, True, True, True, True, False],
        [False, True, True, False, False, False],
    ]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_best_and_normaliser_are_torchs(fused: FusedLogitsProcessors, vocab_size: int) -> None:
    scores = make_scores(5, vocab_size, seed=2)
    TORCH.allow(scores, make_masks([1], vocab_size))
    for ours, theirs in zip(fused.best(scores), TORCH.best(scores), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.allclose(ours.double(), theirs.double(), atol=1e-5)


def test_the_first_of_equal_scores_is_the_best(fused: FusedLogitsProcessors) -> None:
    assert fused.best(torch.tensor([[0.0] * 17 + [2.0] * 20]))[0].tolist() == [17]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_the_likeliest_tokens_are_those_of_the_single_steps(fused: FusedLogitsProcessors, vocab_size: int) -> None:
    scores = make_scores(6, vocab_size, seed=6)
    scores[1, vocab_size // 2] = torch.nan
    scores[2, -1] = torch.inf
    scores[3] = -torch.inf
    scores[4, : vocab_size // 2] = -torch.inf
    apart, torchs = scores.clone(), scores.clone()
    tokens, logprobs = fused.likeliest(scores)
    fused.allow(apart, None)
    best, normaliser = fused.best(apart)
    assert torch.equal(scores, apart)
    assert tokens == best.tolist()
    expected = logprobs_of(apart, best, normaliser, torch.tensor([False, True, True, False, False, False]))
    assert np.array_equal(np.array(logprobs, np.float32), expected.numpy(), equal_nan=True)
    assert all(math.isnan(logprobs[row]) for row in (1, 2, 3))
    theirs, their_logprobs = TORCH.likeliest(torchs)
    assert theirs == tokens
    assert np.allclose(logprobs, their_logprobs, atol=1e-5, equal_nan=True)


def test_draws_are_torchs(fused: FusedLogitsProcessors) -> None:
    """The same noise: only near ties could differ, and of these there are none among the cases."""
    scores = make_scores(40, 5003, seed=3) / 4
    scores[:20] = scores[:20] * 4
    TORCH.allow(scores, make_masks(list(range(0, 40, 3)), 5003))
    rows = list(range(1, 40))
    keys = [noise_key(seed, 9) for seed in rows]
    drawn = fused.draw(scores, rows, keys).tolist()
    assert drawn == TORCH.draw(scores, rows, keys).tolist()
    assert len(set(drawn)) > 20


@pytest.mark.parametrize("rows", [1, 3, 17])
def test_a_row_has_the_same_bits_in_any_company(fused: FusedLogitsProcessors, rows: int) -> None:
    params = SamplingParams(do_sample=True, temperature=0.8, top_k=50, top_p=0.95, seed=7)
    states = [SamplingState.over(params, 5, (), ())] * rows
    scores = make_scores(1, 49_152, seed=5).repeat(rows, 1)
    found = sample(scores, states, [3] * rows, None, fused)
    alone = sample(make_scores(1, 49_152, seed=5), states[:1], [3], None, fused)
    assert found == alone * rows
