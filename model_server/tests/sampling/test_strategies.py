"""Decoding strategies against their definitions, their distribution, and their independence of company."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from funitel.model_server.sampling.grammar import TokenMasks
from funitel.model_server.sampling.gumbel_noise import uniform
from funitel.model_server.sampling.sampler import SampledToken, SamplingState, sample
from funitel.model_server.sampling.strategy import FSD_STREAM, XTC_STREAM
from funitel.model_server.sampling.token_rules import TokenRules
from funitel.proto.step import SamplingParams
from funitel.proto.strategy import DecodingStrategy
from funitel_testing import strategy_oracles as oracles
from funitel_testing.sampled_rows import STRATEGIES, draw_params, make_masks, make_row

NUM_ROWS = 1000


def state(
    strategy: dict[str, Any],
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    *,
    top_n: int = 0,
    mirostat_mu: float | None = None,
    has_text: Callable[[int, str], bool] = lambda token_id, text: False,
    **params: Any,
) -> SamplingState:
    given = SamplingParams(strategy=DecodingStrategy(**strategy), **params)
    return SamplingState.over(given, top_n, prompt, output, mirostat_mu=mirostat_mu, has_text=has_text)


def kept(token: SampledToken, vocab_size: int) -> set[int]:
    return {i for i, p in zip(token.top_ids, token.top_logprobs, strict=True) if p > -math.inf}


def random_scores(rng: np.random.Generator, row: int, vocab_size: int) -> torch.Tensor:
    """Scores of a row, of some with ties and with tokens that are out."""
    scores = rng.normal(size=vocab_size) * rng.choice([0.3, 2.0, 8.0])
    if row % 7 == 0:
        scores = np.round(scores)
    if row % 5 == 0 and vocab_size > 1:
        scores[rng.random(vocab_size) < 0.5] = -np.inf
        scores[rng.integers(vocab_size)] = 1.0
    return torch.from_numpy(scores.astype(np.float32))[None]


def spread(rng: np.random.Generator, *ends: float) -> float:
    return float(rng.uniform(*ends))


Rule = Callable[[np.random.Generator], tuple[dict[str, Any], Callable[[np.ndarray], set[int]]]]


def _sigma(rng: np.random.Generator) -> Any:
    n = spread(rng, 0.01, 3)
    return {"top_n_sigma": n}, lambda scores: oracles.top_n_sigma(scores, n)


def _max_k(rng: np.random.Generator) -> Any:
    k = int(rng.integers(1, 30))
    return {"max_k": k}, lambda scores: oracles.max_k(scores, k)


def _tail(rng: np.random.Generator) -> Any:
    z = spread(rng, 0.05, 0.999)
    return {"tfs_z": z}, lambda scores: oracles.tail_free(scores, z)


def _xtc(rng: np.random.Generator) -> Any:
    threshold = spread(rng, 0.001, 0.6)
    return {"xtc_probability": 1.0, "xtc_threshold": threshold}, lambda scores: oracles.xtc(scores, threshold)


def _std(rng: np.random.Generator) -> Any:
    """Inferflow's: the tokens until their mass reaches top-p, and at most max-k of them."""
    k = int(rng.integers(1, 12))

    def std(scores: np.ndarray) -> set[int]:
        found, mass = set[int](), 0.0
        for token_id, p in oracles.likely(scores)[:k]:
            if mass >= np.float32(0.9):
                break
            found.add(token_id)
            mass += p
        return found

    return {"max_k": k, "top_p": 0.9}, std


def _top_k(rng: np.random.Generator) -> Any:
    k = int(rng.integers(1, 30))
    return {"top_k": k}, lambda scores: oracles.top_k(scores, k)


def _top_p(rng: np.random.Generator) -> Any:
    p = spread(rng, 0.05, 0.99)
    return {"top_p": p}, lambda scores: oracles.top_p(scores, p)


def _min_p(rng: np.random.Generator) -> Any:
    p = spread(rng, 0.01, 0.9)
    return {"min_p": p}, lambda scores: oracles.min_p(scores, p)


def _typical_p(rng: np.random.Generator) -> Any:
    p = spread(rng, 0.05, 0.99)
    return {"typical_p": p}, lambda scores: oracles.typical_p(scores, p)


@pytest.mark.parametrize("rule", [_top_k, _top_p, _min_p, _typical_p, _sigma, _max_k, _tail, _xtc, _std])
def test_b6_tokens_that_stay_are_those_of_the_definition(rule: Rule) -> None:
    rng = np.random.default_rng(0)
    for row in range(NUM_ROWS):
        vocab_size = int(rng.choice([1, 2, 3, 5, 40, 200]))
        scores = random_scores(rng, row, vocab_size)
        fields, expected = rule(rng)
        params = {name: fields.pop(name) for name in ("top_k", "top_p", "min_p", "typical_p") if name in fields}
        row_state = state(fields, top_n=vocab_size, do_sample=True, seed=row, **params)
        (token,) = sample(scores.clone(), [row_state], [row])
        found = expected(scores[0].double().numpy())
        assert kept(token, vocab_size) == found, (row, fields)
        assert token.id in found
        inside = scores[0].double()[sorted(found)].log_softmax(0)
        by_id = dict(zip(token.top_ids, token.top_logprobs, strict=True))
        assert np.allclose([by_id[i] for i in sorted(found)], inside, atol=1e-4)


@pytest.mark.parametrize("version", [1, 2])
def test_b6_mirostat_follows_its_definition(version: int) -> None:
    """Sequences of twenty tokens each: the tokens that stay, and how mu goes on."""
    rng = np.random.default_rng(version)
    rule = (oracles.mirostat_1, oracles.mirostat_2)[version - 1]
    for sequence in range(NUM_ROWS // 20):
        tau, eta, temperature = spread(rng, 0.5, 7), spread(rng, 0.01, 1), float(rng.choice([0.5, 1.0, 1.5]))
        how = {"mirostat": version, "mirostat_tau": tau, "mirostat_eta": eta}
        vocab_size = int(rng.choice([2, 40, 200]))
        row = state(how, top_n=vocab_size, seed=sequence, temperature=temperature)
        mu = 2 * tau
        for position in range(20):
            scores = random_scores(rng, position, vocab_size)
            (token,) = sample(scores.clone(), [row], [position])
            expected = rule(scores[0].double().numpy() / temperature, mu)
            assert kept(token, vocab_size) == expected
            inside = scores[0].double()[sorted(expected)].div(temperature).softmax(0)
            surprise = -math.log2(float(inside[sorted(expected).index(token.id)]))
            mu -= eta * (surprise - tau)
            row.push(token.id)
            assert row.mu == pytest.approx(mu, abs=1e-4)
            mu = row.mu


def random_text(rng: np.random.Generator, num_kinds: int) -> tuple[int, ...]:
    return tuple(rng.integers(0, num_kinds, rng.integers(0, 60)).tolist())


def test_b6_dry_follows_its_definition() -> None:
    rng = np.random.default_rng(0)
    for row in range(NUM_ROWS):
        strategy = {
            "dry_multiplier": spread(rng, 0.1, 3),
            "dry_base": spread(rng, 1, 4),
            "dry_allowed_length": int(rng.integers(1, 5)),
            "dry_penalty_last_n": int(rng.choice([-1, -1, 0, 1, 10, 30])),
            "dry_sequence_breakers": ("x",),
        }
        num_kinds = int(rng.choice([1, 2, 4, 12]))
        breakers = set(rng.integers(0, num_kinds, rng.integers(0, 3)).tolist())
        prompt, output = random_text(rng, num_kinds), random_text(rng, num_kinds)
        if row % 50 == 0:
            output = (1,) * 80  # longer than the longest repetition that is known
        scores = random_scores(rng, 1, 20)
        how = {"top_n": 20, "has_text": lambda token_id, _, known=breakers: token_id in known}
        (token,) = sample(scores.clone(), [state(strategy, prompt, output, **how)], [9])
        loss = oracles.dry(DecodingStrategy(**strategy), prompt + output, breakers.__contains__)
        expected = scores[0].double()
        for token_id, penalty in loss.items():
            expected[token_id] -= penalty
        by_id = dict(zip(token.top_ids, token.top_logprobs, strict=True))
        assert np.allclose([by_id[i] for i in range(20)], expected.log_softmax(0), rtol=1e-5, atol=1e-4)


def test_b6_fsd_follows_its_definition() -> None:
    rng = np.random.default_rng(0)
    num_others = 0
    for _ in range(NUM_ROWS):
        strategy = {
            "fsd_alpha": spread(rng, 0.05, 1),
            "fsd_k": int(rng.integers(1, 12)),
            "fsd_n": int(rng.integers(1, 6)),
            "fsd_beta": spread(rng, 0, 1),
        }
        num_kinds = int(rng.choice([2, 4, 12]))
        prompt, output = random_text(rng, num_kinds), random_text(rng, num_kinds)
        scores, temperature = random_scores(rng, 1, 20), float(rng.choice([0.5, 1.0, 2.0]))
        (token,) = sample(scores.clone(), [state(strategy, prompt, output, temperature=temperature)], [9])
        shaped = scores[0].double().numpy() / temperature
        assert token.id == oracles.fsd(DecodingStrategy(**strategy), prompt + output, shaped)
        assert token.logprob == pytest.approx(float(scores[0].log_softmax(0)[token.id]), abs=1e-4)
        num_others += token.id != int(scores.argmax())
    assert num_others > 100


def test_b6_randomized_fsd_draws_its_first_tokens_now_and_then() -> None:
    scores = torch.tensor([[3.0, 2.9, 2.8, -9.0]])
    plain = state({"fsd_alpha": 0.5}, (1, 2), ())
    fields = {"fsd_alpha": 0.5, "fsd_random_tokens": 10}
    (chosen,) = sample(scores.clone(), [plain], [2])
    num_drawn = 0
    for seed in range(400):
        (early,) = sample(scores.clone(), [state(fields, (1, 2), (), seed=seed, top_p=0.9)], [2])
        (late,) = sample(scores.clone(), [state(fields, (1, 2), (0,) * 10, seed=seed, top_p=0.9)], [12])
        is_drawn = uniform(seed, 2, FSD_STREAM) < 0.5
        num_drawn += is_drawn
        assert is_drawn or early.id == chosen.id
        assert late == sample(scores.clone(), [state({"fsd_alpha": 0.5}, (1, 2), (0,) * 10)], [12])[0]
    assert 150 < num_drawn < 250
    assert 3 not in {sample(scores.clone(), [state(fields, seed=seed, top_p=0.9)], [0])[0].id for seed in range(99)}


def test_b6_xtc_is_tossed_by_seed_and_position() -> None:
    scores = torch.tensor([[2.0, 1.9, 1.8, -3.0]])
    tossed = Counter[bool]()
    for seed in range(200):
        row = state({"xtc_probability": 0.3}, seed=seed, top_n=4)
        (token,) = sample(scores.clone(), [row], [5])
        is_on = uniform(seed, 5, XTC_STREAM) < 0.3
        assert kept(token, 4) == ({2, 3} if is_on else {0, 1, 2, 3})
        tossed[is_on] += 1
    assert 35 < tossed[True] < 85


def test_b6_an_ngram_comes_once_only() -> None:
    rng = np.random.default_rng(0)
    for _ in range(NUM_ROWS):
        size, vocab_size = int(rng.integers(1, 5)), 7
        prompt, output = random_text(rng, vocab_size), random_text(rng, vocab_size)
        params = SamplingParams(strategy=DecodingStrategy(no_repeat_ngram_size=size))
        known = output[: len(output) // 2]
        rules = TokenRules(params, None, frozenset({2}), vocab_size, known, prompt)
        for token_id in output[len(known) :]:
            rules.push(token_id)
        masks = TokenMasks.of([rules], vocab_size)
        assert masks is not None
        allowed = {i for i in range(vocab_size) if masks.bits[0, 0] >> i & 1}
        banned = oracles.repeats_of_ngrams(prompt + output, size)
        assert allowed == (set(range(vocab_size)) - banned or set(range(vocab_size)))


@pytest.mark.parametrize("name", ["tail-free", "mirostat 1", "several"])
def test_b6_draws_come_from_the_distribution_of_the_definition(name: str) -> None:
    """20,000 draws of one row: chi-squared, p > 0.01."""
    num_draws, vocab_size = 20_000, 30
    scores = torch.from_numpy(np.random.default_rng(4).normal(size=vocab_size).astype(np.float32))
    fields = STRATEGIES[name] | ({"xtc_probability": 0.0} if name == "several" else {})
    rows = [state(fields, (1, 2, 3), do_sample=True, seed=seed) for seed in range(num_draws)]
    found = Counter(token.id for token in sample(scores.repeat(num_draws, 1), rows, [3] * num_draws))
    inside = scores.double().numpy()
    for rule, value in (
        (oracles.top_n_sigma, fields.get("top_n_sigma")),
        (oracles.max_k, fields.get("max_k")),
        (oracles.tail_free, fields.get("tfs_z")),
        (oracles.mirostat_1, 6.0 if fields.get("mirostat") == 1 else None),
        (oracles.mirostat_2, 4.0 if fields.get("mirostat") == 2 else None),
    ):
        if value is not None:
            stays = rule(inside, value)
            inside = np.array([x if i in stays else -np.inf for i, x in enumerate(inside)])
    probs = np.exp(inside - inside.max())
    probs /= probs.sum()
    ids = np.flatnonzero(probs)
    assert set(found) <= set(ids.tolist())
    assert len(ids) > 1
    chi_square = sum((found[i] - num_draws * probs[i]) ** 2 / (num_draws * probs[i]) for i in ids.tolist())
    part = 2 / (9 * (len(ids) - 1))
    assert chi_square < (len(ids) - 1) * (1 - part + 2.326 * part**0.5) ** 3  # Wilson and Hilferty's, of p = 0.01


def test_b6_a_mixed_batch_of_all_strategies_is_each_row_alone() -> None:
    generator = np.random.default_rng(0)
    for _ in range(10):
        given = [{"seed": i, "strategy": DecodingStrategy(**each)} for i, each in enumerate(STRATEGIES.values())]
        given += [draw_params(generator) for _ in range(10)]
        rows, alone = (
            [make_row(i, params, np.random.default_rng(i), 60, top_n=5) for i, params in enumerate(given)]
            for _ in range(2)
        )
        for _ in range(3):
            logits = torch.from_numpy(generator.normal(size=(len(rows), 60)).astype(np.float32) * 3)
            masked = [i for i, row in enumerate(rows) if row.start.sampling.grammar]
            masks = make_masks(masked, 60, generator)
            places = [len(row.tokens) for row in rows]
            together = sample(logits.clone(), [row.sampling for row in rows], places, masks)
            for i, row in enumerate(alone):
                own = None
                if masks is not None and i in masks.rows:
                    own = TokenMasks([0], masks.bits[masks.rows.index(i) :][:1])
                (token,) = sample(logits[i : i + 1].clone(), [row.sampling], [places[i]], own)
                assert repr(token) == repr(together[i]), given[i]
                row.take(token.id)
                rows[i].take(token.id)


@pytest.mark.parametrize("name", STRATEGIES)
def test_b6_a_resumed_sequence_goes_on_as_it_would_have(name: str) -> None:
    rng = np.random.default_rng(1)
    logits = torch.from_numpy(rng.normal(size=(30, 12)).astype(np.float32) * 2)
    prompt = (1, 2, 3, 1, 2)
    whole, tokens, mus = state(STRATEGIES[name], prompt, seed=7), list[SampledToken](), list[float | None]()
    for place in range(30):
        mus.append(whole.mu if whole.has_mu else None)
        tokens += sample(logits[place : place + 1].clone(), [whole], [len(prompt) + place])
        whole.push(tokens[-1].id)
    for cut in (1, 9, 20):
        ids = tuple(token.id for token in tokens[:cut])
        resumed = state(STRATEGIES[name], prompt, ids, seed=7, mirostat_mu=mus[cut])
        for place in range(cut, 30):
            (token,) = sample(logits[place : place + 1].clone(), [resumed], [len(prompt) + place])
            assert token == tokens[place]
            resumed.push(token.id)


@pytest.mark.parametrize("name", STRATEGIES)
def test_b6_masks_come_first_and_one_token_always_stays(name: str) -> None:
    for allowed in ([4], [4, 9], []):
        masks = TokenMasks.naming({0: np.array(allowed, dtype=np.int64)}, 12)
        logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(0)) * 9
        (token,) = sample(logits, [state(STRATEGIES[name], (1, 2, 4, 9) * 4, top_n=12)], [16], masks)
        if allowed:
            assert token.id in allowed
            assert token.logprob <= 0.0
        else:
            assert math.isnan(token.logprob)


@pytest.mark.parametrize("name", STRATEGIES)
def test_b6_scores_that_are_no_numbers_stay_in_their_row(name: str) -> None:
    for wrong in (math.nan, math.inf):
        logits = torch.randn(2, 12, generator=torch.Generator().manual_seed(0))
        sound = sample(logits[:1].clone(), [state(STRATEGIES[name])], [0])
        logits[1, 3] = wrong
        found = sample(logits, [state(STRATEGIES[name]), state(STRATEGIES[name])], [0, 0])
        assert found[0] == sound[0]
        assert math.isnan(found[1].logprob)
