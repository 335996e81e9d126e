"""Frames, keep-alives, errors and clients that leave, without any route."""

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel
from starlette.types import Message

from funitel.proto.errors import Cancelled, FunitelError, StepFailed
from funitel.router.transport.sse import EventStream, Producer, Put, run_until_disconnect
from funitel.router.transport.sse_frames import named_frame
from funitel.router.transport.stream_writer import DirectSend


class Event(BaseModel):
    text: str


class NamedEvent(BaseModel):
    type: str


class Client:
    """The other side of one response."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.gone = asyncio.Event()

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    async def run(self, producer: Producer, **options: Any) -> None:
        stream = EventStream(producer, lambda error: Event(text=error.message), **options)
        await stream({"type": "http"}, self.receive, self.send)


def produce(*items: str | float | Exception | BaseModel | bytes) -> Producer:
    """Put in strings as events, and events as they are; sleep for numbers, raise errors."""

    async def producer(put: Put) -> None:
        for item in items:
            if isinstance(item, Exception):
                raise item
            if isinstance(item, float):
                await asyncio.sleep(item)
            else:
                put(Event(text=item) if isinstance(item, str) else item)

    return producer


async def test_frames_and_headers() -> None:
    client = Client()
    await client.run(produce("a", "é\n"), headers={"x-extra": "1"})
    start, *_, last = client.sent
    headers = dict(start["headers"])
    assert start["status"] == 200
    assert headers[b"content-type"] == b"text/event-stream"
    assert headers[b"cache-control"] == b"no-cache"
    assert headers[b"x-accel-buffering"] == b"no"
    assert headers[b"x-extra"] == b"1"
    assert b"content-length" not in headers
    assert client.body == 'data: {"text":"a"}\n\ndata: {"text":"é\\n"}\n\n'.encode()
    assert last["more_body"] is False


async def test_done_is_the_last_event() -> None:
    client = Client()
    await client.run(produce("a"), done=True)
    assert client.body.endswith(b"\n\ndata: [DONE]\n\n")


async def test_each_event_is_sent_as_it_comes() -> None:
    client = Client()
    await client.run(produce("a", "b"))
    assert [message.get("body") for message in client.sent[1:]] == [
        b'data: {"text":"a"}\n\n',
        b'data: {"text":"b"}\n\n',
        b"",
    ]


async def test_an_error_before_the_first_event_is_raised() -> None:
    client = Client()
    with pytest.raises(StepFailed):
        await client.run(produce(StepFailed("broken")))
    assert client.sent == []


async def test_an_error_after_it_is_an_event() -> None:
    client = Client()
    await client.run(produce("a", StepFailed("broken")), done=True)
    assert client.body == b'data: {"text":"a"}\n\ndata: {"text":"broken"}\n\ndata: [DONE]\n\n'


async def test_an_exception_nobody_expected_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    client = Client()
    await client.run(produce("a", ZeroDivisionError("secret")))
    assert b"internal error" in client.body
    assert b"secret" not in client.body
    assert "ZeroDivisionError" in caplog.text


async def test_events_can_have_names_and_keep_alives_can_be_events() -> None:
    client = Client()
    events = produce(NamedEvent(type="first"), 0.15, NamedEvent(type="second"))
    await client.run(events, frame=named_frame, keep_alive=b"event: ping\n\n", keep_alive_seconds=0.1)
    first, ping, second, _ = client.body.split(b"\n\n")
    assert first == b'event: first\ndata: {"type":"first"}'
    assert ping == b"event: ping"
    assert second.startswith(b"event: second\n")


async def test_keep_alive_comments_fill_silence() -> None:
    client = Client()
    await client.run(produce("a", 0.25, "b"), keep_alive_seconds=0.1)
    assert client.body == b'data: {"text":"a"}\n\n:\n\n:\n\ndata: {"text":"b"}\n\n'


async def test_a_long_wait_for_the_first_event_sends_the_headers() -> None:
    client = Client()
    await client.run(produce(0.15, StepFailed("broken")), keep_alive_seconds=0.1)
    assert client.sent[0]["status"] == 200
    assert client.body == b':\n\ndata: {"text":"broken"}\n\n'


@pytest.mark.parametrize("first", ["a", 0.0])
async def test_a_client_that_leaves_ends_the_producer_at_once(first: str | float) -> None:
    ended = asyncio.Event()

    async def forever(put: Put) -> None:
        try:
            await produce(first, 60.0)(put)
        finally:
            ended.set()

    client = Client()
    running = asyncio.create_task(client.run(forever))
    await asyncio.sleep(0.05)
    client.gone.set()
    async with asyncio.timeout(1.0):
        await running
    assert ended.is_set()


async def test_an_event_waits_for_a_keep_alive_that_is_being_sent() -> None:
    class Slow(Client):
        async def send(self, message: Message) -> None:
            await asyncio.sleep(0.1)
            self.sent.append(message)

    client = Slow()
    await client.run(produce(0.1, "a"), keep_alive_seconds=0.05)
    assert [message["type"] for message in client.sent][:2] == ["http.response.start", "http.response.body"]
    assert client.body.startswith(b":\n\n")
    assert client.body.replace(b":\n\n", b"") == b'data: {"text":"a"}\n\n'


async def test_no_keep_alives_pile_up_behind_an_event_that_is_being_sent() -> None:
    class Slow(Client):
        async def send(self, message: Message) -> None:
            if message.get("body") == b'data: {"text":"a"}\n\n':
                await asyncio.sleep(0.3)
            self.sent.append(message)

    client = Slow()
    await client.run(produce("a", "b"), keep_alive_seconds=0.05)
    assert client.body == b'data: {"text":"a"}\n\ndata: {"text":"b"}\n\n'


async def test_frames_pass_as_they_are() -> None:
    client = Client()
    await client.run(produce("a", b"data: made before\n\n"))
    assert client.body == b'data: {"text":"a"}\n\ndata: made before\n\n'


async def test_bodies_take_the_direct_way_and_the_start_every_layer() -> None:
    server, layer = Client(), Client()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def through_layer(message: Message) -> None:
            await layer.send(message)
            await send(message)

        stream = EventStream(produce("a", "b"), lambda error: Event(text=error.message), done=True)
        await stream(scope, receive, through_layer)

    await DirectSend(app)({"type": "http"}, server.receive, server.send)
    assert [message["type"] for message in layer.sent] == ["http.response.start"]
    assert [message["type"] for message in server.sent] == ["http.response.start", *["http.response.body"] * 3]
    assert server.body.endswith(b'data: {"text":"b"}\n\ndata: [DONE]\n\n')


async def test_a_client_that_reads_nothing_and_leaves_ends_the_producer() -> None:
    ended = asyncio.Event()

    async def flood(put: Put) -> None:
        try:
            await produce("a", 60.0)(put)
        finally:
            ended.set()

    class Stuck(Client):
        async def send(self, message: Message) -> None:
            await asyncio.sleep(60.0)

    client = Stuck()
    running = asyncio.create_task(client.run(flood))
    await asyncio.sleep(0.05)
    client.gone.set()
    async with asyncio.timeout(1.0):
        await running
    assert ended.is_set()


async def test_work_is_cancelled_when_the_client_leaves() -> None:
    client = Client()
    was_cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            was_cancelled.set()
            raise

    running = asyncio.create_task(run_until_disconnect(client.receive, work()))
    await asyncio.sleep(0.01)
    client.gone.set()
    with pytest.raises(Cancelled):
        await running
    assert was_cancelled.is_set()


async def test_work_that_ends_gives_its_result_or_its_error() -> None:
    async def double(value: int) -> int:
        if value < 0:
            raise FunitelError("negative")
        return 2 * value

    client = Client()
    assert await run_until_disconnect(client.receive, double(3)) == 6
    with pytest.raises(FunitelError, match="negative"):
        await run_until_disconnect(client.receive, double(-1))


async def test_work_runs_in_the_task_of_its_caller_beside_one_that_waits_for_the_client() -> None:
    async def tasks() -> set[asyncio.Task[Any]]:
        await asyncio.sleep(0)
        return asyncio.all_tasks()

    others = asyncio.all_tasks()
    assert len(await run_until_disconnect(Client().receive, tasks()) - others) == 1
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == others


async def test_a_caller_that_is_cancelled_stays_cancelled_though_the_client_leaves_too() -> None:
    client = Client()
    running = asyncio.create_task(run_until_disconnect(client.receive, asyncio.sleep(60.0)))
    await asyncio.sleep(0)
    client.gone.set()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_task_goes_on_after_its_client_left() -> None:
    client = Client()
    client.gone.set()
    with pytest.raises(Cancelled):
        await run_until_disconnect(client.receive, asyncio.sleep(60.0))
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await asyncio.sleep(60.0)


async def test_work_that_ignores_its_cancellation_ends_as_that_of_a_client_that_left() -> None:
    client = Client()
    client.gone.set()

    async def work() -> str:
        try:
            await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            return "done all the same"
        return ""

    with pytest.raises(Cancelled):
        await run_until_disconnect(client.receive, work())
