"""Beam search over random scores: equal to its definition in arrays, as transformers states it."""

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import pytest

from funitel.proto.step import FinishReason, Tokens
from funitel.router.core.beam_search import BeamParams, BeamSearch

VOCAB = 12
NONE = -1.0e9  # score of what is not there


def scores_of(ids: tuple[int, ...], seed: int) -> np.ndarray:
    """Log-probabilities of the token after `ids`, of a made-up model."""
    logits = np.random.default_rng([seed, *ids]).normal(size=VOCAB) * 2
    return logits - np.log(np.exp(logits).sum())


@dataclass
class Slots:
    """The finished sequences of the definition: as many places as beams, empty ones with the score `NONE`."""

    ids: list[tuple[int, ...]]
    scores: np.ndarray
    is_finished: np.ndarray


def oracle(seed: int, width: int, longest: int, penalty: float, early: Any, ends: set[int]) -> list[Any]:
    """Sequences and scores, best first, by arrays of all beams at once."""
    kept = max(2, 1 + len(ends)) * width
    beams: list[tuple[int, ...]] = [()] * width
    sums = np.full(width, NONE)
    sums[0] = 0.0
    done = Slots([()] * width, np.full(width, NONE), np.zeros(width, dtype=bool))
    for length in range(1, longest + 1):
        flat = np.concatenate([scores_of(ids, seed) + total for ids, total in zip(beams, sums, strict=True)])
        order = np.argsort(-flat, kind="stable")[:kept]
        ids = [(*beams[at // VOCAB], int(at % VOCAB)) for at in order]
        totals = flat[order]
        hits = np.array([each[-1] in ends or length == longest for each in ids])
        running = np.argsort(-(totals + hits * NONE), kind="stable")[:width]
        finishing = hits & (np.arange(len(order)) < width)
        new = np.where(finishing, totals / length**penalty, NONE * 2)
        merged = np.concatenate([done.scores, new])
        best = np.argsort(-merged, kind="stable")[:width]
        is_finished = np.concatenate([done.is_finished, finishing])[best]
        done = Slots([[*done.ids, *ids][at] for at in best], merged[best], is_finished)
        beams, sums = [ids[at] for at in running], (totals + hits * NONE)[running]
        hypothetical = longest if early == "never" and penalty > 0 else length
        worst = np.where(done.is_finished, done.scores.min(), NONE)
        improves = bool((sums[0] / hypothetical**penalty > worst).any())
        is_open = not (done.is_finished.all() and early is True)
        if not improves or not is_open or hits.all():
            break
    return [(ids, score) for ids, score, there in zip(done.ids, done.scores, done.is_finished, strict=True) if there]


def run(seed: int, params: BeamParams, tops: int | None = None) -> BeamSearch:
    search = BeamSearch(params)
    while not search.is_over:
        found = []
        for beam in search.beams:
            scores = scores_of(beam.ids, seed)
            order = np.argsort(-scores, kind="stable")[: tops or params.num_candidates]
            found.append(Tokens(tuple(map(int, order)), tuple(map(float, scores[order])), ("",) * len(order)))
        search.advance(found)
    return search


@pytest.mark.parametrize("early", [False, True, "never"])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("ends", [set(), {3}, {1, 5, 7}])
def test_beams_are_those_of_the_definition(early: Any, penalty: float, ends: set[int]) -> None:
    for seed in range(6):
        for width in (1, 2, 3, 5):
            params = BeamParams(
                width=width,
                num_returned=width,
                max_new_tokens=7,
                length_penalty=penalty,
                early_stopping=early,
                eos_token_ids=frozenset(ends),
            )
            found = run(seed, params).hypotheses()
            wanted = oracle(seed, width, 7, penalty, early, ends)
            assert [each.ids for each in found] == [ids for ids, _ in wanted]
            assert [each.score for each in found] == pytest.approx([score for _, score in wanted])
            for each in found:
                assert len(each.logprobs) == len(each.tops) == len(each.ids)
                assert sum(each.logprobs) / len(each.ids) ** penalty == pytest.approx(each.score)


def params_of(**changes: Any) -> BeamParams:
    return BeamParams(
        **({"width": 2, "num_returned": 2, "max_new_tokens": 6, "eos_token_ids": frozenset({3})} | changes)
    )


def test_nothing_ends_before_the_least_number_of_tokens() -> None:
    for seed in range(20):
        found = run(seed, params_of(min_new_tokens=4, eos_token_ids=frozenset({1, 2, 3})))
        assert all(len(each.ids) > 4 for each in found.hypotheses())


def test_stop_tokens_and_strings_end_beams() -> None:
    reasons = set()
    for seed in range(20):
        params = params_of(
            stop_token_ids=frozenset({5}), stop_sequences=("<4><",), decode=lambda ids: "".join(f"<{i}>" for i in ids)
        )
        for each in run(seed, params).hypotheses():
            reasons.add(each.finish_reason)
            stops = [place for place, token_id in enumerate(each.ids[:-1]) if token_id in (3, 4, 5)]
            assert stops in ([], [len(each.ids) - 2])  # the token after a 4 completes the stop
            if each.finish_reason is FinishReason.STOP_SEQUENCE:
                assert each.ids[-2] == 4
    assert reasons == {FinishReason.LENGTH, FinishReason.EOS_TOKEN, FinishReason.STOP_SEQUENCE}


def test_what_cannot_follow_is_no_candidate() -> None:
    search = BeamSearch(params_of(width=3))
    search.advance([Tokens((1, 2, 4), (-1.0, -inf, -2.0), ("",) * 3)])
    assert [beam.ids for beam in search.beams] == [(1,), (4,)]


def test_fewer_are_returned_than_searched() -> None:
    assert len(run(1, params_of(width=4, num_returned=2)).hypotheses()) == 2
