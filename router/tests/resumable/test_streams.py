"""Streams that go on without their client, over scripted producers: numbers, clients, times and bounds."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fakes import eventually
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Message

from funitel.proto.errors import Cancelled, FunitelError, Gone, InvalidRequest, NotFound, StepFailed
from funitel.router.core import request_context
from funitel.router.core.journal import UNKEPT, KeptJournal, RequestJournal
from funitel.router.resumable.header import last_event, resume_seconds
from funitel.router.resumable.streams import MAX_GONE, STREAM_BYTES, ResumableStreams
from funitel.router.transport.kept_answer import JOURNAL
from funitel.router.transport.memory_budget import CLIENT
from funitel.router.transport.sse import EventStream, Put

OWNER = b"owner"
LONG = 100  # seconds


class Said(BaseModel):
    text: str


class Script:
    """A producer that writes what it is told to."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.was_cancelled = False

    async def __call__(self, put: Put) -> None:
        try:
            while (item := await self.told.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                put(item)
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise

    def say(self, *texts: str) -> None:
        for text in texts:
            self.told.put_nowait(b"data: " + text.encode() + b"\n\n")

    def end(self) -> None:
        self.told.put_nowait(None)

    async def has_been_cancelled(self) -> bool:
        return self.was_cancelled


class Reader:
    """The other side of one answer; it counts what waits for it, and may stop to read."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.gone = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.num_unread = self.max_unread = 0

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        self.sent.append(message)

    def keep_unread(self, num_bytes: int) -> None:
        self.num_unread += num_bytes
        self.max_unread = max(self.max_unread, self.num_unread)

    def disconnect(self, reason: str) -> None:
        raise AssertionError(reason)

    def keep_body(self, num_bytes: int) -> None:
        raise AssertionError

    @property
    def body(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    @property
    def is_whole(self) -> bool:
        return bool(self.sent) and self.sent[-1].get("more_body") is False

    async def reads_answer(self, answer: Response, journal: RequestJournal = UNKEPT) -> None:
        await answer({"type": "http", CLIENT: self, JOURNAL: journal}, self.receive, self.send)

    async def has(self, text: str) -> bool:
        return self.body == text

    async def ends_with(self, text: str) -> bool:
        return self.body.endswith(f"{text}\n\n")

    async def gets(self, text: str) -> None:
        await eventually(lambda: self.has(text), f"{text!r}, given {self.body!r}")


class Served:
    """One stream that is answered to its first client."""

    def __init__(
        self,
        streams: ResumableStreams,
        name: str,
        seconds: int,
        *,
        done: bool = False,
        journal: RequestJournal = UNKEPT,
    ) -> None:
        self.streams, self.name, self.journal = streams, name, journal
        self.script, self.client = Script(), Reader()
        self.context = request_context.RequestContext(name)
        stream = EventStream(self.script, lambda error: Said(text=error.message), done=done)
        self.stream = streams.begin(OWNER, name, seconds, stream)
        self.answering = asyncio.create_task(self._answer())

    async def _answer(self) -> None:
        with request_context.request_context(self.name) as self.context:
            await self.client.reads_answer(self.stream, self.journal)

    def attach(self, after: int = 0) -> Response:
        return self.streams.attach(OWNER, self.name, after, "after")

    @asynccontextmanager
    async def reattached(self, after: int = 0) -> AsyncIterator[Reader]:
        reader = Reader()
        reading = asyncio.create_task(reader.reads_answer(self.attach(after)))
        yield reader
        reader.gone.set()
        await reading

    async def leave(self) -> None:
        """Let the first client go."""
        self.client.gone.set()
        await eventually(self.is_left, "the client has left")

    async def is_left(self) -> bool:
        return not self.stream.num_attached


def frames(*texts: str, after: int = 0) -> str:
    return "".join(f"id: {after + number}\ndata: {text}\n\n" for number, text in enumerate(texts, 1))


@pytest.fixture
def streams() -> ResumableStreams:
    return ResumableStreams(LONG, 1 << 20)


async def test_events_and_the_end_are_numbered(streams: ResumableStreams) -> None:
    served = Served(streams, "a", LONG, done=True)
    served.script.say("x", "y\n\ndata: z")  # two frames are written at once
    served.script.end()
    await served.answering
    assert served.client.body == frames("x", "y", "z", "[DONE]")
    assert served.client.is_whole


async def test_a_stream_goes_on_without_its_client_and_is_had_from_any_event(streams: ResumableStreams) -> None:
    served = Served(streams, "a", LONG)
    served.script.say("1")
    await served.client.gets(frames("1"))
    await served.leave()
    served.script.say("2", "3")
    async with served.reattached(1) as reader:
        await reader.gets(frames("2", "3", after=1))
        served.script.say("4")
        await reader.gets(frames("2", "3", "4", after=1))
        served.script.end()
        await served.answering
        await eventually(lambda: reader.has(frames("2", "3", "4", after=1)) if reader.is_whole else _no(), "whole")
    assert served.client.body == frames("1")
    assert served.context.error is None
    async with served.reattached(2) as reader:
        await reader.gets(frames("3", "4", after=2))
    assert served.attach(4).status_code == 204


async def _no() -> bool:
    return False


async def test_all_clients_get_the_events(streams: ResumableStreams) -> None:
    served = Served(streams, "a", LONG)
    served.script.say("1")
    await served.client.gets(frames("1"))
    async with served.reattached() as one, served.reattached(1) as other:
        served.script.say("2")
        await one.gets(frames("1", "2"))
        await other.gets(frames("2", after=1))
        await served.client.gets(frames("1", "2"))
    served.script.end()
    await served.answering


async def test_without_a_client_for_its_time_it_is_cancelled(streams: ResumableStreams) -> None:
    served = Served(streams, "a", 1)
    await served.leave()
    await served.answering
    assert served.script.was_cancelled
    assert isinstance(served.context.error, Cancelled)
    with pytest.raises(Gone, match=r"stream 'a' cannot be resumed any more: it had no client for 1 seconds"):
        served.attach()
    assert streams.num_bytes == 0


async def test_a_client_that_comes_back_in_time_starts_it_anew(streams: ResumableStreams) -> None:
    served = Served(streams, "a", 1)
    await served.leave()
    async with served.reattached():
        await asyncio.sleep(1.2)
        assert not served.script.was_cancelled
    await eventually(served.script.has_been_cancelled, "cancelled")
    await served.answering


async def test_events_stay_for_its_time_after_the_end(streams: ResumableStreams) -> None:
    served = Served(streams, "a", 1)
    served.script.say("1")
    served.script.end()
    await served.answering
    async with served.reattached() as reader:
        await reader.gets(frames("1"))

    async def is_forgotten() -> bool:
        return streams.num_bytes == 0

    await eventually(is_forgotten, "its time is over")
    with pytest.raises(Gone, match="it ended more than 1 seconds ago"):
        served.attach()


async def test_unknown_ids_and_those_of_others_are_not_found(streams: ResumableStreams) -> None:
    served = Served(streams, "a", LONG)
    for owner, name in ((b"other", "a"), (OWNER, "b"), (b"", "a")):
        with pytest.raises(NotFound, match=f"no stream with id '{name}' can be resumed"):
            streams.attach(owner, name, 0, "after")
    served.script.end()
    await served.answering


async def test_an_event_that_was_not_sent_yet_is_refused(streams: ResumableStreams) -> None:
    served = Served(streams, "a", LONG)
    served.script.say("1")
    await served.client.gets(frames("1"))
    with pytest.raises(InvalidRequest, match=r"after: must be an event that the stream has sent, <= 1\. Given: 2"):
        served.attach(2)
    served.script.end()
    await served.answering


async def test_an_error_before_the_first_event_is_raised_to_all(streams: ResumableStreams) -> None:
    served = Served(streams, "a", LONG)
    reader = Reader()
    reading = asyncio.create_task(reader.reads_answer(served.attach()))
    await asyncio.sleep(0)
    served.script.told.put_nowait(StepFailed("broken"))
    for answering in (served.answering, reading, asyncio.create_task(Reader().reads_answer(served.attach()))):
        with pytest.raises(StepFailed, match="broken"):
            await answering
    assert reader.sent == served.client.sent == []


async def test_an_exception_that_is_none_of_ours_tells_nothing(
    streams: ResumableStreams, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served(streams, "a", LONG)
    served.script.told.put_nowait(ZeroDivisionError("secret"))
    with pytest.raises(FunitelError, match="internal error"):
        await served.answering
    with pytest.raises(FunitelError, match="internal error"):
        await Reader().reads_answer(served.attach())
    assert caplog.text.count("ZeroDivisionError: secret") == 1


async def test_a_client_to_which_nothing_can_be_sent_ends_alone(streams: ResumableStreams) -> None:
    served = Served(streams, "a", LONG)
    broken = Reader()

    async def send(message: Message) -> None:
        if message.get("body"):
            raise OSError("broken")

    broken.send = send  # type: ignore[method-assign]
    reading = asyncio.create_task(broken.reads_answer(served.attach()))
    await asyncio.sleep(0)
    for text in ("1", "2", "3"):
        served.script.say(text)
        await eventually(lambda text=text: served.client.ends_with(text), text)
    with pytest.raises(OSError, match="broken"):
        await asyncio.wait_for(reading, 5)
    served.script.end()
    await served.answering
    assert served.client.body == frames("1", "2", "3")


async def test_a_later_error_is_the_last_event(streams: ResumableStreams) -> None:
    served = Served(streams, "a", LONG, done=True)
    served.script.say("1")
    await served.client.gets(frames("1"))
    await served.leave()
    served.script.told.put_nowait(StepFailed("broken"))
    await served.answering
    assert isinstance(served.context.error, StepFailed)
    async with served.reattached(1) as reader:
        await reader.gets(frames('{"text":"broken"}', "[DONE]", after=1))


async def test_a_second_stream_of_the_same_id_takes_the_place_of_the_first(streams: ResumableStreams) -> None:
    first = Served(streams, "a", LONG)
    first.script.say("1")
    await first.client.gets(frames("1"))
    second = Served(streams, "a", LONG)
    second.script.say("2")
    async with second.reattached() as reader:
        await reader.gets(frames("2"))
    first.script.say("1")
    await first.client.gets(frames("1", "1"))  # its client is not disturbed
    first.client.gone.set()
    await first.answering
    assert first.script.was_cancelled
    second.script.end()
    await second.answering


async def test_another_router_says_the_same_bytes_again(streams: ResumableStreams) -> None:
    facts: dict[str, Any] = {}
    first = Served(streams, "a", LONG, journal=KeptJournal("key", {}, facts.update))
    first.stream._stream.keep_alive_seconds = 0.02
    first.script.say("1")
    await eventually(lambda: first.client.ends_with(":"), "a keep-alive")
    first.script.say("2")
    first.script.end()
    await first.answering
    assert first.client.body.startswith(frames("1") + ":\n\n")
    assert first.client.body.endswith(frames("2", after=1))
    second = Served(
        ResumableStreams(LONG, 1 << 20), "a", LONG, journal=KeptJournal("key", facts, facts.update, is_replayed=True)
    )
    second.script.say("1", "2")
    second.script.end()
    await second.answering
    assert second.client.body == first.client.body
    async with second.reattached() as reader:
        await reader.gets(frames("1", "2"))


async def test_another_router_ends_a_stream_with_the_error_of_the_first_at_its_place(streams: ResumableStreams) -> None:
    facts: dict[str, Any] = {}
    first = Served(streams, "a", LONG, journal=KeptJournal("key", facts, facts.update))
    first.script.say("1", "2")
    first.script.told.put_nowait(StepFailed("broken"))
    await first.answering
    assert first.client.body == frames("1", "2", '{"text":"broken"}')
    second = Served(
        ResumableStreams(LONG, 1 << 20), "a", LONG, journal=KeptJournal("key", facts, facts.update, is_replayed=True)
    )
    second.script.say("1", "2", "3")
    second.script.end()
    await second.answering
    assert second.client.body == first.client.body


async def test_the_first_client_ends_with_a_task_that_is_cancelled(streams: ResumableStreams) -> None:
    served = Served(streams, "a", LONG)
    served.script.say("1")
    await served.client.gets(frames("1"))
    served.answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await served.answering
    assert served.script.was_cancelled


# Bounds --------------------------------------------------------------------------------------------------------------


async def test_what_does_not_fit_cannot_be_resumed_and_its_client_goes_on() -> None:
    streams = ResumableStreams(LONG, 2 * STREAM_BYTES + 1000)
    small, large = Served(streams, "small", LONG), Served(streams, "large", LONG)
    small.script.say("1")
    await small.client.gets(frames("1"))
    large.script.say("x" * 500, "y" * 500, "z")
    await large.client.gets(frames("x" * 500, "y" * 500, "z"))
    with pytest.raises(Gone, match=r"cannot be resumed any more: its events did not fit in --max-resume-bytes 3048"):
        large.attach()
    assert streams.num_bytes == STREAM_BYTES + len(frames("1")) + 48
    large.script.end()
    await large.answering
    assert large.client.is_whole
    async with small.reattached() as reader:
        await reader.gets(frames("1"))
    small.script.end()
    await small.answering


async def test_streams_that_have_ended_make_room_first() -> None:
    streams = ResumableStreams(LONG, 3 * STREAM_BYTES + 1000)
    running, early, late = (Served(streams, name, LONG) for name in ("running", "early", "late"))
    for served in (early, late):
        served.script.say("x" * 300)
        served.script.end()
        await served.answering
    running.script.say("y" * 600)
    await running.client.gets(frames("y" * 600))
    with pytest.raises(Gone, match="did not fit"):
        early.attach()
    assert late.attach(1).status_code == 204
    running.script.end()
    await running.answering


async def test_what_does_not_fit_and_has_no_client_is_cancelled() -> None:
    streams = ResumableStreams(LONG, STREAM_BYTES + 200)
    served = Served(streams, "a", LONG)
    await served.leave()
    served.script.say("x" * 500)
    await served.answering
    assert served.script.was_cancelled
    assert isinstance(served.context.error, Cancelled)
    assert streams.num_bytes == 0


async def test_a_stream_for_which_there_is_no_room_at_all_is_answered() -> None:
    streams = ResumableStreams(LONG, 1)
    served = Served(streams, "a", LONG)
    served.script.say("1")
    served.script.end()
    await served.answering
    assert served.client.body == frames("1")
    assert served.context.error is None
    assert streams.num_bytes == 0


async def test_a_client_that_reads_kept_events_gets_all_of_a_stream_that_is_forgotten_meanwhile() -> None:
    streams = ResumableStreams(LONG, STREAM_BYTES + 120_000)
    served = Served(streams, "a", LONG)
    texts = ["x" * 1000] * 100
    served.script.say(*texts)
    await served.client.gets(frames(*texts))
    async with served.reattached() as reader:
        reader.reads.clear()

        async def waits() -> bool:
            return reader.num_unread > 0

        await eventually(waits, "it has begun")
        more = ["y" * 1000] * 30
        served.script.say(*more)
        await served.client.gets(frames(*texts, *more))
        with pytest.raises(Gone):
            served.attach()
        reader.reads.set()
        served.script.say("end")
        await reader.gets(frames(*texts, *more, "end"))
        assert streams.num_bytes == 0
    served.script.end()
    await served.answering


async def test_each_client_has_its_own_backpressure(streams: ResumableStreams) -> None:
    served = Served(streams, "a", LONG)
    texts = ["x" * 1000] * 200
    served.script.say(*texts)
    await served.client.gets(frames(*texts))
    async with served.reattached() as slow, served.reattached() as quick:
        slow.reads.clear()
        await quick.gets(frames(*texts))
        served.script.say("end")
        await quick.gets(frames(*texts, "end"))
        assert quick.num_unread == 0
        slow.reads.set()
        await slow.gets(frames(*texts, "end"))
        assert slow.max_unread < 20_000, "kept events are read at the speed of the client"
    served.script.end()
    await served.answering


async def test_the_live_events_that_a_client_does_not_read_count_as_unread(streams: ResumableStreams) -> None:
    served = Served(streams, "a", LONG)
    async with served.reattached() as slow:
        served.script.say("0")
        await slow.gets(frames("0"))
        slow.reads.clear()
        served.script.say(*["x" * 1000] * 200)

        async def is_unread() -> bool:
            return slow.num_unread > 200_000

        await eventually(is_unread, "unread")
        assert served.client.num_unread == 0
        slow.reads.set()
    served.script.end()
    await served.answering


async def test_reasons_are_kept_of_so_many_streams() -> None:
    streams = ResumableStreams(LONG, 1)
    stream = EventStream(Script(), lambda error: Said(text=error.message))
    for number in range(MAX_GONE + 1):
        streams.begin(OWNER, str(number), 1, stream)
    with pytest.raises(NotFound):
        streams.attach(OWNER, "0", 0, "after")
    with pytest.raises(Gone):
        streams.attach(OWNER, "1", 0, "after")


# Headers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "seconds"), [("1", 1), ("007", 7), ("300", 300)])
def test_seconds_are_read(value: str, seconds: int) -> None:
    assert resume_seconds({"x-resume-seconds": value}, 300) == seconds
    assert resume_seconds({}, 300) is None


@pytest.mark.parametrize("value", ["0", "301", "-1", "1.5", "", "x", "9" * 10, "٣"])
def test_other_seconds_are_refused(value: str) -> None:
    with pytest.raises(InvalidRequest, match=r"header x-resume-seconds: must be an integer >= 1 and <= 300") as raised:
        resume_seconds({"x-resume-seconds": value}, 300)
    assert f"Given: {value!r}" in raised.value.message
    with pytest.raises(InvalidRequest, match="no stream is kept, --max-resume-seconds is 0"):
        resume_seconds({"x-resume-seconds": value}, 0)


@pytest.mark.parametrize(("value", "number"), [("0", 0), ("12", 12), ("", None)])
def test_the_last_event_is_read(value: str, number: int | None) -> None:
    assert last_event({"last-event-id": value}) == number
    assert last_event({}) is None


@pytest.mark.parametrize("value", ["-1", "1.0", "x", "1" * 16, "٣"])
def test_another_last_event_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest, match="header last-event-id: must be an integer >= 0"):
        last_event({"last-event-id": value})
