"""Samples of an hour: of loaded models only, as many as an hour has, and none of a model that is gone."""

from types import SimpleNamespace
from typing import Any

from funitel.router.fleet.history import MAX_SAMPLES, SECONDS, ModelHistory
from funitel.router.telemetry.metrics import Metrics


def model(name: str, *, is_loaded: bool = True) -> Any:
    service = SimpleNamespace(metrics=Metrics()) if is_loaded else None
    return SimpleNamespace(name=name, service=service)


def history_of(*models: Any) -> tuple[ModelHistory, list[Any]]:
    listed = list(models)
    return ModelHistory(listed), listed


def test_a_sample_has_the_numbers_of_its_moment() -> None:
    one = model("one")
    history, _ = history_of(one)
    one.service.metrics.count_request()
    history.sample(100.0)
    one.service.metrics.count_request()
    history.sample(105.0)
    assert [(each.time, each.numbers.requests) for each in history.since("one", 0)] == [(100.0, 1), (105.0, 2)]
    assert [each.time for each in history.since("one", 100.0)] == [105.0]


def test_an_hour_is_kept() -> None:
    history, _ = history_of(model("one"))
    for i in range(MAX_SAMPLES + 10):
        history.sample(i * SECONDS)
    samples = history.since("one", -1)
    assert len(samples) == MAX_SAMPLES
    assert samples[-1].time - samples[0].time <= 3600


def test_models_that_are_gone_or_not_loaded_have_none() -> None:
    history, listed = history_of(model("one"), model("two", is_loaded=False))
    history.sample(0.0)
    assert (len(history.since("one", -1)), history.since("two", -1)) == (1, [])
    listed.pop(0)
    history.sample(1.0)
    assert history.since("one", -1) == []
    assert history.since("unknown", -1) == []
