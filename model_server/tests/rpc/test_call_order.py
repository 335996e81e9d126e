"""Numbered calls begin in order, once, or are refused."""

import asyncio

import pytest

from funitel.model_server.rpc.call_order import MAX_LATEST, CallOrder
from funitel.proto import generate_pb2 as pb
from funitel.proto.errors import FunitelError, InvalidRequest


class Recorded:
    """An order, the numbers that it has begun, and what it said to those it refused."""

    def __init__(self) -> None:
        self.order = CallOrder()
        self.begun: list[int | None] = []
        self.refused: list[str] = []

    def begin(self, *step_seqs: int | None) -> None:
        def refuse(error: FunitelError) -> None:
            self.refused.append(error.message)

        for step_seq in step_seqs:
            self.order.begin(step_seq, pb.DecodeRequest(), lambda number=step_seq: self.begun.append(number), refuse)  # type: ignore[misc]


async def test_calls_begin_in_order_whatever_order_they_come_in() -> None:
    calls = Recorded()
    calls.begin(3, 2, 5)
    assert calls.begun == []
    calls.begin(1)
    assert calls.begun == [1, 2, 3]
    calls.begin(None, 4)
    assert calls.begun == [1, 2, 3, None, 4, 5]
    assert calls.refused == []


async def test_a_number_is_begun_once() -> None:
    calls = Recorded()
    calls.begin(1, 1, 3, 3)
    assert calls.begun == [1]
    assert calls.refused == ["step_seq 1 was executed already, 2 is next", "step_seq 3 was executed already, 2 is next"]
    calls.begin(2)
    assert calls.begun == [1, 2, 3]


async def test_starting_again_refuses_those_who_wait() -> None:
    calls = Recorded()
    calls.begin(1, 3)
    calls.order.reset()
    assert calls.refused == ["step_seq 3 belongs to a numbering that was given up"]
    calls.begin(1, 2, 3)
    assert calls.begun == [1, 1, 2, 3]


async def test_a_predecessor_that_never_comes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("funitel.model_server.rpc.call_order.ORDER_TIMEOUT_SECONDS", 0.01)
    calls = Recorded()
    calls.begin(5)
    await asyncio.sleep(0.05)
    assert calls.refused == ["step_seq 5 came, 1 did not"]
    calls.begin(1, 2, 3, 4)
    assert calls.begun == [1, 2, 3, 4]


async def test_no_call_begins_once_another_router_has_looked() -> None:
    calls = Recorded()
    calls.begin(1, 3)
    last, latest = calls.order.look()
    assert (last, [number for number, _ in latest]) == (1, [1])
    calls.begin(2, None)
    assert calls.begun == [1, None]
    assert calls.refused == ["step_seq 2 came after another router has looked: TakeOver comes next"]

    calls.order.open()
    calls.order.give_up()
    calls.begin(2)
    assert calls.begun == [1, None, 2]
    assert calls.refused[1:] == ["step_seq 3 belongs to a numbering that was given up"]
    assert [number for number, _ in calls.order.look()[1]] == [1, 2]
    calls.order.reset()
    calls.begin(1)
    assert calls.begun == [1, None, 2, 1]
    assert calls.order.look()[0] == 1


async def test_calls_that_are_missing_begin_where_the_rank_is() -> None:
    calls = Recorded()
    calls.begin(1, 2)
    calls.order.check_missing([])
    calls.order.check_missing([2, 3, 4])
    for wrong in ([4], [3, 5], [4, 3]):
        with pytest.raises(InvalidRequest, match="are not those from step_seq 3 on"):
            calls.order.check_missing(wrong)


async def test_ranks_that_have_begun_the_same_calls_skip_to_the_same_number() -> None:
    one, other = Recorded(), Recorded()
    one.begin(1, 2)
    other.begin(1, 2)
    skipped = one.order.skip_ahead()
    assert one.order.skip_ahead() == other.order.skip_ahead() == skipped  # again where a router died in between
    assert one.order.look()[0] == 2
    one.order.open()
    one.begin(3, 2 + MAX_LATEST)  # of an earlier router, read late
    assert one.begun == [1, 2]
    one.begin(skipped + 2, skipped + 1)
    assert one.begun == [1, 2, skipped + 1, skipped + 2]
    assert one.order.skip_ahead() > skipped + 2 + MAX_LATEST


async def test_numbers_near_the_next_place_to_skip_to_leave_room_for_late_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("funitel.model_server.rpc.call_order.NUMBERS_EACH", 100)
    for num_calls in range(1, 200):
        calls = Recorded()
        calls.begin(*range(1, num_calls + 1))
        assert calls.order.skip_ahead() >= num_calls + MAX_LATEST


async def test_so_many_calls_are_remembered() -> None:
    calls = Recorded()
    calls.begin(*range(1, MAX_LATEST + 3))
    assert [number for number, _ in calls.order.look()[1]] == list(range(3, MAX_LATEST + 3))
