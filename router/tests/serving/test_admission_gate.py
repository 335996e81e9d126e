"""Who is turned away at the door, over rooms of every kind."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from engines import expected, request, run, running
from fleets import running as running_fleet

from funitel.proto.errors import DeadlineExceeded, NotReady, Overloaded
from funitel.router.core.request import Request
from funitel.router.scheduler.admission import InFlight
from funitel.router.serving.admission_gate import AdmissionGate, TokenizeLimit, newcomer
from funitel.router.telemetry.metrics import Metrics

NOBODY = InFlight(0, 0)
A, B = b"a", b"b"


class Room:
    """Has room for some, and remembers who else was about to enter."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.entering: list[InFlight] = []

    def check_room(self, newcomer: Request, entering: InFlight) -> None:
        self.entering.append(entering)
        if entering.num_requests >= self.most:
            raise Overloaded("")


def test_whoever_was_let_in_counts_until_it_has_arrived() -> None:
    room = Room(2)
    door = AdmissionGate(lambda: room)
    first, second = door.enter(newcomer(A)), door.enter(newcomer(A))
    with pytest.raises(Overloaded):
        door.check(newcomer(B))
    with pytest.raises(Overloaded):
        door.enter(newcomer(A))
    assert room.entering == [NOBODY, InFlight(1, 1), InFlight(2, 0), InFlight(2, 2)]
    first.leave()
    first.leave()
    door.check(newcomer(A))
    assert room.entering[-1] == InFlight(1, 1), "one has left, once"
    second.leave()
    assert not door._entering, "nothing is kept of those that have left"


def test_a_room_that_is_not_there_yet() -> None:
    def room() -> Room:
        raise NotReady("starting")

    with pytest.raises(NotReady):
        AdmissionGate(room).enter(newcomer())


def test_so_many_read_at_once() -> None:
    metrics = Metrics()
    reading_room = TokenizeLimit(2, metrics)
    door = AdmissionGate(lambda: reading_room)
    entries = [door.enter(newcomer()) for _ in range(2)]
    with pytest.raises(Overloaded, match=": 2 requests are being tokenized, at most 2"):
        door.enter(newcomer())
    assert metrics.registry.get_sample_value("funitel_refused_total", {"reason": "tokenizing"}) == 1
    entries[0].leave()
    door.enter(newcomer())


def refusal_of(act: Callable[[], object]) -> tuple[str, int | None, str]:
    with pytest.raises(Overloaded) as refused:
        act()
    return refused.value.message, refused.value.position, refused.value.reason


async def test_an_engine_says_at_the_door_what_it_would_say_later(tmp_path: Path) -> None:
    async with running(tmp_path, max_concurrent_requests=4, max_batch_size=2) as (engine, (fake,), metrics):
        fake.pause.clear()
        tasks = [asyncio.create_task(run(engine, replace(request(first=i), key=A))) for i in range(3)]
        await asyncio.sleep(0.02)
        engine.check_room(newcomer(A), NOBODY)
        assert (
            refusal_of(lambda: engine.check_room(newcomer(A), InFlight(1, 1)))[0] == ": 4 requests in flight, at most 4"
        )
        tasks.append(asyncio.create_task(run(engine, replace(request(first=3), key=A))))
        await asyncio.sleep(0.02)
        early = refusal_of(lambda: engine.check_room(newcomer(A), NOBODY))
        assert early == refusal_of(lambda: engine.submit(replace(request(), key=A)))
        assert early == (": 4 requests in flight, at most 4", 3, "requests")
        assert metrics.registry.get_sample_value("funitel_refused_total", {"reason": "requests"}) == 3
        engine.check_room(newcomer(B), NOBODY)  # one of the others would leave for it
        assert len(engine.requests) == 4, "and has not yet"
        with pytest.raises(DeadlineExceeded):
            engine.check_room(newcomer(A, deadline=time.monotonic() - 1), NOBODY)
        fake.pause.set()
        assert await asyncio.gather(*tasks) == [expected(request(first=i)) for i in range(4)]


async def test_an_engine_that_drains_turns_everybody_away(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, _, _):
        await engine.close()
        with pytest.raises(NotReady, match="shutting down"):
            engine.check_room(newcomer(), NOBODY)


async def test_a_fleet_counts_over_all_replicas(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, max_concurrent_requests=3) as run_of:
        fleet = run_of.fleet
        for replica in run_of.replicas:
            replica[0].pause.clear()
        streams = [fleet.submit(request(first=i)) for i in range(2)]
        fleet.check_room(newcomer(), NOBODY)
        for entering, num_more in ((InFlight(1, 1), 0), (NOBODY, 1)):
            streams += [fleet.submit(request(first=9)) for _ in range(num_more)]
            said = refusal_of(lambda entering=entering: fleet.check_room(newcomer(), entering))  # type: ignore[misc]
            assert said[0] == ": 3 requests in flight, at most 3"
        for replica in run_of.replicas:
            replica[0].pause.set()
        for stream in streams:
            await stream.last()
