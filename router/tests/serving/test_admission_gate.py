"""Requests that are refused before their body is read or parsed, by everything that admits."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fleets import expected, request, run
from fleets import running as running_fleet

from funitel.proto.errors import DeadlineExceeded, NotReady, Overloaded
from funitel.router.core.request import Request, Sequence
from funitel.router.scheduler.admission import Admission, InFlight, Reservations
from funitel.router.serving.admission_gate import TokenizeLimit
from funitel.router.serving.arrival import incoming_request
from funitel.router.serving.service import Service
from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics

NOBODY = InFlight(0, 0)
A, B = b"a", b"b"


def test_whoever_was_let_in_counts_until_it_has_arrived() -> None:
    reservations = Reservations()
    assert reservations.in_flight(A) == NOBODY
    first = reservations.hold(A)
    assert reservations.in_flight(A) == InFlight(1, 1)
    second = reservations.hold(A)
    assert [reservations.in_flight(key) for key in (B, A)] == [InFlight(2, 0), InFlight(2, 2)]
    first.release()
    first.release()
    assert reservations.in_flight(A) == InFlight(1, 1), "one has left, once"
    second.release()
    assert not reservations._held, "nothing is kept of those that have left"


def test_a_room_that_is_not_there_yet() -> None:
    with pytest.raises(NotReady):
        Service(RouterSettings()).engine.reserve(incoming_request())


def test_so_many_read_at_once() -> None:
    metrics = Metrics()
    limit = TokenizeLimit(2, metrics)
    held = [limit.reserve(incoming_request()) for _ in range(2)]
    with pytest.raises(Overloaded, match=": 2 requests are being tokenized, at most 2"):
        limit.check_room(incoming_request())
    with pytest.raises(Overloaded, match=": 2 requests are being tokenized, at most 2"):
        limit.reserve(incoming_request())
    assert metrics.registry.get_sample_value("funitel_refused_total", {"reason": "tokenizing"}) == 2
    held[0].release()
    limit.check_room(incoming_request())
    limit.reserve(incoming_request())


def refusal_of(act: Callable[[], object]) -> tuple[str, int | None, str]:
    with pytest.raises(Overloaded) as refused:
        act()
    return refused.value.message, refused.value.position, refused.value.reason


async def test_an_engine_says_at_the_door_what_it_would_say_later(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, 1, max_concurrent_requests=4, max_batch_size=2) as run_of:
        engine, [[fake]], metrics = run_of.fleet, run_of.replicas, run_of.metrics
        fake.pause.clear()
        tasks = [asyncio.create_task(run(engine, replace(request(first=i), key=A))) for i in range(3)]
        await asyncio.sleep(0.02)
        engine.check_room(incoming_request(A))
        reservation = engine.reserve(incoming_request(A))
        for ask in (engine.check_room, engine.reserve, lambda asked: engine.submit(replace(request(), key=A))):
            assert refusal_of(lambda ask=ask: ask(incoming_request(A)))[0] == ": 4 requests in flight, at most 4"  # type: ignore[misc]
        reservation.release()
        tasks.append(asyncio.create_task(run(engine, replace(request(first=3), key=A))))
        await asyncio.sleep(0.02)
        early = refusal_of(lambda: engine.check_room(incoming_request(A)))
        assert early == refusal_of(lambda: engine.submit(replace(request(), key=A)))
        assert early == (": 4 requests in flight, at most 4", 3, "requests")
        assert metrics.registry.get_sample_value("funitel_refused_total", {"reason": "requests"}) == 5
        engine.check_room(incoming_request(B))  # one of the others would leave for it
        assert len(engine._serving[0].engine.requests) == 4, "and has not yet"
        with pytest.raises(DeadlineExceeded):
            engine.check_room(incoming_request(A, deadline=time.monotonic() - 1))
        fake.pause.set()
        assert await asyncio.gather(*tasks) == [expected(request(first=i)) for i in range(4)]


async def test_an_engine_that_drains_turns_everybody_away(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as run_of:
        await run_of.fleet.close()
        for ask in (run_of.fleet.check_room, run_of.fleet.reserve):
            with pytest.raises(NotReady, match="shutting down"):
                ask(incoming_request())


async def test_a_fleet_counts_over_all_replicas(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, max_concurrent_requests=3) as run_of:
        fleet = run_of.fleet
        for replica in run_of.replicas:
            replica[0].pause.clear()
        streams = [fleet.submit(request(first=i)) for i in range(2)]
        fleet.check_room(incoming_request())
        reservation = fleet.reserve(incoming_request())
        for ask in (fleet.check_room, fleet.reserve, lambda _: fleet.submit(request(first=8))):
            assert refusal_of(lambda ask=ask: ask(incoming_request()))[0] == ": 3 requests in flight, at most 3"  # type: ignore[misc]
        reservation.release()
        streams.append(fleet.submit(request(first=9)))
        assert refusal_of(lambda: fleet.check_room(incoming_request()))[0] == ": 3 requests in flight, at most 3"
        for replica in run_of.replicas:
            replica[0].pause.set()
        for stream in streams:
            await stream.last()


async def test_admission_is_asked_twice_at_most_for_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []
    check = Admission.check

    def count(self: Admission, incoming: Sequence, *rest: Any) -> Sequence | None:
        asked.append(incoming.request)
        return check(self, incoming, *rest)

    monkeypatch.setattr(Admission, "check", count)
    async with running_fleet(tmp_path) as run_of:
        incoming, asking = incoming_request(), request()
        run_of.fleet.check_room(incoming)
        run_of.fleet.reserve(incoming).release()
        await run_of.fleet.submit(asking).last()
    assert asked == [incoming, asking], "before its body is read, and once its prompt is known"
