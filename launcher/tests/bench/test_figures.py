"""The arithmetic of `funitel bench`, on timelines made up for it."""

import pytest

from funitel.launcher.bench.figures import (
    Failure,
    Objectives,
    Timeline,
    count_failures,
    medians,
    nearest_rank,
    percentile,
    summarise,
    times_better,
)
from funitel.launcher.bench.workload import MAX_TOKENS, Workload, arrivals

FAILED = Timeline(0.0, 9.0, failure=Failure("cut", "it was cut"))


def timeline(started: float, *arrivals: float, tail: float = 0.0, tokens: int | None = None) -> Timeline:
    return Timeline(started, arrivals[-1] + tail, arrivals, tokens or len(arrivals), num_prompt_tokens=10)


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([3.0, 1.0, 2.0, 4.0], 50) == 2.5
    assert percentile([5.0], 99) == 5.0
    assert percentile(list(range(101)), 90) == 90
    assert percentile([], 50) is None
    assert nearest_rank([1.0, 9.0], 99) == 9.0
    assert nearest_rank([1.0] * 99 + [9.0], 99) == 1.0


def test_times_of_one_request() -> None:
    one = timeline(10.0, 10.5, 10.6, 10.9, tail=0.1)
    assert one.ttft == pytest.approx(0.5)
    assert one.tpot == pytest.approx(0.2)
    assert one.gaps == pytest.approx([0.1, 0.3])
    figures = summarise([one], Objectives())
    assert figures["e2e_ms_p50"] == pytest.approx(1000)
    assert figures["itl_ms_p99"] == pytest.approx(298)


def test_tokens_that_share_an_event_count_for_tpot_and_not_for_gaps() -> None:
    one = timeline(0.0, 1.0, 2.0, tokens=5)
    assert one.tpot == pytest.approx(0.25)
    assert one.gaps == [1.0]


def test_one_token_has_no_time_between_tokens() -> None:
    figures = summarise([timeline(0.0, 1.0)], Objectives())
    assert figures["tpot_ms_p50"] is None
    assert figures["itl_ms_p50"] is None
    assert figures["ttft_ms_p50"] == 1000


def test_rates_span_from_the_first_start_to_the_last_end() -> None:
    figures = summarise([timeline(0.0, 1.0, 2.0), timeline(1.0, 2.0, 3.0, 4.0, tail=1.0)], Objectives())
    assert figures["seconds"] == 5
    assert figures["output_tokens_s"] == 1
    assert figures["requests_s"] == pytest.approx(0.4)
    assert figures["prompt_tokens_mean"] == 10


def test_failures_add_nothing_but_their_number() -> None:
    figures = summarise([timeline(0.0, 1.0, 2.0), FAILED], Objectives())
    assert (figures["requests"], figures["failed"], figures["output_tokens"]) == (2, 1, 2)
    assert figures["output_tokens_s"] == 1
    assert figures["goodput_share"] == 0.5
    assert count_failures([FAILED, timeline(0.0, 1.0), FAILED]) == {"cut": 2}
    nothing = summarise([FAILED], Objectives())
    assert (nothing["output_tokens_s"], nothing["ttft_ms_p50"], nothing["goodput_requests_s"]) == (None, None, 0)


@pytest.mark.parametrize(
    ("objectives", "is_met"),
    [
        (Objectives(), True),
        (Objectives(ttft=0.5), True),
        (Objectives(ttft=0.49), False),
        (Objectives(itl=0.25), True),
        (Objectives(itl=0.24), False),
        (Objectives(ttft=0.5, itl=0.1), False),
    ],
)
def test_goodput_counts_requests_within_every_limit(objectives: Objectives, is_met: bool) -> None:
    one = timeline(0.0, 0.5, 0.75)
    assert objectives.are_met(one) is is_met
    assert summarise([one], objectives)["goodput_requests_s"] == pytest.approx(is_met / 0.75)
    assert not objectives.are_met(FAILED)


def test_medians_leave_out_what_was_not_measured() -> None:
    rounds = [{"a": 1.0, "b": None}, {"a": 9.0, "b": 4.0}, {"a": 2.0, "b": None}]
    assert medians(rounds) == {"a": 2.0, "b": 4.0}
    assert medians([{"a": None}]) == {"a": None}


def test_better_is_more_of_rates_and_less_of_times() -> None:
    fast = summarise([timeline(0.0, 1.0, 2.0)], Objectives())
    slow = summarise([timeline(0.0, 4.0, 6.0)], Objectives())
    ratios = times_better(fast, slow)
    assert ratios["output_tokens_s"] == pytest.approx(3)
    assert ratios["ttft_ms_p50"] == pytest.approx(4)
    assert ratios["tpot_ms_p50"] == pytest.approx(2)
    assert times_better(slow, fast)["tpot_ms_p50"] == pytest.approx(0.5)
    assert times_better(fast, summarise([FAILED], Objectives()))["ttft_ms_p50"] is None


# Workloads


def test_the_same_key_asks_the_same_and_another_something_else() -> None:
    workload = Workload("fixed", 30, 5)
    first, again, other = (workload.prompt_specs(6, *key) for key in ((1, 0), (1, 0), (1, 1)))
    assert first == again
    assert len({ask.words[:8] for ask in first + other}) == 12
    assert {(len(ask.words), ask.prompt_tokens, ask.output_tokens) for ask in first} == {(30, 30, 5)}


def test_lengths_like_conversations_have_their_means_and_their_tail() -> None:
    asks = Workload("sharegpt", 161, 338).prompt_specs(4000, 7)
    prompts, outputs = [a.prompt_tokens for a in asks], [a.output_tokens for a in asks]
    assert 120 < sum(prompts) / len(prompts) < 165
    assert 270 < sum(outputs) / len(outputs) < 345
    assert sorted(prompts)[2000] < 100 < 600 < sorted(prompts)[-40] <= MAX_TOKENS
    assert min(prompts + outputs) >= 4


def test_groups_share_their_prefix_and_nothing_else() -> None:
    asks = Workload("shared-prefix", 40, 5, prefix_tokens=30, num_groups=3).prompt_specs(7, 1)
    prefixes = [ask.prefix_words for ask in asks]
    assert prefixes[0] == prefixes[3] == prefixes[6] != prefixes[1]
    assert len(set(prefixes)) == 3
    assert len({ask.words for ask in asks}) == 7
    assert {(len(a.prefix_words), len(a.words), a.prefix_tokens, a.prompt_tokens) for a in asks} == {(30, 10, 30, 40)}


def test_arrivals_are_random_with_the_rate_asked_for() -> None:
    instants = list(arrivals(5.0, 5000, 3))
    gaps = sorted(later - earlier for earlier, later in zip(instants, instants[1:], strict=False))
    assert instants[0] == 0
    assert instants[-1] / 5000 == pytest.approx(0.2, rel=0.1)
    assert gaps[len(gaps) // 2] == pytest.approx(0.2 * 0.693, rel=0.1)  # the median of exponential gaps
    assert instants[:9] == list(arrivals(5.0, 9, 3)) != list(arrivals(5.0, 9, 4))
