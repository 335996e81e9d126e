"""Latent attention over chosen tokens."""

from pathlib import Path

import pytest

from funitel.model_server.layers import indexer
from funitel_testing.families import TOLERANCE, worst_error


@pytest.mark.parametrize("most_scores", [1, 700])
def test_scores_are_computed_for_as_many_queries_at_once_as_have_room(
    most_scores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexer, "_MOST_SCORES", most_scores)
    assert worst_error("deepseek_v32", tmp_path, num_decode=4, sizes=(1,))[0] < TOLERANCE
