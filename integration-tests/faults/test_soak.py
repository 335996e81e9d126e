"""The soak: two minutes with five kills, or an hour with one every five. Nothing is lost, nothing grows."""

from pathlib import Path

import pytest

from funitel_testing.faults.soak import soak


@pytest.mark.parametrize("seed", [1])
def test_nothing_is_lost_and_nothing_grows(
    seed: int, tmp_path: Path, figures: dict[str, object], *, is_full: bool
) -> None:
    report, growths = soak(60 if is_full else 2, tmp_path, seed=seed)
    figures["soak: requests, cancelled, kills, slowest recovery in seconds"] = (
        report.num_requests,
        report.num_cancelled,
        len(report.kills),
        round(max(report.recoveries), 1),
    )
    assert len(report.kills) >= 4
    assert report.num_requests > 100
    assert report.num_cancelled > 10
    assert report.lost == []
    assert report.wrong == []
    assert report.left_behind() == []
    assert [str(growth) for growth in growths if not growth.is_none] == []
    assert (tmp_path / "soak.png").stat().st_size > 10_000
