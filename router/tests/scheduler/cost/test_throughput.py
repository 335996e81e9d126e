"""Throughput as measured, and estimates that become cautious where first tokens come late."""

import pytest
from sequences import make_sequence

from funitel.router.scheduler.cost.throughput import (
    DEFAULT_TOKENS_PER_SECOND,
    FIRST_LATENESS,
    IN_TIME,
    LATENESS_STEP,
    MAX_LATENESS,
    Throughput,
)


def test_throughput_is_what_was_measured_lately() -> None:
    throughput = Throughput()
    assert throughput.tokens_per_second == DEFAULT_TOKENS_PER_SECOND
    for step in range(1000):
        throughput.observe_step(50, 0.2, now=step * 0.1)  # sent while the one before was computed
    assert throughput.tokens_per_second == pytest.approx(500, rel=0.01)
    for step in range(2000):
        throughput.observe_step(1, 0.1, now=200 + step * 10.0)  # idle between steps
    assert throughput.tokens_per_second == pytest.approx(10, rel=0.01)


def test_a_step_weighs_as_much_as_the_time_it_took_by_itself() -> None:
    throughput = Throughput()
    assert throughput.num_observed == 0
    throughput.observe_step(300, 0.5, now=1.0)
    assert throughput.tokens_per_second == pytest.approx((100 * 0.95 + 300) / (0.95 + 0.5))
    throughput.observe_step(40, 9.0, now=3.0)  # it waited for the one before: it took 2 seconds
    assert throughput.tokens_per_second == pytest.approx((395 * 0.8 + 40) / (1.45 * 0.8 + 2))
    throughput.observe_step(60, 30.0, now=93.0)
    assert throughput.tokens_per_second == pytest.approx(60 / 30), "what is older than the memory is forgotten"
    assert throughput.num_observed == 3
    throughput.observe_step(0, 0.0, now=93.0)
    assert throughput.tokens_per_second == pytest.approx(60 / 30)


def test_expected_work_follows_how_long_completions_become() -> None:
    throughput, sequence = Throughput(), make_sequence(0, 30, 100)
    assert throughput.work_of(sequence) == 130
    for i in range(200):
        ended = make_sequence(i, 5, 100)
        ended.output_ids = [7] * 10
        throughput.observe_end(ended)
    assert throughput.num_observed == 200
    assert throughput.work_of(sequence) == pytest.approx(40, abs=1)


def test_work_is_what_is_pending_and_what_is_still_to_be_generated() -> None:
    throughput, sequence = Throughput(), make_sequence(0, 30, 100)
    sequence.num_computed, sequence.output_ids = 30, [7] * 10
    assert throughput.work_of(sequence) == 10 + 90
    sequence.num_computed = 40
    assert throughput.work_of(sequence) == 1 + 90, "a token at least, for one that waits for its next"
    ended = make_sequence(1, 5, 50)
    ended.output_ids = [7] * 25
    throughput.observe_end(ended)
    assert throughput.num_observed == 1
    assert throughput.work_of(sequence) == pytest.approx(1 + 97.5 - 10)
    sequence.output_ids = [7] * 99
    assert throughput.work_of(sequence) == pytest.approx(89)


def test_first_tokens_that_come_late_make_estimates_cautious() -> None:
    throughput, sequence = Throughput(), make_sequence(0, 5, 5)
    assert throughput.cautious(3.0) == 3.0 * FIRST_LATENESS
    sequence.arrived = 10.0
    for waited, step in ((2.0 * FIRST_LATENESS, IN_TIME - 1), (2.0 * FIRST_LATENESS + 0.1, IN_TIME)):
        sequence.estimated_seconds = 2.0
        before = throughput.cautious(1.0)
        throughput.observe_first_token(sequence, 10.0 + waited)
        assert throughput.cautious(1.0) == pytest.approx(before + LATENESS_STEP * step)
        assert sequence.estimated_seconds == 0.0
    for waited, bound in ((1e9, MAX_LATENESS), (0.0, 1.0)):
        for _ in range(5000):
            sequence.estimated_seconds = 2.0
            throughput.observe_first_token(sequence, 10.0 + waited)
        assert throughput.cautious(1.0) == bound
