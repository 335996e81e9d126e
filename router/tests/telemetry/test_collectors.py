"""Tallies show what prometheus_client's own metrics would."""

import math

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, Summary, generate_latest

from funitel.router.telemetry.collectors import FastCounter, FastHistogram, FastSummary
from funitel.router.telemetry.metrics import DURATION_BUCKETS

VALUES = (0.0, 0.15e-3, 0.0001 * 1.5**3, 0.1, 1.0, 1.5, 146.0, 1e9, math.inf)


@pytest.mark.parametrize("buckets", [DURATION_BUCKETS, (1, 2, 4), (0.5, 1.0, 100.0)])
def test_a_histogram_is_exposed_as_the_library_does(buckets: tuple[float, ...]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = FastHistogram("some_seconds", "Words.", buckets, ours)
    histogram = Histogram("some_seconds", "Words.", buckets=buckets, registry=theirs)
    assert generate_latest(ours) == generate_latest(theirs)
    for value in (*VALUES, *buckets):
        tally.observe(value)
        histogram.observe(value)
        assert generate_latest(ours) == generate_latest(theirs)


def test_values_that_come_several_times_in_a_row_are_counted_as_often() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = FastHistogram("some_seconds", "Words.", (0.5, 1.0), ours, "method")
    histogram = Histogram("some_seconds", "Words.", ["method"], buckets=(0.5, 1.0), registry=theirs)
    for value, method, count in ((0.25, "a", 3), (0.25, "b", 2), (0.75, "b", 1), (0.25, "b", 2), (0.0, "c", 2)):
        for _ in range(count):
            tally.observe(value, method)
            histogram.labels(method).observe(value)
    for _ in range(2):
        assert generate_latest(ours) == generate_latest(theirs)
        tally.observe(0.0, "c")
        histogram.labels("c").observe(0.0)


def test_a_summary_is_exposed_as_the_library_does() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally, summary = FastSummary("some", "Words.", ours), Summary("some", "Words.", registry=theirs)
    for value in (0, 3, 0.5):
        tally.observe(value)
        summary.observe(value)
    assert generate_latest(ours) == generate_latest(theirs)


def test_series_are_exposed_as_the_library_does() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = FastHistogram("some_seconds", "Words.", (0.5, 1.0), ours, "method")
    histogram = Histogram("some_seconds", "Words.", ["method"], buckets=(0.5, 1.0), registry=theirs)
    assert generate_latest(ours) == generate_latest(theirs)
    for value, method in ((0.1, "decode"), (0.7, "prefill"), (9.0, "decode")):
        tally.observe(value, method)
        histogram.labels(method).observe(value)
        assert generate_latest(ours) == generate_latest(theirs)


def test_a_counter_of_two_labels_is_exposed_as_the_library_does() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = FastCounter("answers", "Words.", ours, "route", "status")
    counter = Counter("answers", "Words.", ["route", "status"], registry=theirs)
    assert generate_latest(ours) == generate_latest(theirs)
    for route, status in (("/a", 200), ("/b", 404), ("/a", 200), ("/a", 404)):
        tally.inc(1, route, str(status))
        counter.labels(route, status).inc()
        assert generate_latest(ours) == generate_latest(theirs)


def test_a_counter_is_exposed_as_the_library_does() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    plain, by_rank = FastCounter("all", "Words.", ours), FastCounter("some", "Words.", ours, "rank")
    counter, counters = Counter("all", "Words.", registry=theirs), Counter("some", "Words.", ["rank"], registry=theirs)
    assert generate_latest(ours) == generate_latest(theirs)
    for rank in (0, 1, 0):
        plain.inc()
        by_rank.inc(2.5, str(rank))
        counter.inc()
        counters.labels(rank).inc(2.5)
        assert generate_latest(ours) == generate_latest(theirs)
