"""The harness itself: what it must not let pass."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from funitel_testing.faults.asks import Ask, Heard, Kind
from funitel_testing.faults.growth import growth, slope
from funitel_testing.faults.kills import EVERY_KIND
from funitel_testing.faults.load import Load, Outcome
from funitel_testing.faults.page import BEGIN, END, written
from funitel_testing.faults.scenes import Launched, by_hand
from funitel_testing.faults.soak import CROWD, NUM_CROWDS, Soak
from funitel_testing.faults.soak_report import Pace, Report, Sample
from funitel_testing.faults.table import Cost, Fault, judge
from funitel_testing.faults.vitals import IN_USE
from funitel_testing.servers import Server

ASK = Ask(Kind.STREAM, 1, 3)
LEFT = Ask(Kind.STREAM, 1, 3, leave_after=1)


def heard(*texts: str, is_whole: bool = True) -> Heard:
    found = Heard()
    for number, text in enumerate(texts):
        found.add(text)
        found.ids.append(number)
    if is_whole:
        found.final = "".join(texts)
        found.ended.add(0)
    return found


ANSWERS = {ASK: heard("a", "b", "c")}


def outcome(began: float, ended: float, what: Heard, ask: Ask = ASK, loss: str = "") -> Outcome:
    return Outcome(ask, began, ended, what, loss)


async def nothing(_: Any) -> None:
    """A strike."""


def fault(cost: Cost, causes: Callable[[Ask], bool] = lambda _: False) -> Fault:
    return Fault(name="a fault", cost=cost, why="", scene=by_hand, strike=nothing, causes=causes)


@pytest.mark.parametrize(
    ("what", "is_right"),
    [
        (heard("a", "b", "c"), True),
        (heard("a", "b", is_whole=False), True),
        (heard(is_whole=False), True),
        (heard("a", "b"), False),
        (heard("a", "c", is_whole=False), False),
        (heard("a", "b", "c", "c"), False),
        (heard("a", "b", "b", "c"), False),
    ],
    ids=["whole", "beginning", "nothing", "cut", "other", "more", "twice"],
)
def test_a_text_is_the_undisturbed_one_or_its_beginning(what: Heard, is_right: bool) -> None:
    assert what.begins(ANSWERS[ASK]) is is_right


def test_tokens_count_even_where_texts_agree() -> None:
    other = heard("a", "b", "c")
    other.ids[1] = 7
    assert not other.begins(ANSWERS[ASK])


def test_a_loss_is_too_much_unless_it_was_expected_of_a_request_in_flight() -> None:
    before = outcome(0.0, 1.0, heard("a", "b", "c"))
    in_flight = outcome(0.0, 3.0, heard("a", is_whole=False), loss="gone")
    later = outcome(2.5, 3.0, heard(is_whole=False), loss="gone")
    left = outcome(0.0, 3.0, heard("a", is_whole=False), LEFT)
    everything = [before, in_flight, later, left]
    for cost, num_too_much in ((Cost.NOTHING, 2), (Cost.IN_FLIGHT, 1), (Cost.CAUSE, 2)):
        found = judge(fault(cost), everything, 2.0, ANSWERS)
        assert (found.num_requests, found.num_in_flight, len(found.lost)) == (3, 2, 2)
        assert len(found.too_much) == num_too_much
        assert not found.wrong
    assert not judge(fault(Cost.IN_FLIGHT), everything, 2.0, ANSWERS, gone=2.6).too_much
    assert judge(fault(Cost.IN_FLIGHT), everything, 2.0, ANSWERS, gone=2.4).too_much
    assert not judge(fault(Cost.CAUSE, lambda ask: ask == ASK), everything, 2.0, ANSWERS).too_much
    assert judge(
        fault(Cost.IN_FLIGHT), [outcome(0.0, 3.0, heard("b", is_whole=False), loss="gone")], 2.0, ANSWERS
    ).wrong


def test_a_request_that_was_refused_after_the_fault_was_in_flight_and_may_not_be_lost_later() -> None:
    refused = outcome(0.0, 3.0, heard(is_whole=False), loss="gone")
    refused.began = 2.5
    found = judge(fault(Cost.IN_FLIGHT), [refused], 2.0, ANSWERS)
    assert (found.num_in_flight, len(found.too_much)) == (1, 1)


def test_a_line_through_samples_is_not_bent_by_odd_ones() -> None:
    points = [(float(x), 2.0 * x) for x in range(20)]
    points[5], points[12] = (5.0, 900.0), (12.0, -900.0)
    assert slope(points) == pytest.approx(2.0, rel=0.05)
    assert growth("files", points, 1.0, 0.0).total == pytest.approx(38.0, rel=0.05)


@pytest.mark.parametrize(("values", "is_none"), [([5, 5, 6, 5, 5], True), ([5, 6, 7, 8, 9], False)])
def test_growth_within_its_tolerance_is_none(values: list[float], is_none: bool) -> None:
    assert growth("files", list(enumerate(map(float, values))), 0.99, 0.0).is_none is is_none


def silences(pace: Pace, held: Callable[[int, int], dict[str, float]]) -> Report:
    """A soak that found in each silence what is held after so many periods and kills."""
    report = Report()
    for period in range(pace.num_periods):
        num_kills = (period + 1) // pace.kill_every
        values = dict.fromkeys(IN_USE, 0.0) | held(period, num_kills)
        report.samples.append(Sample(pace.period_seconds * period, period, num_kills, values))
    return report


def growing(report: Report, pace: Pace) -> list[str]:
    return [growth.name for growth in report.growths(pace) if not growth.is_none]


def test_a_leak_of_every_shard_and_what_is_left_behind_are_found() -> None:
    pace = Pace.of(2)
    report = silences(
        pace,
        lambda period, _: {"shards files": 20.0 + period, "router files": 9.0, "blocks": float(period == 4)},
    )
    assert growing(report, pace) == ["shards files"]
    assert report.left_behind() == ["blocks 1 after 32 s"]


ROLES = ("launcher", "router", "shards")
COUNTS = [f"{role} {kind}" for role in ROLES for kind in ("files", "sockets", "threads")]


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("minutes", [2, 60])
def test_a_leak_of_one_for_each_kill_is_found(minutes: int, name: str) -> None:
    pace = Pace.of(minutes)
    report = silences(pace, lambda _, num_kills: dict.fromkeys(COUNTS, 9.0) | {name: 9.0 + num_kills})
    assert growing(report, pace) == [name]


@pytest.mark.parametrize("minutes", [2, 60])
def test_a_leak_of_one_for_each_hundred_requests_is_found(minutes: int) -> None:
    pace = Pace.of(minutes)
    in_crowds = NUM_CROWDS * CROWD  # in each period; the requests of clients come on top
    report = silences(pace, lambda period, _: dict.fromkeys(COUNTS, 9.0 + period * in_crowds // 100))
    assert growing(report, pace) == COUNTS


@pytest.mark.parametrize("grows_in", range(Pace.of(2).num_periods))
def test_a_pool_that_grows_once_by_one_is_no_leak(grows_in: int) -> None:
    pace = Pace.of(2)
    report = silences(pace, lambda period, _: dict.fromkeys(COUNTS, 9.0 + (period >= grows_in)))
    assert growing(report, pace) == []


@pytest.mark.parametrize(("minutes", "num_kills"), [(2, 5), (60, 12)])
def test_a_soak_kills_as_it_says(minutes: int, num_kills: int) -> None:
    pace = Pace.of(minutes)
    kills = [period for period in range(pace.num_periods) if pace.is_killing(period)]
    assert pace.num_periods * pace.period_seconds == minutes * 60
    assert len(kills) == num_kills


def test_a_soak_kills_every_kind_in_turn_and_samples_processes_of_the_same_age() -> None:
    pace = Pace.of(120, EVERY_KIND)
    kills = [pace.kill_of(period).name for period in range(pace.num_periods) if pace.is_killing(period)]
    assert kills[: len(EVERY_KIND)] == [kill.name for kill in EVERY_KIND]
    assert len(kills) == 40
    for role in ("launcher", "keeper", "router", "shards", "workers"):
        ages = set()
        born = 0
        for period in pace.counted:
            if pace.is_killing(period) and role in pace.kill_of(period).ends:
                born = period
            if born and pace.counts(role, period):
                ages.add(period - born)
        assert len(ages) == 1, role
    assert all(pace.counts("blocks", period) for period in pace.counted)


async def test_a_load_goes_on_until_the_fault_finds_requests_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load("http://unused.test", [ASK, LEFT], 1, until_struck=True)

    async def answer(*_: object) -> None:
        if len(load.outcomes) == 5:
            load.struck = time.monotonic()

    monkeypatch.setattr(Ask, "put", answer)
    assert [outcome.ask for outcome in await load.run()] == [ASK, LEFT] * 3


@pytest.mark.parametrize(("status", "is_passed_over"), [(503, True), (500, False)])
def test_a_sample_that_is_refused_while_the_router_is_restarted_is_passed_over(
    status: int, is_passed_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "http://127.0.0.1:1"
    server = Server.__new__(Server)
    server.url = url
    error = {"error": "the router was restarted while this request came in", "error_type": "overloaded"}
    refusal = httpx.Response(status, json=error, request=httpx.Request("GET", f"{url}/metrics"))
    monkeypatch.setattr(httpx, "get", lambda *_, **__: refusal)
    scene = cast(Launched, SimpleNamespace(server=server, url=url))
    soak = Soak(scene, tmp_path, Pace.of(2), num_clients=1, pause=1.0, seed=1)
    with nullcontext() if is_passed_over else pytest.raises(httpx.HTTPStatusError):
        soak._sample(None)
    assert soak.report.samples == []
    with pytest.raises(httpx.HTTPStatusError):
        soak._sample(0)


def test_the_table_is_written_between_its_marks() -> None:
    page = f"# Faults\n\n{BEGIN}\nold\n{END}\n\nmore\n"
    once = written(page, [])
    assert once.startswith(f"# Faults\n\n{BEGIN}\n| fault |")
    assert once.endswith(f"{END}\n\nmore\n")
    assert written(once, []) == once
