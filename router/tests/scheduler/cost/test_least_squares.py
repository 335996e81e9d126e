"""Least squares of one feature, where each prediction is known: when costs are solved for, and what is believed."""

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


def test_single_outliers_change_little_and_a_lasting_change_is_followed() -> None:
    model = LeastSquares(1)
    for _ in range(50):
        model.observe([1.0], 1.0)
    assert model.predict([1.0]) == pytest.approx(1.0, rel=1e-3)
    for _ in range(3):
        model.observe([1.0], 10.0)
    assert 1.01 < model.predict([1.0]) < 1.1
    for _ in range(80):
        model.observe([1.0], 10.0)
    assert model.predict([1.0]) == pytest.approx(10.0, rel=0.05)


def test_the_number_of_features_never_changes() -> None:
    model = LeastSquares(2)
    with pytest.raises(ValueError, match="shorter"):
        model.predict([1.0])
    with pytest.raises(ValueError, match="shorter"):
        model.observe([1.0], 1.0)
