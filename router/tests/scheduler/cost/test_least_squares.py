"""Least squares where each prediction is known: what costs are, when they are solved for, and what is believed."""

from itertools import product

import pytest

from funitel.router.scheduler.cost.least_squares import FIRST, LeastSquares


@pytest.mark.parametrize(("options", "solve_every"), [({}, 1), ({"solve_every": 5}, 5)])
def test_costs_are_solved_for_after_each_of_the_first_measurements_then_after_some(
    options: dict[str, int], solve_every: int
) -> None:
    model, changed = LeastSquares(1, **options), []
    for number in range(1, FIRST + 11):
        before = model.predict([1.0])
        model.observe([1.0], 1.0 + number / 100)
        changed.append(model.predict([1.0]) != before)
        assert model.num_observed == number
    assert changed == [number <= FIRST or number % solve_every == 0 for number in range(1, FIRST + 11)]


@pytest.mark.parametrize("costs", [[2.0, 3.0], [0.5, 4.0, 1.0], [1.0, 0.0, 2.0, 3.0]])
def test_the_cost_of_each_feature_is_found(costs: list[float]) -> None:
    model = LeastSquares(len(costs))
    for features in product((0.5, 1.0, 2.0), repeat=len(costs)):
        model.observe(features, sum(cost * feature for cost, feature in zip(costs, features, strict=True)))
    assert model.costs == pytest.approx(costs, abs=0.01)


@pytest.mark.parametrize("usual", [1.0, 0.01])
def test_single_outliers_change_little_and_a_lasting_change_is_followed(usual: float) -> None:
    model = LeastSquares(1)
    for _ in range(50):
        model.observe([1.0], usual)
    assert model.predict([1.0]) == pytest.approx(usual, rel=1e-3)
    for _ in range(3):
        model.observe([1.0], 10 * usual)
    assert 1.01 < model.predict([1.0]) / usual < 1.1
    for _ in range(80):
        model.observe([1.0], 10 * usual)
    assert model.predict([1.0]) == pytest.approx(10 * usual, rel=0.05)


@pytest.mark.parametrize("num_zeros", [1, 100])
def test_what_seemed_to_cost_nothing_is_learnt_all_the_same(num_zeros: int) -> None:
    model, taken = LeastSquares(1), []
    for _ in range(num_zeros):
        model.observe([1.0], 0.0, rest=0.02)
    for _ in range(40):
        taken.append(model.observe([1.0], 0.04, rest=0.02))
    assert taken[-1]
    assert model.predict([1.0]) == pytest.approx(0.04, rel=0.06)


def test_it_says_whether_a_measurement_was_more_than_is_believed() -> None:
    model = LeastSquares(1)
    assert all(model.observe([1.0], 1.0) for _ in range(50))
    assert model.observe([1.0], 1.1)
    assert not model.observe([1.0], 2.0)
    assert model.observe([1.0], 0.1)  # less is no danger


def test_the_number_of_features_never_changes() -> None:
    model = LeastSquares(2)
    with pytest.raises(ValueError, match="shorter"):
        model.predict([1.0])
    with pytest.raises(ValueError, match="shorter"):
        model.observe([1.0], 1.0)
