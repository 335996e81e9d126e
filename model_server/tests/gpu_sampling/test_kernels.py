"""The kernels of sampling against torch's operators: penalties, which tokens stay, the choice, its log-probability."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from funitel.model_server.gpu_sampling.ops import ScoreMaths, TorchMaths, TritonMaths, check
from funitel.model_server.gpu_sampling.plan import RowStates, SamplingPlan
from funitel.model_server.gpu_sampling.sampler import DeviceSampler
from funitel_testing.sampled_rows import draw_params, make_masks, make_row

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FILTERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 7, "temperature": 1.7},
    {"top_p": 0.9},
    {"top_p": 1e-6},
    {"min_p": 0.05, "top_k": 1000},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "min_p": 0.01, "typical_p": 0.9},
    {"temperature": 1e-30, "top_p": 0.5},
)


def sampled(maths: ScoreMaths, logits: torch.Tensor, all_params: list[dict[str, Any]], seed: int) -> list[Any]:
    """What a sampler chooses for such rows, and what is left of their scores."""
    generator = np.random.default_rng(seed)
    vocab_size = logits.shape[1]
    rows = [make_row(i, params, generator, vocab_size, top_n=2) for i, params in enumerate(all_params)]
    states = RowStates(vocab_size, DEVICE)
    masks = make_masks([i for i, row in enumerate(rows) if row.start.sampling.grammar], vocab_size, generator)
    scores = logits.to(DEVICE, copy=True)
    plan = SamplingPlan.of(rows, states, maths)
    choice = DeviceSampler(states, maths).sample(scores, plan, np.array([len(row.tokens) for row in rows]), masks)
    return [choice.tokens.cpu(), choice.logprobs.cpu(), choice.top_scores, scores.cpu()]


def assert_as_torch(logits: torch.Tensor, all_params: list[dict[str, Any]], seed: int = 0) -> None:
    found, expected = (sampled(maths, logits, all_params, seed) for maths in (TritonMaths(16), TorchMaths()))
    assert found[0].tolist() == expected[0].tolist()
    for ours, theirs in zip(found[1:3], expected[1:3], strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)
    kept = [i for i, params in enumerate(all_params) if not params.get("raw_logprobs")]
    assert torch.equal(found[3][kept] > -torch.inf, expected[3][kept] > -torch.inf)


@pytest.mark.parametrize("vocab_size", [15, 300, 2049])
def test_every_filter(vocab_size: int) -> None:
    logits = torch.randn(len(FILTERS) + 1, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 4
    assert_as_torch(logits, [{}, *({"seed": i, **params} for i, params in enumerate(FILTERS))])


def test_ties_of_the_last_kept_stay_in_top_k_and_the_first_of_them_in_a_nucleus() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]] * 4).repeat(1, 600)  # over several turns of a program
    rows = [{"top_k": 700}, {"top_p": 0.5}, {"top_p": 0.9}, {"top_k": 700, "top_p": 0.9}]
    assert_as_torch(logits, rows)


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_every_kind(seed: int) -> None:
    generator = np.random.default_rng(seed)
    logits = torch.randn(6, 150, generator=torch.Generator().manual_seed(seed)) * 3
    assert_as_torch(logits, [draw_params(generator) for _ in range(6)], seed)


def test_scores_that_are_no_numbers() -> None:
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    logits[0, 7], logits[1, 8], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 5:] = -torch.inf
    found = sampled(TritonMaths(16), logits, [{}, {"top_k": 3}, {}, {"top_p": 0.99}, {}], 0)
    assert torch.isnan(found[1]).tolist() == [True, True, True, False, False]
    assert int(found[0][3]) < 5
    assert int(found[0][4]) == int(logits[4].argmax())


def test_the_first_of_equal_scores_is_chosen_whichever_part_finds_it() -> None:
    logits = torch.zeros(1, 9000)
    logits[0, [3000, 3001, 7000]] = 2.0
    assert sampled(TritonMaths(64), logits, [{}], 0)[0].tolist() == [3000]


def test_a_probe_finds_the_kernels_right_and_others_wrong() -> None:
    check(TritonMaths(16), DEVICE)

    class Wrong(TorchMaths):
        def penalise(self, scores: torch.Tensor, *_: Any) -> None:
            scores += 0.1

    with pytest.raises(ValueError, match="are not what torch computes"):
        check(Wrong(), DEVICE)
