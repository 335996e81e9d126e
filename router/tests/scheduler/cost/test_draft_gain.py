"""Drafts are given up where a step is bound by arithmetic and few are accepted, and tried again later."""

import pytest

from funitel.router.scheduler.cost.chunk_budget import StepLoad
from funitel.router.scheduler.cost.draft_gain import MIN_SHARE, RETRY_STEPS, TRIAL_STEPS, DraftGain
from funitel.router.scheduler.cost.step_cost import StepCostModel


def learnt(share: float, num_steps: int = 200) -> DraftGain:
    gain = DraftGain()
    for _ in range(num_steps):
        gain.observe(16, 32, round(32 * share))
    return gain


def test_drafts_pay_where_more_are_accepted_than_a_token_costs() -> None:
    assert learnt(0.5).pays(0.4)
    assert not learnt(0.5).pays(0.6)
    assert learnt(0.1).pays(MIN_SHARE - 0.01), "one stream: its own drafts decide"
    assert learnt(0.0, TRIAL_STEPS - 1).pays(0.9), "too few to know"


def test_drafts_are_tried_again() -> None:
    gain = learnt(0.0)
    answers = [gain.pays(0.9) for _ in range(RETRY_STEPS + 2)]
    assert not any(answers[:-1])
    assert answers[-1]
    for _ in range(200):
        gain.observe(16, 32, 32)
    assert gain.pays(0.9)


def test_drafts_of_a_step_are_predicted_by_those_before() -> None:
    assert learnt(0.5).drafts_per_row == pytest.approx(2.0, abs=0.01)
    gain = learnt(0.5)
    for _ in range(200):
        gain.observe(16, 0, 0)
    assert gain.drafts_per_row == pytest.approx(0.0, abs=0.01)


def test_a_draft_costs_what_a_token_does() -> None:
    model = StepCostModel()
    for number in range(400):
        rows, drafts = 1 + number % 8, number % 5 * 4
        model.observe(StepLoad(rows, 100 * rows, num_drafts=drafts), 0.010 + 0.001 * (rows + drafts))
    assert model.token_share(StepLoad(1, 100)) == pytest.approx(1 / 11, abs=0.02)
    assert model.token_share(StepLoad(16, 1600, num_drafts=14)) == pytest.approx(30 / 40, abs=0.02)
    assert StepCostModel().token_share(StepLoad(1, 1)) == 0.0
