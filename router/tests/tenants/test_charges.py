"""Charges by batches: each counts once, whatever is lost on the way, and what is refused runs not."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import pytest
from fakes import eventually

from funitel.proto.errors import NotReady, QuotaExceeded
from funitel.proto.security.quota import QuotaReservation, Settlement
from funitel.router.fleet.control import ControlAnswer, ControlSocket
from funitel.router.tenants import charges as module
from funitel.router.tenants.charges import MAX_RESERVATIONS, TARGET, Charges

MAX_BODY_BYTES = 1 << 24  # that the control plane takes: launcher/funitel/launcher/control_plane/api/requests.py
PATIENCE_SECONDS = 5.0


@dataclass
class Plane:
    """Stands in for the control plane: it writes as that does, and fails as a test says.

    Attributes:
        is_away: it answers nothing, and has written nothing.
        loses_answers: it writes, and its answer is lost.
        status: of its answers; what is not 200 has written nothing.
        limit: tokens that may be reserved or used; None is no limit.
        raw: instead of the content of an answer.
        gate: it waits for this before it answers.
    """

    is_away: bool = False
    loses_answers: bool = False
    status: int = 200
    limit: int | None = None
    raw: bytes | None = None
    gate: asyncio.Event | None = None
    batches: list[dict[str, Any]] = field(default_factory=list)  # all that came, also those it does not answer
    last: dict[str, int] = field(default_factory=dict)
    reserved: dict[str, dict[str, Any]] = field(default_factory=dict)
    settled: list[dict[str, Any]] = field(default_factory=list)  # each time that a settlement was counted
    num_under_way: int = 0
    most_under_way: int = 0
    on_tell: Callable[["Plane"], None] = lambda plane: None

    async def tell(self, target: str, content: dict[str, Any]) -> ControlAnswer:
        assert target == TARGET
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)
        try:
            return await self._told(json.loads(json.dumps(content)))
        finally:
            self.num_under_way -= 1

    async def _told(self, batch: dict[str, Any]) -> ControlAnswer:
        self.on_tell(self)
        self.batches.append(batch)
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(0)
        if self.is_away:
            raise NotReady("the control plane does not answer")
        if self.status != 200:
            return ControlAnswer(status=self.status, content=b'{"error": "no"}')
        refusals = self._write(batch)
        if self.loses_answers:
            raise NotReady("the answer is lost")
        content = json.dumps({"refusals": refusals}).encode() if self.raw is None else self.raw
        return ControlAnswer(status=200, content=content)

    def _write(self, batch: dict[str, Any]) -> list[dict[str, str] | None]:
        last = self.last.get(batch["router"])
        self.last[batch["router"]] = max(batch["number"], last or 0)
        if last is None or batch["number"] > last:
            for each in batch["settlements"]:
                self.reserved.pop(each["id"], None)
                self.settled.append(each)
        return [self._reserve(each) for each in batch["reservations"]]

    def _reserve(self, new: dict[str, Any]) -> dict[str, str] | None:
        if new["id"] in self.reserved:
            return None
        held = sum(each["tokens"] for each in self.reserved.values())
        if self.limit is not None and held + self.used + new["tokens"] > self.limit:
            return {"limit": "tokens_per_month", "message": f"at most {self.limit} tokens a month"}
        self.reserved[new["id"]] = new
        return None

    @property
    def used(self) -> int:
        return sum(each["prompt_tokens"] + each["completion_tokens"] for each in self.settled)

    def times(self, id: str) -> int:
        """How often a request was counted."""
        return sum(each["requests"] for each in self.settled if each["id"] == id)


@pytest.fixture
def plane(monkeypatch: pytest.MonkeyPatch) -> Plane:
    monkeypatch.setattr(module, "USAGE_SECONDS", 0.02)
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    return Plane()


@pytest.fixture
def charges(plane: Plane) -> Charges:
    return Charges(cast(ControlSocket, plane))


@asynccontextmanager
async def running(charges: Charges) -> AsyncIterator["asyncio.Task[None]"]:
    """Send batches as long as the block lasts."""
    task = asyncio.create_task(charges.run())
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def settled(id: str, *, prompt: int = 3, completion: int = 4) -> Settlement:
    return Settlement(
        id=id,
        at=1.5,
        user="ann",
        key=1,
        model="m",
        requests=1,
        prompt_tokens=prompt,
        completion_tokens=completion,
        cost=0.25,
    )


async def reserve(charges: Charges, id: str, tokens: int = 10) -> None:
    await charges.reserve(QuotaReservation(id=id, at=1.5, user="ann", key=1, model="m", tokens=tokens, cost=0.5))


async def until(holds: Callable[[], object], what: str) -> None:
    async def asked() -> object:
        return holds()

    await eventually(asked, what)


# What is sent


async def test_usage_is_sent_with_all_its_fields(plane: Plane, charges: Charges) -> None:
    charges.settle(settled("a"), is_reserved=False)
    async with running(charges):
        await until(lambda: plane.settled, "settled")
    [batch] = plane.batches
    assert batch["settlements"] == [
        {
            "id": "a",
            "at": 1.5,
            "user": "ann",
            "key": 1,
            "model": "m",
            "requests": 1,
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "cost": 0.25,
        }
    ]
    assert (batch["reservations"], batch["number"]) == ([], 1)


async def test_a_reservation_is_sent_with_all_its_fields_and_returns_once_it_is_written(
    plane: Plane, charges: Charges
) -> None:
    plane.gate = asyncio.Event()
    async with running(charges):
        waiting = asyncio.create_task(reserve(charges, "a"))
        await until(lambda: plane.batches, "asked")
        await asyncio.sleep(0.02)
        assert not waiting.done()
        plane.gate.set()
        await waiting
    assert plane.batches[0]["reservations"] == [
        {"id": "a", "at": 1.5, "user": "ann", "key": 1, "model": "m", "tokens": 10, "cost": 0.5}
    ]


async def test_usage_waits_for_its_time_and_what_has_a_reservation_does_not(
    plane: Plane, charges: Charges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "USAGE_SECONDS", 60.0)
    async with running(charges):
        charges.settle(settled("kept"), is_reserved=False)
        await asyncio.sleep(0.05)
        assert not plane.batches
        charges.settle(settled("at once"), is_reserved=True)
        await until(lambda: plane.batches, "sent")
    assert [each["id"] for each in plane.batches[0]["settlements"]] == ["kept", "at once"]


async def test_nothing_is_sent_where_there_is_nothing(plane: Plane, charges: Charges) -> None:
    async with running(charges):
        await asyncio.sleep(0.1)
    await charges.flush()
    assert not plane.batches


async def test_ids_are_of_their_router_and_unique(plane: Plane, charges: Charges) -> None:
    ids = {charges.new_id() for _ in range(1000)}
    assert len(ids) == 1000
    charges.settle(settled("a"), is_reserved=True)
    await charges.flush()
    router = plane.batches[0]["router"]
    assert all(each.startswith(f"{router}-") for each in ids)
    other = Charges(cast(ControlSocket, plane))
    assert not other.new_id().startswith(f"{router}-")


async def test_one_batch_is_under_way_at_a_time_and_what_comes_meanwhile_makes_the_next(
    plane: Plane, charges: Charges
) -> None:
    plane.gate = asyncio.Event()
    async with running(charges):
        charges.settle(settled("first"), is_reserved=True)
        await until(lambda: plane.batches, "first")
        for number in range(5):
            charges.settle(settled(f"later {number}"), is_reserved=True)
        waiting = [asyncio.create_task(reserve(charges, f"new {number}")) for number in range(5)]
        await asyncio.sleep(0.05)
        assert len(plane.batches) == 1
        plane.gate.set()
        await asyncio.gather(*waiting)
    assert plane.most_under_way == 1
    assert [(len(each["settlements"]), len(each["reservations"])) for each in plane.batches] == [(1, 0), (5, 5)]
    assert [each["number"] for each in plane.batches] == [1, 2]


async def test_a_batch_has_a_bounded_number_of_reservations(plane: Plane, charges: Charges) -> None:
    waiting = [asyncio.create_task(reserve(charges, str(number), 1)) for number in range(MAX_RESERVATIONS + 5)]
    await asyncio.sleep(0)
    async with running(charges):
        await asyncio.gather(*waiting)
    assert [len(each["reservations"]) for each in plane.batches] == [MAX_RESERVATIONS, 5]
    assert set(plane.reserved) == {str(number) for number in range(MAX_RESERVATIONS + 5)}


# Refusals


async def test_a_refusal_is_raised_to_its_request_with_limit_and_message(plane: Plane, charges: Charges) -> None:
    plane.limit = 25
    async with running(charges):
        answers = await asyncio.gather(
            *(reserve(charges, id, tokens) for id, tokens in (("a", 10), ("b", 20), ("c", 15))), return_exceptions=True
        )
    assert answers[0] is answers[2] is None
    assert isinstance(answers[1], QuotaExceeded)
    assert (answers[1].limit, answers[1].message) == ("tokens_per_month", "at most 25 tokens a month")
    assert set(plane.reserved) == {"a", "c"}


async def test_what_is_settled_below_its_reservation_leaves_room_for_others(plane: Plane, charges: Charges) -> None:
    plane.limit = 20
    async with running(charges):
        await reserve(charges, "a", 20)
        with pytest.raises(QuotaExceeded):
            await reserve(charges, "b", 1)
        charges.settle(settled("a", prompt=3, completion=4), is_reserved=True)
        await reserve(charges, "c", 13)
        with pytest.raises(QuotaExceeded):
            await reserve(charges, "d", 1)


async def test_a_limit_holds_whatever_number_of_requests_asks_at_once(plane: Plane, charges: Charges) -> None:
    plane.limit = 200
    most = 0

    def watch(plane: Plane) -> None:
        nonlocal most
        most = max(most, plane.used + sum(each["tokens"] for each in plane.reserved.values()))

    plane.on_tell = watch
    seeded = random.Random(3)

    async def request(number: int) -> bool:
        await asyncio.sleep(seeded.random() / 50)
        try:
            await reserve(charges, str(number), 10)
        except QuotaExceeded:
            return False
        await asyncio.sleep(seeded.random() / 50)
        charges.settle(settled(str(number), prompt=1, completion=seeded.randrange(9)), is_reserved=True)
        return True

    async with running(charges):
        admitted = await asyncio.gather(*(request(number) for number in range(150)))
        await until(lambda: len(plane.settled) == sum(admitted), "settled")
    assert any(admitted)
    assert not all(admitted)
    assert most <= 200
    assert not plane.reserved


# The control plane is away


async def test_what_is_sent_again_has_the_same_number_and_content(plane: Plane, charges: Charges) -> None:
    plane.is_away = True
    charges.settle(settled("a"), is_reserved=True)
    async with running(charges):
        await until(lambda: len(plane.batches) >= 4, "tried")
        charges.settle(settled("b"), is_reserved=True)
        await until(lambda: len(plane.batches) >= 6, "tried again")
        assert {each["number"] for each in plane.batches} == {1}
        assert all([one["id"] for one in each["settlements"]] == ["a"] for each in plane.batches)
        plane.is_away = False
        await until(lambda: len(plane.settled) == 2, "settled")
    assert [each["number"] for each in plane.batches[-2:]] == [1, 2]
    assert (plane.times("a"), plane.times("b")) == (1, 1)


async def test_a_lost_answer_does_not_count_twice(plane: Plane, charges: Charges) -> None:
    plane.loses_answers = True
    charges.settle(settled("a"), is_reserved=True)
    async with running(charges):
        await until(lambda: len(plane.batches) >= 3, "tried")
        plane.loses_answers = False
        charges.settle(settled("b"), is_reserved=True)
        await until(lambda: plane.times("b"), "settled")
    assert (plane.times("a"), plane.times("b")) == (1, 1)
    numbers = [each["number"] for each in plane.batches]
    assert numbers == [1] * (len(numbers) - 1) + [2]


@pytest.mark.parametrize("status", [400, 404, 413, 500, 503])
async def test_an_answer_other_than_200_takes_nothing(plane: Plane, charges: Charges, status: int) -> None:
    plane.status = status
    charges.settle(settled("a"), is_reserved=True)
    async with running(charges):
        with pytest.raises(NotReady, match="the limits of this API key cannot be checked: no"):
            await reserve(charges, "b")
        assert not plane.settled
        plane.status = 200
        await until(lambda: plane.times("a"), "settled")
    assert plane.times("a") == 1


async def test_tries_have_pauses_between_them(plane: Plane, charges: Charges, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 60.0)
    plane.is_away = True
    charges.settle(settled("a"), is_reserved=True)
    async with running(charges):
        await asyncio.sleep(0.1)
        assert len(plane.batches) == 1


async def test_a_reservation_while_the_control_plane_is_away_is_refused_and_settled_as_unused(
    plane: Plane, charges: Charges
) -> None:
    plane.is_away = True
    async with running(charges):
        with pytest.raises(NotReady, match="cannot be checked"):
            await reserve(charges, "a")
        plane.is_away = False
        await until(lambda: plane.settled, "settled")
    assert [(each["id"], each["requests"], each["cost"]) for each in plane.settled] == [("a", 0, 0.0)]
    assert plane.used == 0


async def test_a_reservation_that_was_written_though_its_answer_was_lost_is_given_back(
    plane: Plane, charges: Charges
) -> None:
    plane.loses_answers = True
    async with running(charges):
        with pytest.raises(NotReady):
            await reserve(charges, "a")
        assert set(plane.reserved) == {"a"}
        plane.loses_answers = False
        await until(lambda: not plane.reserved, "given back")
    assert plane.times("a") == 0


async def test_requests_without_a_limit_of_a_month_are_kept_while_the_control_plane_is_away(
    plane: Plane, charges: Charges
) -> None:
    """All usage is kept until it is taken: memory is not bounded, and nothing is left out."""
    plane.is_away = True
    async with running(charges):
        for number in range(5000):
            charges.settle(settled(str(number)), is_reserved=False)
        await until(lambda: len(plane.batches) >= 3, "tried")
        plane.is_away = False
        await until(lambda: len(plane.settled) == 5000, "settled")
    assert len({each["id"] for each in plane.settled}) == 5000


async def test_what_was_kept_for_long_is_sent_in_batches_that_hold_up_no_stream_for_long(
    plane: Plane, charges: Charges
) -> None:
    """The control plane refuses a larger body with 413 each time it comes, and all charges with it."""
    count = 9 * 1024 + 1  # of a minute and a half, by 100 requests a second
    for number in range(count):
        charges.settle(settled(f"{'a' * 24}-{number:024}"), is_reserved=False)
    async with running(charges):
        await until(lambda: len(plane.settled) == count, "settled")
    assert max(len(json.dumps(each)) for each in plane.batches) <= MAX_BODY_BYTES
    assert [len(each["settlements"]) for each in plane.batches] == [1024] * 9 + [1]  # each is 5 to 20 ms of the loop


def test_what_is_sent_is_all_that_a_record_holds() -> None:
    reservation = QuotaReservation(id="a", at=1.5, user="ann", key=1, model="m", tokens=7, cost=0.5)
    assert module._objects(module._RESERVATION, [reservation]) == [asdict(reservation)]
    assert module._objects(module._SETTLEMENT, [settled("a")]) == [asdict(settled("a"))]


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_is_lost_each_request_counts_once(plane: Plane, charges: Charges, seed: int) -> None:
    seeded = random.Random(seed)

    def fail(plane: Plane) -> None:
        plane.is_away, plane.loses_answers = seeded.random() < 0.3, seeded.random() < 0.3
        plane.status = seeded.choice((200, 200, 200, 503))

    plane.on_tell = fail
    expected: dict[str, int] = {}

    async def request(number: int) -> None:
        await asyncio.sleep(seeded.random() / 20)
        has_limit = seeded.random() < 0.5
        try:
            if has_limit:
                async with asyncio.timeout(seeded.choice((0.002, 1.0))):  # some clients leave
                    await reserve(charges, str(number))
        except (NotReady, TimeoutError):
            expected[str(number)] = 0
            return
        await asyncio.sleep(seeded.random() / 50)
        charges.settle(settled(str(number)), is_reserved=has_limit)
        expected[str(number)] = 1

    async with running(charges):
        await asyncio.gather(*(request(number) for number in range(60)))
        plane.on_tell = lambda plane: None
        plane.is_away, plane.loses_answers, plane.status = False, False, 200
        charges.settle(settled("last"), is_reserved=True)
        await until(lambda: plane.times("last"), "settled")
        await until(lambda: not plane.reserved, f"given back: {plane.reserved}")
    assert {id: plane.times(id) for id in expected} == expected
    numbers = [each["number"] for each in plane.batches]
    assert numbers == sorted(numbers)


# Clients that leave


async def test_a_client_that_leaves_before_its_reservation_is_sent_is_not_sent(plane: Plane, charges: Charges) -> None:
    waiting = asyncio.create_task(reserve(charges, "a"))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    async with running(charges):
        await reserve(charges, "b")
    assert [[each["id"] for each in batch["reservations"]] for batch in plane.batches] == [["b"]]


async def test_a_client_that_leaves_while_its_reservation_is_written_gets_it_back(
    plane: Plane, charges: Charges
) -> None:
    plane.gate = asyncio.Event()
    async with running(charges):
        waiting = asyncio.create_task(reserve(charges, "a"))
        await until(lambda: plane.batches, "asked")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        plane.gate.set()
        await until(lambda: plane.settled, "given back")
    assert not plane.reserved
    assert plane.used == 0


async def test_a_client_that_leaves_while_its_reservation_is_refused_is_not_settled(
    plane: Plane, charges: Charges
) -> None:
    plane.gate, plane.limit = asyncio.Event(), 5
    async with running(charges):
        waiting = asyncio.create_task(reserve(charges, "a", 6))
        await until(lambda: plane.batches, "asked")
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        plane.gate.set()
        await asyncio.sleep(0.05)
    assert (plane.settled, plane.reserved) == ([], {})


async def test_a_client_that_leaves_in_the_instant_of_the_answer_gets_its_reservation_back(
    plane: Plane, charges: Charges
) -> None:
    """The answer is there, the request has not taken it yet: it raises, and must not leave a reservation for ever."""
    waiting = asyncio.create_task(reserve(charges, "a"))
    await asyncio.sleep(0)
    charges.settle(settled("b"), is_reserved=False)
    await charges.flush()  # has the answer, and has not let the request go on
    assert set(plane.reserved) == {"a"}
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with running(charges):
        await until(lambda: not plane.reserved, "given back")


# Answers that are none


MALFORMED = [b"", b"no JSON", b"[]", b"{}", b'{"refusals": null}', b'{"refusals": []}', b'{"refusals": [{}]}', b"\xff"]


@pytest.mark.parametrize("raw", MALFORMED)
async def test_a_malformed_answer_refuses_the_reservation_and_ends_nothing(
    plane: Plane, charges: Charges, raw: bytes
) -> None:
    plane.raw = raw
    async with running(charges) as task:
        with pytest.raises(NotReady):
            async with asyncio.timeout(0.5):
                await reserve(charges, "a")
        plane.raw = None
        await reserve(charges, "b")
        assert not task.done()


# The end


async def test_the_end_sends_what_was_used_last(plane: Plane, charges: Charges) -> None:
    async with running(charges):
        await asyncio.sleep(0)
    charges.settle(settled("a"), is_reserved=False)
    charges.settle(settled("b"), is_reserved=True)
    await charges.flush()
    assert (plane.times("a"), plane.times("b")) == (1, 1)


async def test_a_batch_that_the_end_cuts_off_is_sent_again_by_its_number(plane: Plane, charges: Charges) -> None:
    plane.gate = asyncio.Event()
    charges.settle(settled("a"), is_reserved=True)
    async with running(charges):
        await until(lambda: plane.batches, "under way")
    plane.gate = None
    await charges.flush()
    assert [each["number"] for each in plane.batches] == [1, 1]
    assert plane.times("a") == 1


async def test_what_came_while_the_cut_off_batch_was_under_way_is_sent_too(plane: Plane, charges: Charges) -> None:
    plane.gate = asyncio.Event()
    charges.settle(settled("a"), is_reserved=True)
    async with running(charges):
        await until(lambda: plane.batches, "under way")
        charges.settle(settled("b"), is_reserved=True)
    plane.gate = None
    await charges.flush()
    assert (plane.times("a"), plane.times("b")) == (1, 1)


async def test_a_reservation_whose_batch_the_end_cuts_off_is_given_back(plane: Plane, charges: Charges) -> None:
    """It may have been written: without a settlement it would count as used for ever."""
    plane.gate = asyncio.Event()
    async with running(charges):
        waiting = asyncio.create_task(reserve(charges, "a"))
        await until(lambda: plane.batches, "under way")
        plane.reserved["a"] = plane.batches[0]["reservations"][0]  # it is written, and not answered
    plane.gate = None
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await charges.flush()
    assert not plane.reserved


async def test_what_the_end_loses_is_counted_in_the_log(
    plane: Plane, charges: Charges, caplog: pytest.LogCaptureFixture
) -> None:
    plane.is_away = True
    for id in ("a", "b", "c"):
        charges.settle(settled(id), is_reserved=False)
    await charges.flush()
    assert caplog.messages == ["the usage of 3 requests is lost: the control plane does not answer"]


async def test_a_control_plane_that_hangs_is_not_waited_for(
    plane: Plane, charges: Charges, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.05)
    plane.gate = asyncio.Event()
    async with running(charges):
        with pytest.raises(NotReady, match="has not answered"):
            await reserve(charges, "a")
        plane.gate.set()
        plane.gate = None
        await reserve(charges, "b")
