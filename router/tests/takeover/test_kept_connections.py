"""The bytes that a client gets are those of one router, wherever routers die: over real sockets."""

import asyncio
import json
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
from fakes import eventually
from kept_sockets import KeptSockets, kept_sockets
from pydantic import BaseModel
from sockets import SMALL
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from funitel.proto.errors import FunitelError
from funitel.router.core.journal import RequestJournal
from funitel.router.transport.kept_answer import keep
from funitel.router.transport.kept_connection import KeptConnection
from funitel.router.transport.sse import EventStream, Put
from funitel.router.transport.takeover import Lost

POST = b"POST /%b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n%b\r\n%b"
NUM_EVENTS = 30
DATE_LINE = b"date: Sat, 28 Nov 2026 12:00:00 GMT\r\n"


class ErrorEvent(BaseModel):
    error: str


def post(path: str, body: bytes = b"text", headers: bytes = b"") -> bytes:
    return POST % (path.encode(), len(body), headers, body)


def event(journal: RequestJournal, seed: int, number: int) -> bytes:
    """Depends on the seed, and every seventh on a fact that is drawn in mid-stream."""
    drawn = journal.draw(f"drawn.{number}", lambda: random.randrange(10**6)) if number % 7 == 6 else 0
    return b"data: %d %d %d %b\n\n" % (number, seed, drawn, b"x" * random.Random(seed + number).randrange(1, 90))


class App:
    """Streams and whole answers that depend on what is drawn. A stream goes as far as `limit` lets it."""

    def __init__(self) -> None:
        self.limit = asyncio.Condition()
        self.num_allowed = 0
        self.num_runs = 0
        self.keep_alive_seconds = 60.0
        self.fails_at: int | None = None
        self.holds = asyncio.Event()  # answers that are not kept
        self.holds.set()

    async def allow(self, count: int) -> None:
        async with self.limit:
            self.num_allowed = count
            self.limit.notify_all()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_runs += 1
        request = Request(scope, receive)
        match scope["path"].split("/")[1:]:
            case ["stream", *_]:
                body = await request.body()
                answer = self._stream(keep(scope), body)
            case ["whole", length]:
                await request.body()
                seed = keep(scope).draw("seed", lambda: random.randrange(10**9))
                answer = Response(random.Random(seed).randbytes(int(length)), headers={"x-seed": str(seed)})
            case ["broken"]:
                await request.body()
                keep(scope)
                answer = PlainTextResponse("broken", 500)
            case ["parts"]:
                await self.holds.wait()
                answer = StreamingResponse(self._parts())
            case ["early"]:
                answer = PlainTextResponse("early")
            case _:
                body = await request.body()
                await self.holds.wait()
                answer = PlainTextResponse(b"plain " + body)
        await answer(scope, receive, send)

    async def _parts(self) -> Any:
        for number in range(2):
            yield b"part %d" % number
            await self.reach(number + 1)

    async def reach(self, number: int) -> None:
        async with self.limit:
            await self.limit.wait_for(lambda: self.num_allowed >= number)

    def _stream(self, journal: RequestJournal, body: bytes) -> EventStream:
        seed = journal.draw("seed", lambda: random.randrange(10**9))

        async def produce(put: Put) -> None:
            for number in range(NUM_EVENTS):
                if self.num_allowed < number + 1:
                    await self.reach(number + 1)
                if number == self.fails_at:
                    raise FunitelError(f"broken {random.randrange(10**9)}")
                put(event(journal, seed, number))
                if number % 3 == 0:
                    await asyncio.sleep(0)

        return EventStream(
            produce,
            lambda error: ErrorEvent(error=error.message),
            done=True,
            headers={"x-drawn": str(random.randrange(10**9)), "x-body": body.decode()},
            keep_alive_seconds=self.keep_alive_seconds,
        )


async def head_of(sockets: KeptSockets) -> bytes:
    return await sockets.client.reader.readuntil(b"\r\n\r\n")


async def chunks_of(sockets: KeptSockets) -> list[bytes]:
    """The chunks of an answer; each line and each end is checked."""
    chunks, reader = [], sockets.client.reader
    while True:
        line = await reader.readuntil(b"\r\n")
        assert re.fullmatch(rb"[0-9a-f]+\r\n", line), line
        data = await reader.readexactly(int(line, 16) + 2)
        assert data.endswith(b"\r\n")
        if len(data) == 2:
            return chunks
        chunks.append(data[:-2])


def check_stream(chunks: Sequence[bytes], num_keep_alives: int = 0) -> None:
    """Every event is there once, a chunk of its own, with one seed and its own length."""
    events = [chunk for chunk in chunks if chunk != b":\n\n"]
    assert len(chunks) - len(events) == num_keep_alives
    *events, last = events
    assert last == b"data: [DONE]\n\n"
    assert len(events) == NUM_EVENTS
    seeds = set()
    for number, chunk in enumerate(events):
        found = re.fullmatch(rb"data: (\d+) (\d+) (\d+) (x+)\n\n", chunk)
        assert found is not None, chunk
        seed = int(found[2])
        seeds.add(seed)
        assert int(found[1]) == number
        assert len(found[4]) == random.Random(seed + number).randrange(1, 90)
    assert len(seeds) == 1


async def is_idle(sockets: KeptSockets) -> None:
    """The journal is empty, and the connection serves on."""

    async def is_empty() -> bool:
        return not sockets.journals.requests

    await eventually(is_empty, "the journal is empty")
    sockets.client.send(post("plain", b"last"))
    assert await sockets.client.response() == (200, b"plain last")


async def refused(sockets: KeptSockets) -> None:
    """The next answer says that a request was lost, and the connection ends."""
    head = await head_of(sockets)
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nconnection: close\r\n" in head
    assert b"\r\nretry-after: 1\r\n" in head
    body = json.loads(await sockets.client.reader.read())
    assert body["error_type"] == "overloaded"


# Streams ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deaths", [[0], [1], [6, 7], [29], [30], [3, 3, 12, 13, 25]], ids=str)
async def test_a_stream_goes_on_at_the_byte_where_its_router_died(deaths: list[int]) -> None:
    app = App()
    async with kept_sockets(app) as sockets:
        sockets.client.send(post("stream"))
        for count in deaths:
            await app.allow(count)
            await has_run(app)
            if count:
                await has_come(sockets, count)
            await sockets.restart()
        await app.allow(NUM_EVENTS)
        head = await head_of(sockets)
        assert head.count(DATE_LINE) == 1
        check_stream(await chunks_of(sockets))
        await is_idle(sockets)


async def has_run(app: App) -> None:
    async def run() -> bool:
        return app.num_runs > 0

    await eventually(run, "the application runs")
    await asyncio.sleep(0)


async def has_come(sockets: KeptSockets, count: int) -> None:
    """Wait until so many events were written, without taking them from the client's buffer."""

    async def come() -> bool:
        return bytes(sockets.client.reader._buffer).count(b"\n\n\r\n") >= count  # type: ignore[attr-defined]

    await eventually(come, f"{count} events")


@pytest.mark.parametrize("taken", [1, 30, 100, 200, 350, 1000])
async def test_a_death_within_an_event_tears_nothing(taken: int) -> None:
    """The kernel takes `taken` bytes of a write, and the transport has the rest."""
    app = App()
    async with kept_sockets(app) as sockets:
        sockets.client.send(post("stream"))
        await has_run(app)
        cut_writes(sockets, taken)
        await app.allow(NUM_EVENTS // 2)
        await sockets.has_written(taken)
        await sockets.restart()
        await app.allow(NUM_EVENTS)
        await head_of(sockets)
        check_stream(await chunks_of(sockets))
        await is_idle(sockets)


def cut_writes(sockets: KeptSockets, count: int) -> None:
    """Give the kernel no more than so many bytes."""
    assert sockets.connection is not None
    inner, left = sockets.connection.transport._inner, count  # type: ignore[attr-defined]
    write = inner.write

    def cut(data: bytes) -> None:
        nonlocal left
        write(data[:left])
        left -= min(left, len(data))

    sockets.connection.transport._inner = Cut(inner, cut)  # type: ignore[attr-defined]


class Cut:
    """A transport of which the kernel has taken less than was written."""

    def __init__(self, inner: Any, write: Callable[[bytes], None]) -> None:
        self._inner = inner
        self.write = write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get_write_buffer_size(self) -> int:
        return 1 << 30


async def test_a_slow_reader_gets_each_event_as_a_chunk_and_nothing_twice() -> None:
    app = App()
    big = 300

    async def produce(put: Put) -> None:
        for number in range(big):
            put(b"data: %d %b\n\n" % (number, b"y" * 2000))
            if number % 50 == 0:
                await asyncio.sleep(0)

    async def streams(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()
        keep(scope)
        await EventStream(produce, lambda error: ErrorEvent(error=error.message))(scope, receive, send)

    async with kept_sockets(streams, send_buffer=SMALL, receive_buffer=SMALL) as sockets:
        sockets.client.send(post("stream"))
        await head_of(sockets)
        chunks = []
        for number in range(big):
            if number % 60 == 30:
                await sockets.restart()
            line = await sockets.client.reader.readuntil(b"\r\n")
            chunks.append((await sockets.client.reader.readexactly(int(line, 16) + 2))[:-2])
        assert chunks == [b"data: %d %b\n\n" % (number, b"y" * 2000) for number in range(big)]
        assert await chunks_of(sockets) == []
        await is_idle_of(sockets)
    assert app.num_runs == 0


async def is_idle_of(sockets: KeptSockets) -> None:
    async def is_empty() -> bool:
        return not sockets.journals.requests

    await eventually(is_empty, "the journal is empty")


@pytest.mark.parametrize("count", [0, 5])
async def test_keep_alives_are_sent_again_at_their_places_and_no_others_before(count: int) -> None:
    app = App()
    app.keep_alive_seconds = 0.05
    async with kept_sockets(app) as sockets:
        sockets.client.send(post("stream"))
        await app.allow(count)
        await has_come(sockets, count + 2)
        await sockets.die()
        known = bytes(sockets.client.reader._buffer).count(b"\r\n:\n\n\r\n")  # type: ignore[attr-defined]
        assert known >= 1
        drawn = [name for name in sockets.journals.requests[1].facts if name.startswith("repeat.")]
        app.keep_alive_seconds = 0.02
        await app.allow(0)  # this router is slower than the first: it says nothing of its own meanwhile
        await sockets.start()
        if count:
            await asyncio.sleep(0.1)
            assert [name for name in sockets.journals.requests[1].facts if name.startswith("repeat.")] == drawn
        app.keep_alive_seconds = 60.0
        await sockets.restart()
        await app.allow(NUM_EVENTS)
        await head_of(sockets)
        chunks = await chunks_of(sockets)
        places = [place for place, chunk in enumerate(chunks) if chunk == b":\n\n"]
        assert set(range(count, count + known)) <= set(places)
        check_stream(chunks, len(places))


async def test_a_producer_that_is_ahead_of_its_keep_alives_puts_them_at_their_places() -> None:
    """On a replay events come before the first turn of what sends keep-alives."""
    app = App()
    app.keep_alive_seconds = 0.05
    async with kept_sockets(app) as sockets:
        sockets.client.send(post("stream"))
        await app.allow(1)
        await has_come(sockets, 2)
        await sockets.die()
        await app.allow(NUM_EVENTS)
        app.keep_alive_seconds = 60.0
        await sockets.start()
        await head_of(sockets)
        chunks = await chunks_of(sockets)
        assert chunks[1] == b":\n\n"
        check_stream(chunks, chunks.count(b":\n\n"))


async def test_an_error_in_mid_stream_is_sent_again_as_it_was() -> None:
    app = App()
    app.fails_at = 4
    async with kept_sockets(app) as sockets:
        sockets.client.send(post("stream"))
        sockets.journals.on_put = lambda facts: cut_writes(sockets, 40) if "failure" in facts else None
        await app.allow(NUM_EVENTS)

        async def has_failed() -> bool:
            return any("failure" in each.facts for each in sockets.journals.requests.values())

        await eventually(has_failed, "the stream has failed")
        known = json.loads(sockets.journals.requests[1].facts["failure"][1].removeprefix("data: "))
        await sockets.restart()
        await head_of(sockets)
        *_, failed, done = await chunks_of(sockets)
        assert json.loads(failed.removeprefix(b"data: ")) == known
        assert done == b"data: [DONE]\n\n"


@pytest.mark.parametrize("fails_at", [0, 2])
async def test_an_error_where_there_was_none_ends_the_connection_and_is_not_mixed_in(fails_at: int) -> None:
    app = App()
    async with kept_sockets(app) as sockets:
        sockets.client.send(post("stream"))
        await app.allow(6)
        await has_come(sockets, 6)
        before = bytes(sockets.client.reader._buffer)  # type: ignore[attr-defined]
        app.fails_at = fails_at
        await sockets.restart()
        assert await sockets.client.answer() == before


@pytest.mark.parametrize("path", ["broken", "plain", "whole/10"])
async def test_another_answer_than_the_one_that_was_begun_ends_the_connection(path: str) -> None:
    app, other = App(), App()

    async def answers_otherwise(scope: Scope, receive: Receive, send: Send) -> None:
        scope["path"] = f"/{path}"
        await other(scope, receive, send)

    async with kept_sockets(app) as sockets:
        sockets.client.send(post("stream"))
        await app.allow(6)
        await has_come(sockets, 6)
        before = bytes(sockets.client.reader._buffer)  # type: ignore[attr-defined]
        await sockets.restart(answers_otherwise)
        assert await sockets.client.answer() == before
        assert other.num_runs == 1


# Whole answers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1000, 5_000_000])
@pytest.mark.parametrize("taken", [0, 20, 400, 100_000])
async def test_a_whole_answer_is_the_one_that_was_noted_and_runs_once(length: int, taken: int) -> None:
    app = App()
    async with kept_sockets(app) as sockets:
        sockets.journals.on_put = lambda facts: cut_writes(sockets, taken) if "answer" in facts else None
        sockets.client.send(post(f"whole/{length}"))

        async def is_noted() -> bool:
            return any("answer" in each.facts for each in sockets.journals.requests.values())

        await eventually(is_noted, "the answer is in the journal")
        sockets.journals.on_put = lambda facts: None
        await sockets.restart()
        head = await head_of(sockets)
        seed = int(head.partition(b"x-seed: ")[2].partition(b"\r\n")[0])
        assert await sockets.client.reader.readexactly(length) == random.Random(seed).randbytes(length)
        assert app.num_runs == 1
        await is_idle(sockets)


async def test_a_whole_answer_that_is_too_long_for_the_journal_is_rendered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("funitel.router.transport.kept_answer.MAX_ANSWER_BYTES", 1000)
    app = App()
    async with kept_sockets(app) as sockets:
        sockets.journals.on_put = lambda facts: cut_writes(sockets, 3000) if "head" in facts else None
        sockets.client.send(post("whole/5000"))
        await sockets.has_written(3000)
        sockets.journals.on_put = lambda facts: None
        await sockets.restart()
        head = await head_of(sockets)
        seed = int(head.partition(b"x-seed: ")[2].partition(b"\r\n")[0])
        assert await sockets.client.reader.readexactly(5000) == random.Random(seed).randbytes(5000)
        assert app.num_runs == 2
        await is_idle(sockets)


# Several requests on a connection -----------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", [[3], [3, 20], [40], [61, 75], [89]], ids=str)
async def test_pipelined_requests_are_answered_in_order(moments: list[int]) -> None:
    app = App()
    async with kept_sockets(app) as sockets:
        requests = [post("stream", b"first"), post("whole/100"), post("stream", b"second"), post("plain", b"end")]
        sockets.client.send(b"".join(requests))
        num_events = 0
        seen = b""
        for moment in moments:
            await app.allow(moment % NUM_EVENTS)
            if moment >= NUM_EVENTS:
                await app.allow(NUM_EVENTS)
            await has_run(app)
            await asyncio.sleep(0.02)
            await sockets.restart()
            num_events = max(num_events, moment)
        await app.allow(NUM_EVENTS)
        seen += await head_of(sockets)
        assert b"x-body: first\r\n" in seen
        check_stream(await chunks_of(sockets))
        status, body = await sockets.client.response()
        assert (status, len(body)) == (200, 100)
        assert b"x-body: second\r\n" in await head_of(sockets)
        check_stream(await chunks_of(sockets))
        assert await sockets.client.response() == (200, b"plain end")
        await is_idle(sockets)


async def test_requests_that_wait_for_their_turn_are_in_the_journal_and_one_that_has_begun_is_not_run_twice() -> None:
    app = App()
    app.holds.clear()
    async with kept_sockets(app) as sockets:
        sockets.client.send(post("stream") + post("plain") + post("stream"))
        await app.allow(3)
        await has_come(sockets, 3)
        assert sorted(sockets.journals.requests) == [1, 2, 3]
        await sockets.restart()
        await app.allow(NUM_EVENTS)
        await head_of(sockets)
        check_stream(await chunks_of(sockets))

        async def has_begun() -> bool:
            return "begun" in sockets.journals.requests[2].facts

        await eventually(has_begun, "the second one runs")
        num_runs = app.num_runs
        await sockets.restart()
        await refused(sockets)
        assert app.num_runs == num_runs


async def test_requests_that_come_while_there_is_no_router_follow_those_that_are_taken_over() -> None:
    app = App()
    async with kept_sockets(app) as sockets:
        sockets.client.send(post("stream", b"first"))
        await app.allow(3)
        await has_come(sockets, 3)
        await sockets.die()
        sockets.client.send(post("stream", b"second") + post("plain", b"third"))
        await asyncio.sleep(0.05)
        await app.allow(NUM_EVENTS)
        await sockets.start()
        assert b"x-body: first\r\n" in await head_of(sockets)
        check_stream(await chunks_of(sockets))
        assert b"x-body: second\r\n" in await head_of(sockets)
        check_stream(await chunks_of(sockets))
        assert await sockets.client.response() == (200, b"plain third")


async def test_a_connection_that_is_idle_goes_on_and_so_do_its_counts() -> None:
    app = App()
    await app.allow(NUM_EVENTS)
    async with kept_sockets(app) as sockets:
        for number in range(3):
            sockets.client.send(post("stream") if number % 2 else post("plain"))
            if number % 2:
                await head_of(sockets)
                check_stream(await chunks_of(sockets))
            else:
                await sockets.client.response()
            await is_idle_of(sockets)
            await sockets.restart()
        await app.allow(5)
        sockets.client.send(post("stream"))
        await has_come(sockets, 5)
        await sockets.restart()
        await app.allow(NUM_EVENTS)
        await head_of(sockets)
        check_stream(await chunks_of(sockets))


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /stream HTTP/1.1\r\nhost: x\r\nupgrade: h2c\r\nconnection: upgrade\r\ncontent-length: 4\r\n\r\ntext",
        b"\r\n\r\nPOST /stream HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n4\r\ntext\r\n0\r\na: b\r\n\r\n",
    ],
    ids=["an upgrade", "chunks"],
)
async def test_a_request_of_any_form_is_taken_over(sent: bytes) -> None:
    app = App()
    async with kept_sockets(app) as sockets:
        for _ in range(2):
            sockets.client.send(sent)
            await app.allow(4)
            await has_come(sockets, 4)
            await sockets.restart()
            await app.allow(NUM_EVENTS)
            assert b"x-body: text\r\n" in await head_of(sockets)
            check_stream(await chunks_of(sockets))
            await is_idle_of(sockets)
        await is_idle(sockets)


async def test_a_request_that_was_answered_before_it_was_whole_is_counted() -> None:
    app = App()
    async with kept_sockets(app) as sockets:
        sockets.client.send(b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n")
        assert await sockets.client.response() == (200, b"early")
        sockets.client.send(b"text")
        sockets.client.send(post("stream"))
        await app.allow(4)
        await has_come(sockets, 4)
        await sockets.restart()
        await app.allow(NUM_EVENTS)
        await head_of(sockets)
        check_stream(await chunks_of(sockets))
        await is_idle(sockets)


# The end of a connection --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "headers"), [(b"1.0", b""), (b"1.1", b"connection: close\r\n")], ids=["HTTP/1.0", "close"]
)
@pytest.mark.parametrize("count", [4, 30])
@pytest.mark.parametrize("path", [b"stream", b"whole/1000"])
async def test_an_answer_that_ends_the_connection_ends_it_in_the_next_router_too(
    version: bytes, headers: bytes, count: int, path: bytes
) -> None:
    app = App()
    async with kept_sockets(app) as sockets:
        sockets.journals.loses_release = True  # the router dies before it can say that the connection has ended
        sockets.client.send(
            b"POST /%b HTTP/%b\r\nhost: x\r\n%bcontent-length: 4\r\n\r\ntext" % (path, version, headers)
        )
        await app.allow(count)
        await has_run(app)
        if path == b"stream":
            await has_written_events(sockets, count)
        await sockets.restart()
        sockets.journals.loses_release = False
        await app.allow(NUM_EVENTS)
        answer = await sockets.client.answer()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"connection: close" in head
        if path == b"stream":
            assert body.count(b"data: ") == NUM_EVENTS + 1
            assert (b"transfer-encoding" in head) == (version == b"1.1")
        else:
            assert len(body) == 1000
        assert sockets.journals.is_released


async def has_written_events(sockets: KeptSockets, count: int) -> None:
    async def come() -> bool:
        return bytes(sockets.client.reader._buffer).count(b"data: ") >= count  # type: ignore[attr-defined]

    await eventually(come, f"{count} events")


@pytest.mark.parametrize("sent", [post("plain"), b"HEAD /plain HTTP/1.1\r\nhost: x\r\n\r\n"], ids=["POST", "HEAD"])
async def test_a_request_that_is_not_kept_and_has_no_answer_is_refused(sent: bytes) -> None:
    app = App()
    app.holds.clear()
    async with kept_sockets(app) as sockets:
        sockets.client.send(sent)
        await has_run(app)
        await sockets.restart()
        await refused(sockets)


async def test_a_lost_request_is_refused_behind_the_answers_before_it() -> None:
    app = App()
    async with kept_sockets(app) as sockets:
        sockets.client.send(post("stream") + post("plain")[:-2])
        await app.allow(4)
        await has_come(sockets, 4)
        await sockets.restart()
        sockets.client.send(b"xt" + post("plain"))
        await app.allow(NUM_EVENTS)
        await head_of(sockets)
        check_stream(await chunks_of(sockets))
        await refused(sockets)


async def test_an_answer_that_is_not_kept_and_was_begun_cannot_go_on() -> None:
    app = App()
    async with kept_sockets(app) as sockets:
        sockets.client.send(b"GET /parts HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in await head_of(sockets)
        await sockets.die()
        with pytest.raises(Lost, match="bytes more than those of answers in the journal"):
            await sockets.start()


async def test_a_client_that_has_left_meanwhile_costs_nothing() -> None:
    app = App()
    async with kept_sockets(app) as sockets:
        sockets.client.send(post("stream"))
        await app.allow(4)
        await has_come(sockets, 4)
        await sockets.die()
        sockets.client.close()
        try:
            await sockets.start()
        except (Lost, OSError):
            return
        await app.allow(NUM_EVENTS)
        await eventually(released(sockets), "the connection is released")


def test_an_answer_that_is_not_kept_is_not_noted_once_its_client_has_left() -> None:
    keeper = Mock()
    kept = KeptConnection(keeper, 1)
    kept.release()
    assert kept.begin_unkept(1)
    assert not keeper.put_request.called


def released(sockets: KeptSockets) -> Callable[[], Awaitable[bool]]:
    async def is_released() -> bool:
        return sockets.journals.is_released

    return is_released


# Bodies that are not whole ------------------------------------------------------------------------------------------

EXPECT = b"POST /stream HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 4\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


async def test_a_client_that_waits_for_100_continue_gets_it_once() -> None:
    app = App()
    async with kept_sockets(app) as sockets:
        sockets.client.send(EXPECT)
        assert await head_of(sockets) == CONTINUE
        sockets.client.send(b"text")
        await app.allow(4)
        await has_come(sockets, 4)
        await sockets.restart()
        await app.allow(NUM_EVENTS)
        assert b"x-body: text\r\n" in await head_of(sockets)
        check_stream(await chunks_of(sockets))
        await is_idle(sockets)


@pytest.mark.parametrize("taken", [0, 25, 26, 100])
async def test_a_client_that_does_not_wait_for_100_continue_gets_none(taken: int) -> None:
    app = App()
    async with kept_sockets(app) as sockets:
        sockets.client.send(EXPECT + b"text" + EXPECT + b"more")
        await has_run(app)
        cut_writes(sockets, taken)
        await app.allow(NUM_EVENTS)
        await sockets.has_written(taken)
        await sockets.restart()
        for text in (b"text", b"more"):
            assert b"x-body: %b\r\n" % text in await head_of(sockets)
            check_stream(await chunks_of(sockets))
        await is_idle(sockets)


async def test_a_death_between_100_continue_and_the_body_is_said() -> None:
    app = App()
    async with kept_sockets(app) as sockets:
        sockets.client.send(EXPECT)
        assert await head_of(sockets) == CONTINUE

        async def is_settled() -> bool:
            return sockets.journals.settled.written == len(CONTINUE)

        await eventually(is_settled, "the bytes are settled")
        await sockets.restart()
        await refused(sockets)


@pytest.mark.parametrize("length", [1, 20, 52, 56])
async def test_the_beginning_of_a_request_is_handed_over(length: int) -> None:
    app = App()
    async with kept_sockets(app) as sockets:
        sockets.client.send(post("stream", b"first") + post("stream", b"second")[:length])
        await app.allow(4)
        await has_come(sockets, 4)
        await sockets.hand_over()
        assert sockets.journals.partial == post("stream", b"second")[:length]
        await sockets.start()
        sockets.client.send(post("stream", b"second")[length:])
        await app.allow(NUM_EVENTS)
        for text in (b"first", b"second"):
            assert b"x-body: %b\r\n" % text in await head_of(sockets)
            check_stream(await chunks_of(sockets))
        await is_idle(sockets)


async def test_a_client_that_waits_for_100_continue_is_handed_over() -> None:
    app = App()
    async with kept_sockets(app) as sockets:
        sockets.client.send(EXPECT)
        assert await head_of(sockets) == CONTINUE
        await sockets.hand_over()
        await sockets.start()
        assert await head_of(sockets) == CONTINUE, "it may come again"
        sockets.client.send(b"text")
        await app.allow(NUM_EVENTS)
        assert b"x-body: text\r\n" in await head_of(sockets)
        check_stream(await chunks_of(sockets))
        await is_idle(sockets)


async def test_what_was_handed_over_and_then_lost_is_refused() -> None:
    app = App()
    async with kept_sockets(app) as sockets:
        sockets.client.send(post("stream")[:50])
        await has_read(sockets, 50)
        await sockets.hand_over()
        await sockets.start()
        sockets.client.send(post("stream")[50:52])
        await has_read(sockets, 52)
        await sockets.restart()
        await refused(sockets)


async def has_read(sockets: KeptSockets, count: int) -> None:
    async def read() -> bool:
        assert sockets.connection is not None
        assert sockets.connection._kept is not None
        return sockets.connection._kept.num_input == count

    await eventually(read, f"{count} bytes were read")


async def test_a_request_that_is_too_large_is_not_kept() -> None:
    app = App()
    await app.allow(3)
    async with kept_sockets(app, payload_limit=1000, max_header_bytes=1000) as sockets:
        sockets.client.send(post("stream", b"x" * 3000))
        await head_of(sockets)
        assert "key" not in sockets.journals.requests[1].facts
        assert sockets.connection is not None
        assert sockets.connection._connections.bodies.num_bytes == 0


async def test_answers_that_are_not_kept_count_until_the_kernel_has_them() -> None:
    app = App()
    app.holds.clear()
    async with kept_sockets(app) as sockets:
        sockets.client.send(post("plain") + post("stream"))
        await has_run(app)
        assert sockets.connection is not None
        assert sockets.connection.has_unkept
        cut_writes(sockets, 0)
        app.holds.set()
        await app.allow(NUM_EVENTS)

        async def has_both() -> bool:
            return "key" in sockets.journals.requests[2].facts

        await eventually(has_both, "the second request is in the journal")
        assert sockets.connection.has_unkept, "bytes of the first answer wait"
