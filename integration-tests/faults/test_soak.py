"""The soak: two minutes with five kills, or an hour with one every five. Nothing is lost, nothing grows.

Then one that kills every kind of process: two minutes, or two hours.
"""

from pathlib import Path

import pytest

from funitel_testing.faults.kills import EVERY_KIND
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


def test_every_kind_of_process_dies_and_no_byte_differs(
    tmp_path: Path, figures: dict[str, object], *, is_full: bool
) -> None:
    report, growths = soak(120 if is_full else 2, tmp_path, kills=EVERY_KIND)
    compared = report.bytes
    figures["soak of every process: requests, compared, refused, kills, slowest recovery in seconds"] = (
        report.num_requests,
        compared.num_answers,
        compared.num_refused,
        len(report.kills),
        round(max(report.recoveries), 1),
    )
    assert len(report.kills) >= len(EVERY_KIND)
    assert report.num_requests > 100
    assert compared.num_answers > 100
    assert report.lost == []
    assert report.wrong == []
    assert compared.problems == []
    assert report.left_behind() == []
    assert [str(growth) for growth in growths if not growth.is_none] == []
