"""Chunks within a budget of tokens and seconds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funitel.router.scheduler.cost.chunk_budget import MIN_CHUNK_TOKENS, Allowance, ChunkBudget, PromptCosts, StepLoad

COST = st.just(0.0) | st.floats(1e-15, 1e-2)  # in seconds; what is smaller has squares that are no numbers any more
SECONDS = st.just(0.0) | st.floats(1e-9, 10)


@given(st.builds(PromptCosts, COST, COST, COST), SECONDS, st.integers(0, 100_000), st.integers(1, 100_000))
def test_as_many_tokens_as_the_seconds_allow(costs: PromptCosts, seconds: float, context: int, most: int) -> None:
    count = costs.tokens_within(seconds, context, most)
    assert 0 <= count <= most
    assert count == 0 or costs.seconds(context, count) <= seconds * (1 + 1e-9)
    assert count == most or costs.seconds(context, count + 1) > seconds * (1 - 1e-9)


@pytest.mark.parametrize(("seconds", "count"), [(9.0, 3), (10.0, 4), (14.0, 4), (15.0, 5)])
def test_each_token_attends_to_those_before_it_and_to_itself(seconds: float, count: int) -> None:
    assert PromptCosts(per_attended=1.0).tokens_within(seconds, 0, 100) == count


def test_the_chunks_of_a_step_are_added_up() -> None:
    load = StepLoad(2, 30)
    load.add_chunk(16, 2)
    load.add_chunk(8, 3)
    assert load == StepLoad(2, 30, 5, 17 + 18 + 9 + 10 + 11, 24)


def test_what_costs_nothing_is_bounded_by_tokens() -> None:
    assert ChunkBudget(Allowance(100)).fit(5000, 300) == 100
    assert ChunkBudget(Allowance(100)).fit(5000, 30) == 30


def test_a_budget_is_spent_by_tokens() -> None:
    budget = ChunkBudget(Allowance(100))
    assert budget.take(0, 70) == 70
    assert not budget.is_spent
    assert budget.take(16, 70) == 30
    assert budget.is_spent
    assert budget.take(0, 1) == 0
    assert budget.load == StepLoad(0, 0, 100, 70 * 71 // 2 + 30 * 16 + 30 * 31 // 2, 16)


def test_a_budget_is_spent_by_seconds() -> None:
    budget = ChunkBudget(Allowance(100, 0.5), PromptCosts(0.01))
    assert budget.take(0, 20) == 20
    assert budget.take(0, 40) == pytest.approx(30, abs=1)
    assert budget.is_spent


def test_the_first_chunk_has_a_floor_and_later_ones_have_none() -> None:
    budget = ChunkBudget(Allowance(100, 0.0), PromptCosts(0.01))
    assert not budget.is_spent
    assert budget.take(5000, 1) == 1
    assert budget.take(0, 10) == 0
    assert ChunkBudget(Allowance(100, -1.0), PromptCosts(0.01)).take(0, 50) == MIN_CHUNK_TOKENS
    assert ChunkBudget(Allowance(2, -1.0), PromptCosts(0.01)).take(0, 50) == 2, "the token budget is never exceeded"


def test_the_urgent_get_more_and_what_they_take_the_others_lack() -> None:
    budget = ChunkBudget(Allowance(100, 0.5), PromptCosts(0.01), urgent=Allowance(200, 1.2))
    assert budget.take(0, 20) == 20
    assert budget.take(0, 300, is_urgent=True) == pytest.approx(100, abs=1)
    assert budget.is_spent
    assert budget.take(0, 1) == 0
    urgent_first = ChunkBudget(Allowance(100, 0.5), PromptCosts(0.01), urgent=Allowance(200, 1.2))
    assert urgent_first.take(0, 40, is_urgent=True) == 40
    assert urgent_first.take(0, 40) == pytest.approx(10, abs=1)
