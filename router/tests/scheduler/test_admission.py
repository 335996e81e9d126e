"""Bounds and estimates by themselves, and an engine over fake shards that keeps them."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from engines import expected, request, run, running
from queues import waiting
from sequences import make_sequence

from funitel.proto.errors import DeadlineExceeded, Overloaded
from funitel.router.core.request import Sequence
from funitel.router.scheduler.admission import Admission, Exceeded, InFlight, QueuePosition, Reservations
from funitel.router.scheduler.cost.throughput import DEFAULT_TOKENS_PER_SECOND
from funitel.router.scheduler.waiting_queue import FairShares, WaitingQueue

A, B = b"a", b"b"


def check(
    admission: Admission,
    newcomer: Sequence,
    num_requests: int,
    queue: WaitingQueue,
    shares: FairShares,
    running: list[Sequence],
) -> Sequence | None:
    in_flight = InFlight(num_requests, shares.sequences_of(newcomer.request.key))
    holder = SimpleNamespace(
        waiting=queue, shares=shares, running={each.id: each for each in running}, ttft_estimator=None, remove=None
    )
    return admission.check(newcomer, in_flight, cast(Any, holder))


def test_requests_that_hold_a_place_are_in_flight() -> None:
    places = Reservations()
    assert places.in_flight(A) == InFlight(0, 0)
    held = [places.hold(key) for key in (A, A, B)]
    assert (places.in_flight(A), places.in_flight(B)) == (InFlight(3, 2), InFlight(3, 1))
    assert InFlight(3, 2) + InFlight(10, 1) == InFlight(13, 3)
    for _ in range(2):
        held[0].release()
        assert places.in_flight(A) == InFlight(2, 1)
    held[1].release()
    assert not {A} & places._held.keys(), "keys are not remembered for ever"
    held[2].release()
    assert places.in_flight(B) == InFlight(0, 0)


@pytest.mark.parametrize(
    ("in_flight", "reason"),
    [((13, 13), None), ((14, 14), "key"), ((15, 13), None), ((15, 14), "key"), ((16, 0), "requests")],
)
def test_the_bounds_on_requests(in_flight: tuple[int, int], reason: str | None) -> None:
    exceeded = Admission(16, has_several_keys=True).exceeded_count(InFlight(*in_flight))
    assert (exceeded and exceeded.reason) == reason
    alone = Admission(16).exceeded_count(InFlight(*in_flight))
    assert (alone and alone.reason) == ("requests" if in_flight[0] >= 16 else None)
    for most, own in ((7, 6), (15, 14), (24, 21)):
        words = f"{own} requests of this API key in flight, at most {own}"
        assert Admission(most, has_several_keys=True).exceeded_count(InFlight(own, own)) == Exceeded("key", words)
        assert Admission(most, has_several_keys=True).exceeded_count(InFlight(own, own - 1)) is None
    few = Admission(2, has_several_keys=True)
    assert (few.exceeded_count(InFlight(1, 0)), few.exceeded_count(InFlight(0, 0))) == (None, None)
    assert few.exceeded_count(InFlight(1, 1)) == Exceeded("key", "1 requests of this API key in flight, at most 1")


def test_the_bounds_on_tokens_and_time() -> None:
    bounded = Admission(9, 20)
    assert bounded.exceeded_tokens(0, 0, 100) is None
    assert bounded.exceeded_tokens(1, 15, 5) is None
    assert bounded.exceeded_tokens(1, 15, 6) == Exceeded("queued_tokens", "21 prompt tokens would wait, at most 20")
    assert Admission(9).exceeded_tokens(5, 10**9, 1) is None
    assert Admission.exceeded_deadline(2.0, 2.0) is None
    late = Admission.exceeded_deadline(2.25, 2.0)
    assert late == Exceeded("deadline", "it would wait 2.2 s, more than the 2.0 s it has")


def test_a_key_at_its_own_bound_displaces_no_other() -> None:
    queue, shares = waiting(*(make_sequence(i, 5, 5, key=A if i < 9 else B) for i in range(16)))
    with pytest.raises(Overloaded) as refused:
        check(Admission(8, has_several_keys=True), make_sequence(20, 5, 5, key=B), 7, queue, shares, [])
    assert refused.value.reason == "key"


@pytest.mark.parametrize(
    ("num_running", "seconds", "has_room", "expected"),
    [
        (0, 4.0, True, 4.0),
        (0, 4.5, True, None),
        (1, 2.0, True, 4.0),  # of estimates some are exceeded, but where nothing can come between
        (1, 2.25, True, None),
        (1, 1.2, False, 4.0),  # and for the running one to end, of 80 tokens
        (1, 1.3, False, None),
    ],
)
def test_the_target_of_the_time_to_first_token(
    num_running: int, seconds: float, has_room: bool, expected: float | None
) -> None:
    queue, shares = waiting()
    estimator = SimpleNamespace(
        behind=lambda ahead: SimpleNamespace(has_room=has_room), seconds=lambda incoming, estimate: seconds
    )
    running = {i: make_sequence(i, 30, 50) for i in range(num_running)}
    holder = cast(Any, SimpleNamespace(waiting=queue, shares=shares, running=running, ttft_estimator=estimator))
    admission, incoming = Admission(9, target_seconds=4.0), make_sequence(9, 5, 5)
    if expected is None:
        with pytest.raises(Overloaded, match="the target is 4 s") as refused:
            admission.check(incoming, InFlight(num_running, 0), holder)
        assert (refused.value.reason, refused.value.position) == ("first_token", 1)
        late = (seconds + (0.0 if has_room else 0.8)) * (2 if num_running else 1) - 4.0
        assert refused.value.wait_seconds == pytest.approx(late)
    else:
        assert admission.check(incoming, InFlight(num_running, 0), holder) is None
    assert incoming.estimated_seconds == (pytest.approx(seconds + (0.0 if has_room else 0.8)) if num_running else 0.0)


def test_where_none_waits_none_is_waited_for() -> None:
    admission, incoming = Admission(9), make_sequence(9, 5, 5)
    queue, shares = waiting()
    holder = cast(Any, SimpleNamespace(waiting=queue, shares=shares, running={0: make_sequence(0, 30, 50)}))
    assert admission.position_of(incoming, holder) == QueuePosition(1, 0.0)
    queue.add(make_sequence(1, 10, 10))
    assert admission.position_of(incoming, holder) == QueuePosition(2, pytest.approx(1.0))


def test_what_waits_enters_one_after_another() -> None:
    admission = Admission(9)
    running = [make_sequence(i, length, 50) for i, length in enumerate((30, 50))]
    queue = [make_sequence(i, length, 100) for i, length in ((5, 20), (6, 80), (7, 1))]
    first = 80 * 2 / DEFAULT_TOKENS_PER_SECOND  # the soonest to end, which has half of the throughput
    assert admission.waits(queue, running) == pytest.approx([first, first + 1.2, first + 3.0])
    assert admission.waits(queue, []) == pytest.approx([0.0, 1.2, 3.0])


def test_a_full_house_says_where_one_would_stand_and_how_long() -> None:
    admission = Admission(4)
    queue, shares = waiting(*(make_sequence(i, 50, 50) for i in range(4)))
    with pytest.raises(Overloaded, match=": 4 requests in flight, at most 4") as refused:
        check(admission, make_sequence(9, 5, 5), 4, queue, shares, [])
    assert refused.value.position == 5
    assert refused.value.wait_seconds == 4 * 100 / DEFAULT_TOKENS_PER_SECOND
    assert refused.value.reason == "requests"


def test_a_flood_is_counted_up_once_and_again_when_something_has_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    admission = Admission(2)
    asked = []
    position_of = admission.position_of
    monkeypatch.setattr(admission, "position_of", lambda *rest: asked.append(0) or position_of(*rest))
    queue, shares = waiting(make_sequence(0, 50, 50), make_sequence(1, 50, 50))

    def refused(priority: int = 0, num_running: int = 0) -> tuple[int | None, float | None]:
        running = [make_sequence(50 + i, 50, 50) for i in range(num_running)]
        newcomer = make_sequence(9, 5, 5)
        newcomer.request = replace(newcomer.request, priority=priority)
        with pytest.raises(Overloaded) as refusal:
            check(admission, newcomer, 2, queue, shares, running)
        return refusal.value.position, refusal.value.wait_seconds

    assert [refused() for _ in range(5)] == [(3, 2.0)] * 5
    assert len(asked) == 1
    admission.throughput.observe_step(100, 0.5, now=1.0)
    assert refused() == (3, pytest.approx(1.5, rel=0.1)), "it is faster than was thought"
    assert refused(num_running=1)[1] == pytest.approx(2.25, rel=0.1)
    queue.add(make_sequence(2, 50, 50))
    assert refused()[0] == 4
    assert refused(priority=-1)[0] == 1
    assert len(asked) == 5
    assert [refused()[0], refused(priority=-1)[0]] == [4, 1]
    assert len(asked) == 5


def test_the_key_with_most_gives_its_last_place_to_one_with_fewer() -> None:
    admission = Admission(4)
    flood = [make_sequence(i, 5, 5, key=A) for i in range(4)]
    flood[1].request = replace(flood[1].request, priority=5)
    queue, shares = waiting(*flood)
    assert check(admission, make_sequence(9, 5, 5, key=B), 4, queue, shares, []) is flood[1]
    for sequence in flood:
        sequence.was_started = True  # what has begun is not thrown away
    with pytest.raises(Overloaded):
        check(admission, make_sequence(9, 5, 5, key=B), 4, queue, shares, [])


def test_places_are_not_passed_to_and_fro() -> None:
    admission = Admission(4)
    queue, shares = waiting(*(make_sequence(i, 5, 5, key=A if i < 2 else B) for i in range(4)))
    for key in (A, B):
        with pytest.raises(Overloaded):
            check(admission, make_sequence(9, 5, 5, key=key), 4, queue, shares, [])


def test_one_of_several_keys_leaves_places_to_the_others() -> None:
    admission = Admission(16, has_several_keys=True)
    queue, shares = waiting(*(make_sequence(i, 5, 5, key=A) for i in range(14)))
    with pytest.raises(Overloaded, match=": 14 requests of this API key in flight, at most 14") as refused:
        check(admission, make_sequence(20, 5, 5, key=A), 14, queue, shares, [])
    assert refused.value.reason == "key"
    assert check(admission, make_sequence(20, 5, 5, key=B), 14, queue, shares, []) is None
    only = Admission(1, has_several_keys=True)
    assert check(only, make_sequence(0, 5, 5, key=A), 0, *waiting(), []) is None


def test_prompt_tokens_that_wait_are_bounded_but_one_prompt_may_always_wait() -> None:
    admission = Admission(100, max_queued_tokens=20)
    assert check(admission, make_sequence(0, 50, 5), 0, *waiting(), []) is None
    queue, shares = waiting(make_sequence(0, 15, 5))
    assert check(admission, make_sequence(1, 5, 5), 1, queue, shares, []) is None
    with pytest.raises(Overloaded, match=": 21 prompt tokens would wait, at most 20") as refused:
        check(admission, make_sequence(1, 6, 5), 1, queue, shares, [])
    assert refused.value.reason == "queued_tokens"


@pytest.mark.parametrize(("last_len", "num_tokens", "is_let_in"), [(6, 6, True), (5, 6, False), (1, 5, False)])
def test_prompt_tokens_that_leave_make_room_for_a_key_with_fewer(
    last_len: int, num_tokens: int, is_let_in: bool
) -> None:
    admission = Admission(100, max_queued_tokens=20)
    flood = [make_sequence(i, length, 5, key=A) for i, length in enumerate((20 - last_len, last_len))]
    queue, shares = waiting(*flood)
    incoming = make_sequence(9, num_tokens, 5, key=B)
    if is_let_in:
        assert check(admission, incoming, 4, queue, shares, []) is flood[-1]
    else:
        with pytest.raises(Overloaded) as refused:
            check(admission, incoming, 4, queue, shares, [])
        assert refused.value.reason == "queued_tokens"


def test_the_key_with_most_sequences_is_the_one_that_gives_a_place() -> None:
    keys = [A] * 3 + [B] * 5 + [b"c"] * 4
    queue, shares = waiting(*(make_sequence(i, 5, 5, key=key) for i, key in enumerate(keys)))
    displaced = check(Admission(12), make_sequence(20, 5, 5, key=b"d"), 12, queue, shares, [])
    assert displaced is not None
    assert displaced.id == 7
    for _ in range(3):
        shares.join(b"d")
    displaced = check(Admission(12), make_sequence(23, 5, 5, key=b"d"), 12, queue, shares, [])
    assert displaced is not None
    shares.join(b"d")
    with pytest.raises(Overloaded):
        check(Admission(12), make_sequence(23, 5, 5, key=b"d"), 12, queue, shares, [])


def test_who_would_wait_longer_than_its_deadline_is_refused_at_once() -> None:
    admission = Admission(100)
    queue, shares = waiting(make_sequence(0, 150, 50))
    for seconds, fits in ((3.0, True), (1.5, False)):
        hurried = make_sequence(1, 5, 5, deadline=10.0 + seconds)
        hurried.arrived = 10.0
        if fits:
            assert check(admission, hurried, 1, queue, shares, []) is None
        else:
            with pytest.raises(Overloaded, match=r": it would wait 2.0 s, more than the 1.5 s it has"):
                check(admission, hurried, 1, queue, shares, [])


async def test_a_deadline_ends_a_running_sequence_and_frees_its_blocks_before_the_next_step(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, (fake,), metrics):
        hurried = replace(request(5, 100), deadline=time.monotonic() + 0.1)
        stream = engine.submit(hurried)
        await anext(aiter(stream))
        fake.pause.clear()  # the next step stands still until long after
        with pytest.raises(DeadlineExceeded, match="the deadline passed after [0-9]+ tokens"):
            await stream.last()
        assert engine._scheduler.blocks.num_used == 0
        sent = len(fake.steps)
        fake.pause.set()
        assert await run(engine, request(first=3)) == expected(request(first=3))
        assert all(0 not in step for step in fake.steps[sent + 1 :]), "one was under way"
        assert metrics.registry.get_sample_value("funitel_expired_total", {"state": "running"}) == 1.0


async def test_a_deadline_ends_what_waits_and_what_comes_too_late(tmp_path: Path) -> None:
    async with running(tmp_path, max_batch_size=1) as (engine, (fake,), metrics):
        fake.pause.clear()
        first = asyncio.create_task(run(engine, request()))
        await asyncio.sleep(0.02)
        engine.requests._admission.throughput._tokens = 1e9  # nothing is foreseen
        with pytest.raises(DeadlineExceeded, match="before its first token"):
            await run(engine, replace(request(), deadline=time.monotonic() + 0.05))
        with pytest.raises(DeadlineExceeded, match="before the request was queued"):
            engine.submit(replace(request(), deadline=time.monotonic() - 1))
        fake.pause.set()
        assert await first == expected(request())
        for state in ("waiting", "arriving"):
            assert metrics.registry.get_sample_value("funitel_expired_total", {"state": state}) == 1.0


async def test_a_deadline_kept_disturbs_nobody(tmp_path: Path) -> None:
    async with running(tmp_path) as (engine, _, metrics):
        assert await run(engine, replace(request(), deadline=time.monotonic() + 0.3)) == expected(request())
        await asyncio.sleep(0.35)
        assert engine.requests._timers == {}
        assert await run(engine, request()) == expected(request())
        assert "funitel_expired_total{" not in metrics.exposition().decode()


async def test_a_flood_gives_way_at_the_door_and_in_the_batch(tmp_path: Path) -> None:
    """One key fills every place; another's request takes the place of one that waits, and is served next."""
    async with running(tmp_path, max_concurrent_requests=8, max_batch_size=2) as (engine, (fake,), metrics):
        fake.pause.clear()
        flood = [asyncio.create_task(run(engine, replace(request(5, 40, first=i), key=A))) for i in range(8)]
        await asyncio.sleep(0.05)
        with pytest.raises(Overloaded) as refused:
            engine.submit(replace(request(), key=A))
        assert refused.value.position == 7
        other = replace(request(5, 3, first=50), key=B)
        answer = asyncio.create_task(run(engine, other))
        await asyncio.sleep(0.02)
        fake.pause.set()
        assert await answer == expected(other)
        assert not any(task.done() and task.exception() is None for task in flood), "it was served before the flood"
        answers = await asyncio.gather(*flood, return_exceptions=True)
        assert [type(answer) for answer in answers].count(Overloaded) == 1
        assert isinstance(answers[-1], Overloaded), "the last to come leaves"
        for i, answer in enumerate(answers[:-1]):
            assert answer == expected(request(5, 40, first=i)), "preempted, and resumed as it would have been"
        assert metrics.registry.get_sample_value("funitel_preempted_total") >= 1.0
        for reason in ("displaced", "requests"):
            assert metrics.registry.get_sample_value("funitel_refused_total", {"reason": reason}) == 1.0
