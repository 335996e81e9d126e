"""Sampling against transformers' processors, its noise against its distribution, and its independence of company."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    WatermarkLogitsProcessor,
)

from funitel.model_server.sampling.grammar import TokenMasks
from funitel.model_server.sampling.logits_processors import keep_min_p
from funitel.model_server.sampling.sampler import SampledToken, SamplingState, Watermark, sample
from funitel.proto.step import SamplingParams

VOCAB = 200


def make_logits(rows: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def state(
    prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), top_n: int = 0, **params: object
) -> SamplingState:
    return SamplingState.over(SamplingParams(**params), top_n, prompt, output)  # type: ignore[arg-type]


def dense_of(token: SampledToken) -> torch.Tensor:
    """The log-probabilities of a row that asked for all of them: [vocab_size]."""
    dense = torch.full((VOCAB,), -torch.inf)
    dense[list(token.top_ids)] = torch.tensor(token.top_logprobs)
    return dense


def processed(params: SamplingParams, logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities our sampler works with, read off through top_n = everything."""
    found = sample(logits.clone(), [SamplingState.over(params, VOCAB, (), ())] * len(logits), [0] * len(logits))
    dense = torch.full_like(logits, -torch.inf)
    for row, token in enumerate(found):
        dense[row, list(token.top_ids)] = torch.tensor(token.top_logprobs)
    return dense


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        (SamplingParams(temperature=0.7), []),
        (SamplingParams(top_k=5), [TopKLogitsWarper(5)]),
        (SamplingParams(top_k=1000), []),
        (SamplingParams(top_p=0.8), [TopPLogitsWarper(0.8)]),
        (SamplingParams(top_p=0.01), [TopPLogitsWarper(0.01)]),
        (SamplingParams(typical_p=0.6), [TypicalLogitsWarper(0.6)]),
        (SamplingParams(min_p=0.1), [MinPLogitsWarper(0.1)]),
        (SamplingParams(min_p=1.0), [MinPLogitsWarper(1.0)]),
        (SamplingParams(top_p=0.9, min_p=0.02), [TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)]),
        (SamplingParams(top_k=20, top_p=0.7), [TopKLogitsWarper(20), TopPLogitsWarper(0.7)]),
        (
            SamplingParams(temperature=0.5, top_k=50, top_p=0.9, typical_p=0.8),
            [TopKLogitsWarper(50), TopPLogitsWarper(0.9), TypicalLogitsWarper(0.8)],
        ),
    ],
)
def test_warpers_equal_transformers(params: SamplingParams, warpers: list[object]) -> None:
    logits = make_logits()
    expected = logits / params.temperature
    for warp in warpers:
        expected = warp(None, expected)  # type: ignore[operator]
    expected = expected.log_softmax(-1)
    found = processed(params, logits)
    assert torch.equal(found > -torch.inf, expected > -torch.inf)
    kept = expected > -torch.inf
    assert torch.allclose(found[kept], expected[kept], atol=1e-5)


def test_repetition_penalty_equals_transformers() -> None:
    logits = make_logits(1)
    prompt, output = (3, 4, 4, 9), (3, 150)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), logits.clone())
    found = sample(logits.clone(), [state(prompt, output, repetition_penalty=1.7, top_n=VOCAB)], [6])[0]
    dense = torch.empty(VOCAB)
    dense[list(found.top_ids)] = torch.tensor(found.top_logprobs)
    assert torch.allclose(dense, expected[0].log_softmax(-1), atol=1e-5)


def test_watermark_equals_transformers_and_follows_the_last_token() -> None:
    logits = make_logits(1)
    mark = Watermark(gamma=0.25, delta=3.0)
    processor = WatermarkLogitsProcessor(VOCAB, "cpu", greenlist_ratio=0.25, bias=3.0)
    row = SamplingState.over(SamplingParams(watermark=True), VOCAB, (3, 9), (), mark)
    for ids in ([3, 9], [3, 9, 17]):
        expected = processor(torch.tensor([ids]), logits.clone())[0].log_softmax(-1)
        assert torch.allclose(dense_of(sample(logits.clone(), [row], [2])[0]), expected, atol=1e-5)
        row.push(17)
    resumed = SamplingState.over(SamplingParams(watermark=True), VOCAB, (3, 9), (17, 17), mark)
    assert sample(logits.clone(), [resumed], [4]) == sample(logits.clone(), [row], [4])


def test_logit_bias_equals_transformers() -> None:
    logits = make_logits(1)
    bias = ((4, -100.0), (9, 5.0), (0, 1.5))
    expected = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias])(
        torch.tensor([[3]]), logits.clone()
    )[0].log_softmax(-1)
    found = sample(logits.clone(), [state(logit_bias=bias, top_n=VOCAB)], [1])[0]
    assert torch.allclose(dense_of(found), expected, atol=1e-5)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.3, "top_k": 5, "seed": 4},
        {"logit_bias": ((7, 50.0),)},
        {"watermark": True},
        {"presence_penalty": 2.0},
    ],
)
def test_raw_logprobs_are_the_models_own_whatever_chose_the_token(params: dict[str, object]) -> None:
    logits = make_logits(3)
    expected = logits.log_softmax(-1)
    rows = [state((1,), (2, 3), VOCAB, **params, raw_logprobs=raw) for raw in (True, False, True)]
    plain = [state((1,), (2, 3), VOCAB, **params)] * 3
    found = sample(logits.clone(), rows, [3] * 3)
    processed_ = sample(logits.clone(), plain, [3] * 3)
    assert [token.id for token in found] == [token.id for token in processed_]
    for i in (0, 2):
        assert torch.allclose(dense_of(found[i]), expected[i], atol=1e-5)
        assert found[i].logprob == pytest.approx(float(expected[i, found[i].id]), abs=1e-5)
    assert found[1] == processed_[1]


def test_frequency_penalty_is_the_share_of_the_sequence() -> None:
    logits = torch.zeros(1, VOCAB)
    sample(logits, [state((5, 5, 6), (7,), frequency_penalty=2.0)], [4])
    assert logits[0, 5].item() == pytest.approx(-2.0 * 2 / 4)
    assert logits[0, 7].item() == pytest.approx(-2.0 * 1 / 4)
    assert logits[0, 8].item() == 0.0


def test_count_penalties_are_over_the_completion_only() -> None:
    logits = torch.zeros(1, VOCAB)
    row = state((5,), (7,), presence_penalty=0.5, count_penalty=0.25)
    row.push(7)
    sample(logits, [row], [3])
    assert logits[0, 7].item() == pytest.approx(-0.5 - 2 * 0.25)
    assert logits[0, 5].item() == 0.0


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"repetition_penalty": 2.0}, [0.25, -1.0, 2.0, 0.5]),
        ({"repetition_penalty": 1.25}, [0.4, -0.625, 3.2, 0.5]),
        ({"frequency_penalty": 1.0}, [0.5 - 2 / 5, -0.5 - 2 / 5, 4.0 - 1 / 5, 0.5]),
        ({"repetition_penalty": 2.0, "frequency_penalty": 1.0}, [0.25 - 2 / 5, -1.0 - 2 / 5, 2.0 - 1 / 5, 0.5]),
        ({"presence_penalty": 1.0}, [-0.5, -0.5, 3.0, 0.5]),
        ({"presence_penalty": 0.5}, [0.0, -0.5, 3.5, 0.5]),
        ({"count_penalty": 1.0}, [-1.5, -0.5, 3.0, 0.5]),
        ({"count_penalty": 0.25}, [0.0, -0.5, 3.75, 0.5]),
        ({"presence_penalty": 0.5, "count_penalty": 0.25}, [-0.5, -0.5, 3.25, 0.5]),
    ],
    ids=str,
)
def test_penalties_are_what_their_formulas_say(params: dict[str, float], expected: list[float]) -> None:
    """Token 1 is twice in the prompt, 0 twice and 2 once in the completion."""
    row = state((1, 1), (0,), **params)
    for token in (2, 0):
        row.push(token)
    resumed = state((1, 1), (0, 2, 0), **params)
    for one in (row, resumed):
        scores = torch.tensor([0.5, -0.5, 4.0, 0.5])
        one.process(scores)
        assert scores.tolist() == pytest.approx(expected)
        assert one.held() == (([1, 0, 2], [2, 2, 1]), ([0, 2], [2, 1]))


def test_penalties_of_no_tokens_change_nothing() -> None:
    scores = torch.tensor([0.5, -0.5])
    state(repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=1.0, count_penalty=1.0).process(scores)
    assert scores.tolist() == [0.5, -0.5]


def test_what_edits_scores_works_on_their_device() -> None:
    scores = torch.zeros(VOCAB, device="meta")
    edits = {"logit_bias": ((4, 1.0),), "repetition_penalty": 2.0, "frequency_penalty": 1.0, "presence_penalty": 1.0}
    state((5, 6), (7,), **edits).process(scores)
    Watermark().apply(scores, 5)
    assert scores.device.type == "meta"


@pytest.mark.parametrize(("params", "kept"), [({"top_p": 0.5}, 2), ({"typical_p": 0.5}, 2), ({"min_p": 0.5}, 8)])
def test_mass_that_reaches_its_bound_exactly_is_enough(params: dict[str, float], kept: int) -> None:
    scores = torch.full((1, VOCAB), -torch.inf)
    scores[0, :4] = 0.0
    scores[0, 4:8] = -math.log(2) if "min_p" in params else -torch.inf
    token = sample(scores, [state(do_sample=True, top_n=VOCAB, **params)], [0])[0]
    assert len(token.top_ids) == kept


def test_min_p_is_relative_to_the_best_score() -> None:
    floors = torch.tensor([[math.log(0.5)], [math.log(0.1)]])
    for offset in (-7.0, 0.0, 7.0):
        scores = torch.tensor([[2.0, 1.5, 1.0, -1.0]] * 2) + offset
        kept = keep_min_p(scores, floors, 0.5) > -torch.inf
        assert kept.tolist() == [[True, True, False, False], [True, True, True, False]]


def test_the_favoured_tokens_are_picked_by_the_last() -> None:
    row = SamplingState.over(SamplingParams(watermark=True), 0, (3, 9), (), Watermark(gamma=0.25))
    assert row.favoured(VOCAB).tolist() == Watermark(gamma=0.25).green_ids(9, VOCAB).tolist()
    assert len(row.favoured(VOCAB)) == VOCAB // 4
    row.push(3)
    assert row.favoured(VOCAB).tolist() == Watermark(gamma=0.25).green_ids(3, VOCAB).tolist()


@pytest.mark.parametrize(
    ("prompt", "output", "last"), [((), (), 0), ((7,), (), 7), ((3,), (9,), 9), ((3, 4), (5, 6), 6)]
)
def test_the_last_token_is_of_the_completion_or_else_of_the_prompt(
    prompt: tuple[int, ...], output: tuple[int, ...], last: int
) -> None:
    row = state(prompt, output, watermark=True)
    assert row.favoured(VOCAB).tolist() == Watermark().green_ids(last, VOCAB).tolist()


def test_only_tokens_that_a_mask_names_are_chosen() -> None:
    masks = TokenMasks.naming({1: np.array([5, 40, 199])}, VOCAB)
    logits = make_logits(3)
    expected = logits[1, [5, 40, 199]].log_softmax(-1)
    free, masked, other = sample(logits.clone(), [state(top_n=VOCAB)] * 3, [0] * 3, masks)
    assert dict(zip(masked.top_ids, masked.top_logprobs, strict=True)) == pytest.approx(
        dict(zip((5, 40, 199), expected.tolist(), strict=True)), abs=1e-5
    )
    assert masked.id == masked.top_ids[0]
    assert (len(free.top_ids), len(other.top_ids)) == (VOCAB, VOCAB)


def test_a_forced_token_is_certain() -> None:
    assert SampledToken.forced(7, with_top=False) == SampledToken(7, 0.0, (), (), False)
    assert SampledToken.forced(7, with_top=True) == SampledToken(7, 0.0, (7,), (0.0,), False)


def test_greedy_is_argmax_with_raw_logprob() -> None:
    logits = make_logits()
    expected = logits.log_softmax(-1).max(-1)
    found = sample(logits.clone(), [state()] * len(logits), [0] * len(logits))
    assert [token.id for token in found] == expected.indices.tolist()
    assert [token.logprob for token in found] == pytest.approx(expected.values.tolist(), abs=1e-5)


def test_top_tokens_return_all_ties_and_no_masked_token() -> None:
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, [3, 8, 11]] = 2.0
    found = sample(logits.clone(), [state(top_n=2)], [0])[0]
    assert found.top_ids == (3, 8, 11)
    logits[0, 8] = 4.0
    best_first = sample(logits.clone(), [state(top_n=2)], [0])[0]
    assert best_first.top_ids == (8, 3, 11)
    assert best_first.top_logprobs[0] - best_first.top_logprobs[1] == pytest.approx(2.0)
    assert sample(logits.clone(), [state(top_n=1)], [0])[0].top_ids == (8,)
    logits[0, 8] = 2.0
    narrow = sample(logits.clone(), [state(top_n=5, top_k=1, do_sample=True)], [0])[0]
    assert set(narrow.top_ids) == {3, 8, 11}


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0] + [-torch.inf] * 4])
    expected = logits[0].softmax(-1)
    total = 4000
    counts: Counter[int] = Counter()
    for start in range(0, total, 100):
        rows = [state(do_sample=True, seed=seed) for seed in range(start, start + 100)]
        counts.update(token.id for token in sample(logits.repeat(100, 1), rows, [7] * 100))
    assert set(counts) <= {0, 1, 2, 3}
    chi_square = sum((counts[i] - total * float(p)) ** 2 / (total * float(p)) for i, p in enumerate(expected[:4]))
    assert chi_square < 16.3  # 0.1 % of 3 degrees of freedom


def test_a_row_draws_the_same_whatever_shares_its_batch() -> None:
    logits = make_logits(8, seed=3)
    rows = [state(do_sample=True, seed=i, top_p=0.9, top_k=40) for i in range(7)] + [state()]
    together = sample(logits.clone(), rows, list(range(8)))
    for i in range(8):
        alone = sample(logits[i : i + 1].clone(), rows[i : i + 1], [i])[0]
        assert alone.id == together[i].id
        assert alone.logprob == pytest.approx(together[i].logprob, abs=1e-5)


def test_masked_tokens_are_never_drawn() -> None:
    logits = make_logits(1)
    best = logits[0].topk(3).indices.tolist()
    for seed in range(200):
        assert sample(logits.clone(), [state(do_sample=True, top_k=3, seed=seed)], [0])[0].id in best


def test_rounding_errors_seldom_change_a_draw() -> None:
    """Company may change a likely token's logit by some 1e-5: the improbable ones must not move along."""
    rows = 400
    logits = torch.zeros(rows, 20_000)
    logits[:, 0] = 9.0  # three tenths of the mass; each of the others has 3e-5
    wrong = logits.clone()
    wrong[:, 0] += 2e-5
    states = [state(do_sample=True, seed=seed) for seed in range(rows)]
    first, second = (sample(scores, states, [5] * rows) for scores in (logits, wrong))
    assert 100 < sum(token.id != 0 for token in first) < rows, "few draws fall into the tail"
    assert sum(a.id != b.id for a, b in zip(first, second, strict=True)) == 0


# Scores that are no numbers


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"raw_logprobs": True, "temperature": 0.5},
        {"do_sample": True, "seed": 3, "top_p": 0.5},
        {"do_sample": True, "top_k": 4, "typical_p": 0.5},
        {"repetition_penalty": 1.5},
        {"logit_bias": ((7, 2.0),)},
    ],
)
def test_one_broken_score_is_told_and_touches_no_other_row(params: dict[str, Any], value: float) -> None:
    states = [SamplingState.over(SamplingParams(**params), 2, [1], [7]) for _ in range(3)]
    sound = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    broken = sound.clone()
    broken[1, 7] = value
    expected = sample(sound, states, [1, 1, 1])
    first, second, third = sample(broken, states, [1, 1, 1])
    assert math.isnan(second.logprob)
    assert (first, third) == (expected[0], expected[2])


def test_tokens_that_cannot_follow_are_not_broken_unless_they_are_all() -> None:
    scores = torch.full((2, 50), -torch.inf)
    scores[0, 9] = -3.0
    one, none = sample(scores, [SamplingState(SamplingParams())] * 2, [1, 1])
    assert (one.id, one.logprob) == (9, 0.0)
    assert math.isnan(none.logprob)
