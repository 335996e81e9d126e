"""The file of what was used within a minute: what the next router reads of it, whenever the first one ends."""

import errno
import os
import random
from pathlib import Path

import pytest

from funitel.router.tenants.minute_log import OLDER, MinuteLog, MinuteUse


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "minutes"


def begun(path: Path, clock: Clock) -> MinuteLog:
    log = MinuteLog(path, clock)
    log.start()
    return log


def read(path: Path, clock: Clock) -> dict[tuple[str, int], tuple[int, int]]:
    """Requests and tokens by user and key, as the next router counts them."""
    totals: dict[tuple[str, int], tuple[int, int]] = {}
    for use in MinuteLog(path, clock).start():
        requests, tokens = totals.get((use.user, use.key), (0, 0))
        if use.requests or use.tokens:
            totals[use.user, use.key] = (requests + use.requests, tokens + use.tokens)
    return totals


def test_the_first_router_finds_nothing(path: Path, clock: Clock) -> None:
    assert MinuteLog(path, clock).start() == []
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_use_keeps_its_instant(path: Path, clock: Clock) -> None:
    log = begun(path, clock)
    log.count_request("ann", 1)
    clock.now += 10
    log.reserve("ann", 1, 7)
    log.settle("ann", 1, 7, 5)
    clock.now += 20
    uses = [use for use in MinuteLog(path, clock).start() if use.requests or use.tokens]
    assert uses == [
        MinuteUse(clock.now - 30, "ann", 1, 1, 0),
        MinuteUse(clock.now - 20, "ann", 1, 0, 5),
    ]


def test_a_reservation_without_an_end_counts_as_used_when_the_next_router_starts(path: Path, clock: Clock) -> None:
    log = begun(path, clock)
    log.reserve("ann", 1, 100)
    log.reserve("ann", 1, 20)
    log.settle("ann", 1, 100, 30)
    clock.now += 500
    assert [(use.at, use.tokens) for use in MinuteLog(path, clock).start() if use.tokens] == [(clock.now, 20)]
    clock.now += 30
    assert read(path, clock) == {("ann", 1): (0, 20)}, "and it counts once, however many routers start"
    clock.now += 40
    assert read(path, clock) == {}


def test_what_is_older_than_a_minute_is_forgotten(path: Path, clock: Clock) -> None:
    log = begun(path, clock)
    log.count_request("ann", 1)
    clock.now += 59
    log.count_request("ann", 1)
    clock.now += 3
    assert read(path, clock) == {("ann", 1): (1, 0)}


def test_files_stay_small_and_the_minute_before_stays(path: Path, clock: Clock) -> None:
    log = begun(path, clock)
    log.reserve("bea", 2, 9)
    for _ in range(1000):
        clock.now += 1
        log.count_request("ann", 1)
    assert path.stat().st_size + path.with_name(path.name + OLDER).stat().st_size < 130 * 60
    assert read(path, clock)["ann", 1][0] in (60, 61)


def test_a_long_request_stays_reserved_in_later_files(path: Path, clock: Clock) -> None:
    log = begun(path, clock)
    log.reserve("bea", 2, 9)
    for _ in range(5):
        clock.now += 100
        log.count_request("ann", 1)
    assert read(path, clock) == {("bea", 2): (0, 9), ("ann", 1): (1, 0)}


@pytest.mark.parametrize(
    "rest", [b'[1800000000.0, "ann"', b"\xff\xfe\n", b"[]\n", b"{}\n", b'["a",1,2,3,4,5]\n', b"\0" * 99]
)
def test_a_line_that_was_cut_off_is_left_out(path: Path, clock: Clock, rest: bytes) -> None:
    begun(path, clock).count_request("ann", 1)
    with path.open("ab") as file:
        file.write(rest)
    assert read(path, clock) == {("ann", 1): (1, 0)}


def test_a_rollover_that_fails_is_made_up_for(path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    log = begun(path, clock)
    clock.now += 100
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", _fail)
        log.count_request("ann", 1)
    clock.now += 1
    log.count_request("ann", 1)
    assert read(path, clock)["ann", 1][0] >= 1


def _fail(*_: object) -> int:
    raise OSError(errno.ENOSPC, "no space")


def test_a_router_that_ends_leaves_no_file_but_that_of_the_next_one(path: Path, clock: Clock) -> None:
    first = begun(path, clock)
    first.count_request("ann", 1)
    second = begun(path, clock)
    first.close()
    assert path.exists()
    second.close()
    assert list(path.parent.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told_once(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    log = begun(tmp_path / "none" / "minutes", clock)
    for _ in range(3):
        log.count_request("ann", 1)
    assert [record.levelname for record in caplog.records] == ["ERROR"]


@pytest.mark.parametrize("seed", range(20))
def test_it_agrees_with_what_was_counted(path: Path, clock: Clock, seed: int) -> None:
    chance = random.Random(seed)
    log = begun(path, clock)
    events: list[tuple[float, tuple[str, int], int, int]] = []
    open_ones: list[tuple[tuple[str, int], int]] = []
    for _ in range(chance.randrange(400)):
        clock.now += chance.choice([0, 0, 0.2, 1, 5])
        owner = (chance.choice("ab"), chance.randrange(2))
        match chance.choice("crrs"):
            case "c":
                log.count_request(*owner)
                events.append((clock.now, owner, 1, 0))
            case "r":
                open_ones.append((owner, chance.randrange(1, 50)))
                log.reserve(*owner, open_ones[-1][1])
            case _ if open_ones:
                owner, held = open_ones.pop(chance.randrange(len(open_ones)))
                used = chance.randrange(held + 1)
                log.settle(*owner, held, used)
                events.append((clock.now, owner, 0, used))
    expected: dict[tuple[str, int], tuple[int, int]] = {}
    wanted = [event for event in events if clock.now - event[0] < 61]
    for _, owner, requests, tokens in [*wanted, *((0.0, owner, 0, held) for owner, held in open_ones)]:
        before = expected.get(owner, (0, 0))
        expected[owner] = (before[0] + requests, before[1] + tokens)
    assert read(path, clock) == {owner: total for owner, total in expected.items() if total != (0, 0)}
