"""When the next step is planned: before the one under way ends, and late enough for whoever comes meanwhile."""

import pytest

from funitel.router.engine.step_pipeline import MARGIN_SECONDS, MIN_LOOKAHEAD_SECONDS, QUIET_SECONDS, lookahead_seconds


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.006, 0.012])
def test_behind_a_short_step_or_one_unknown_the_next_is_planned_at_once(seconds: float) -> None:
    assert lookahead_seconds(seconds, 0.0, has_several_keys=False) == 0.0


@pytest.mark.parametrize("seconds", [0.02, 0.05, 0.5, 5.0])
def test_behind_a_long_step_there_is_time_for_newcomers_and_for_the_plan(seconds: float) -> None:
    assert MIN_LOOKAHEAD_SECONDS <= lookahead_seconds(seconds, 0.0, has_several_keys=False) <= seconds - MARGIN_SECONDS
    assert lookahead_seconds(seconds, 0.0, has_several_keys=False) > 0.4 * seconds
    assert lookahead_seconds(seconds, 0.0, has_several_keys=False) < 0.8 * seconds, (
        "the step may take less than predicted"
    )


def test_where_nobody_comes_nobody_is_waited_for() -> None:
    waits = lookahead_seconds(0.05, 0.0, has_several_keys=False)
    assert lookahead_seconds(0.05, QUIET_SECONDS - 0.1, has_several_keys=False) == waits > 0.0
    assert lookahead_seconds(0.05, QUIET_SECONDS, has_several_keys=False) == 0.0
    assert lookahead_seconds(0.05, QUIET_SECONDS, has_several_keys=True) == waits
