"""Numbered calls begin in order, once, or are refused."""

import asyncio

import pytest

from funitel.model_server.rpc.call_order import CallOrder
from funitel.proto import generate_pb2 as pb
from funitel.proto.errors import FunitelError


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
