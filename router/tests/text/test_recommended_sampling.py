"""Recommended sampling is for /v1 requests that say nothing about sampling, and only for them."""

import json
from pathlib import Path
from typing import Any

import pytest

from funitel.proto.errors import StartupError
from funitel.router.serving.sampling_request import SamplingRequest
from funitel.router.text.model_files import RecommendedSampling, read_recommended


def write(folder: Path, name: str, values: object) -> None:
    (folder / name).write_text(json.dumps(values))


def test_nothing_is_recommended_by_default(tmp_path: Path) -> None:
    assert read_recommended(tmp_path) == RecommendedSampling()
    write(tmp_path, "generation_config.json", {"temperature": 0.6, "eos_token_id": 2})
    assert read_recommended(tmp_path) == RecommendedSampling()


def test_a_sampling_generation_config_comes_before_the_catalogue(tmp_path: Path) -> None:
    write(tmp_path, "funitel.json", {"sampling": {"temperature": 0.2, "top_p": 0.9}})
    assert read_recommended(tmp_path) == RecommendedSampling(0.2, 0.9)
    write(tmp_path, "generation_config.json", {"do_sample": True, "temperature": 0.6, "top_p": 1.0})
    assert read_recommended(tmp_path) == RecommendedSampling(0.6, None)


@pytest.mark.parametrize("values", [{"temperature": -1}, {"temperature": "hot"}, {"top_p": 1.5}])
def test_impossible_recommendations_stop_the_start(tmp_path: Path, values: dict[str, object]) -> None:
    write(tmp_path, "generation_config.json", {"do_sample": True} | values)
    with pytest.raises(StartupError, match=next(iter(values))):
        read_recommended(tmp_path)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "funitel.json").write_text("{")
    with pytest.raises(StartupError, match=r"funitel\.json cannot be read"):
        read_recommended(tmp_path)


def test_requests_beat_recommendations() -> None:
    recommended = RecommendedSampling(0.2, 0.9)

    def chosen(**fields: Any) -> tuple[bool | None, float | None, float | None]:
        parameters = SamplingRequest(**fields).resolved(recommended)
        return parameters.do_sample, parameters.temperature, parameters.top_p

    assert chosen() == (True, 0.2, 0.9)
    assert chosen(temperature=1.0) == (True, 1.0, None)
    assert chosen(seed=4) == (True, None, None)
    assert chosen(top_p=0.5) == (True, None, 0.5)
    assert chosen(temperature=0.7, top_p=1.0) == (True, 0.7, None)
    assert chosen(temperature=0.0) == (False, None, None)


def test_a_recommended_temperature_of_zero_is_greedy() -> None:
    parameters = SamplingRequest().resolved(RecommendedSampling(0.0))
    assert (parameters.do_sample, parameters.temperature) == (False, None)
