"""What one client can take of a connection: bytes, requests, seconds. Each bound over a real socket."""

import asyncio
import gc
import json
import logging
import socket
import struct
import weakref
from collections.abc import Awaitable, Callable

import pytest
from fakes import eventually
from sockets import SMALL, Raw, Served, served
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from funitel.router.api.common.body import receive_body
from funitel.router.transport import connection as http_protocol
from funitel.router.transport.sse import EventStream, Put

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
SHORT, LONG = 0.2, 5.0  # seconds


class App:
    """Answers with the body it was sent; notes who left before it was whole."""

    def __init__(self) -> None:
        self.num_requests = self.num_left = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_requests += 1
        request = Request(scope, receive)
        try:
            body = await request.body()
        except ClientDisconnect:
            self.num_left += 1
            return
        await self.gate.wait()
        await PlainTextResponse(body or b"hello")(scope, receive, send)

    async def has_seen_one_leave(self) -> bool:
        return self.num_left == 1


async def answers_early(scope: Scope, receive: Receive, send: Send) -> None:
    """Looks at no body."""
    await PlainTextResponse("no")(scope, receive, send)


async def trickle(client: Raw, data: bytes, seconds: float = 0.02) -> None:
    """Send the same bytes again and again."""
    while not client.writer.is_closing():
        client.send(data)
        await asyncio.sleep(seconds)


async def refused(server: Served, client: Raw) -> tuple[int, dict[str, str]]:
    """The status and the body of an answer that ends the connection."""
    head, _, body = (await client.answer()).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    client.close()
    await eventually(server.is_empty, "its place is free again")
    return int(head.split()[1]), json.loads(body)


# Bytes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\na: " + b"x" * 2000 + b"\r\n\r\n",
        b"GET /" + b"x" * 2000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"a%d: %s\r\n" % (i, b"x" * 90) for i in range(20)) + b"\r\n",
        CHUNKED + b"1\r\nx\r\n0\r\n" + b"".join(b"a%d: %s\r\n" % (i, b"x" * 90) for i in range(20)) + b"\r\n",
    ],
    ids=["one line", "the path", "many lines", "behind the body"],
)
async def test_a_header_that_is_too_large_is_refused(sent: bytes) -> None:
    async with served(App(), max_header_bytes=1500) as server:
        client = await server.connect()
        client.send(sent)
        status, body = await refused(server, client)
        assert (status, body["error"]) == (431, "the header must have at most 1500 bytes")
        assert server.num_cut("header_bytes") == 1


async def test_a_header_of_many_lines_is_refused() -> None:
    async with served(App()) as server:
        client = await server.connect()
        client.send(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 129 + b"\r\n")
        status, body = await refused(server, client)
        assert (status, body["error"]) == (431, "the header must have at most 128 lines")


@pytest.mark.parametrize(
    "begin",
    [b"GET / HTTP/1.1\r\na: ", b"GET /", CHUNKED + b"0\r\na: ", CHUNKED + b"1;"],
    ids=["line", "path", "trailer", "chunk"],
)
async def test_a_line_that_does_not_end_is_refused(begin: bytes) -> None:
    async with served(App(), max_header_bytes=1500) as server:
        client = await server.connect()
        client.send(begin)
        for _ in range(30):
            client.send(b"x" * 100)
            await asyncio.sleep(0.001)
        status, _ = await refused(server, client)
        assert status == 431
        assert server.num_cut("header_bytes") == 1


async def test_a_body_may_be_larger_than_a_header() -> None:
    async with served(App(), max_header_bytes=200) as server:
        client = await server.connect()
        client.send(POST % 100_000 + b"x" * 100_000)
        assert (await client.response())[1] == b"x" * 100_000
        client.send(CHUNKED + b"1\r\nx\r\n" * 1000 + b"0\r\n\r\n" + GET)
        assert (await client.response())[1] == b"x" * 1000
        assert (await client.response())[1] == b"hello"


async def test_what_is_no_http_is_refused_and_one_line_of_the_log_tells_of_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served(App()) as server:
        for _ in range(20):
            client = await server.connect()
            client.send(b"\x16\x03\x01\x02\x00garbage\r\n\r\n")
            assert (await refused(server, client))[0] == 400
        assert server.num_cut("malformed") == 20
    lines = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert lines == ["disconnected clients: malformed=1; 1 open, at most 100"], "the rest is for the next minute"


async def test_an_offer_to_speak_another_protocol_is_not_taken_nor_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with served(App()) as server:
        client = await server.connect()
        client.send(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n")
        assert await client.response() == (200, b"hello")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("at", [0, 60, 1000])
async def test_a_request_that_offers_another_protocol_keeps_its_body_and_what_comes_behind_it(at: int) -> None:
    """As Java's client sends its first one."""
    offer = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n\r\n"
    sent = 2 * ((POST % 4).removesuffix(b"\r\n") + offer + b"body") + CHUNKED.removesuffix(b"\r\n") + offer
    sent += b"2\r\nab\r\n0\r\n\r\n" + GET
    async with served(App()) as server:
        client = await server.connect()
        client.send(sent[:at])
        await asyncio.sleep(0.05)
        client.send(sent[at:])
        assert [(await client.response())[1] for _ in range(4)] == [b"body", b"body", b"ab", b"hello"]


@pytest.mark.parametrize(
    "sent",
    [b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\n\r\n", b"GET http://[x HTTP/1.1\r\nhost: x\r\n\r\n"],
    ids=["a tunnel", "no address"],
)
async def test_a_whole_header_that_asks_for_nothing_is_refused_in_words(sent: bytes) -> None:
    async with served(App()) as server:
        client = await server.connect()
        client.send(sent)
        assert (await refused(server, client))[0] == 400


# Requests -----------------------------------------------------------------------------------------------------------


async def test_requests_sent_ahead_are_answered_in_order_and_too_many_are_not() -> None:
    app = App()
    async with served(app) as server:
        client = await server.connect()
        client.send(b"".join(POST % 2 + b"%02d" % i for i in range(20)))
        assert [(await client.response())[1] for _ in range(20)] == [b"%02d" % i for i in range(20)]
        app.gate.clear()
        before = app.num_requests
        client.send(GET * 10_000)
        assert await client.answer() == b""
        assert server.num_cut("pipelined") == 1
        assert app.num_requests == before + 1, "the others have not even begun"
        app.gate.set()


async def test_http_1_0_is_answered_and_closed() -> None:
    async with served(App()) as server:
        client = await server.connect()
        client.send(b"GET / HTTP/1.0\r\n\r\n")
        answer = await client.answer()
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert answer.endswith(b"hello")


async def test_a_stream_for_http_1_0_has_no_chunks_and_ends_with_the_connection() -> None:
    async def produce(put: Put) -> None:
        put(b"data: 1\n\n")
        await asyncio.sleep(0)
        put(b"data: 2\n\n")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()
        await EventStream(produce, pytest.fail)(scope, receive, send)

    async with served(app) as server:
        client = await server.connect()
        client.send(b"POST / HTTP/1.0\r\ncontent-length: 2\r\n\r\n{}")
        head, _, body = (await client.answer()).partition(b"\r\n\r\n")
        assert body == b"data: 1\n\ndata: 2\n\n"
        assert b"transfer-encoding" not in head.lower()
        assert b"connection: close" in head.lower()


async def test_half_a_close_is_a_client_that_leaves() -> None:
    app = App()
    async with served(app) as server:
        client = await server.connect()
        client.send(POST % 10 + b"half")
        client.writer.write_eof()
        await eventually(app.has_seen_one_leave, "its request ends")
        assert await client.answer() == b""


# Seconds ------------------------------------------------------------------------------------------------------------


async def test_a_client_that_says_nothing_is_sent_away() -> None:
    async with served(App(), header_timeout_seconds=SHORT, idle_timeout_seconds=LONG) as server:
        client = await server.connect()
        assert await client.answer() == b""
        await eventually(server.is_empty, "its place is free again")


async def test_blank_lines_are_no_request() -> None:
    async with served(App(), header_timeout_seconds=SHORT, idle_timeout_seconds=SHORT) as server:
        client = await server.connect()
        trickling = asyncio.create_task(trickle(client, b"\r\n"))
        assert await client.answer() == b""
        client = await server.connect()
        client.send(GET)
        assert await client.response() == (200, b"hello")
        trickling_again = asyncio.create_task(trickle(client, b"\r\n"))
        assert await client.answer() == b""
        trickling.cancel()
        trickling_again.cancel()


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_header_that_trickles_is_cut_off(is_first: bool) -> None:
    async with served(App(), header_timeout_seconds=SHORT) as server:
        client = await server.connect()
        if not is_first:
            client.send(GET)
            await client.response()
        client.send(b"GET / HTTP/1.1\r\n")
        trickling = asyncio.create_task(trickle(client, b"a: b\r\n"))
        status, body = await refused(server, client)
        assert (status, body["error"]) == (408, "the header must be whole within 0.2 seconds")
        assert server.num_cut("header_time") == 1
        trickling.cancel()


async def test_a_body_that_trickles_is_cut_off() -> None:
    app = App()
    async with served(app, body_timeout_seconds=SHORT) as server:
        client = await server.connect()
        client.send(POST % 100_000)
        trickling = asyncio.create_task(trickle(client, b"x"))
        status, body = await refused(server, client)
        assert (status, body["error"]) == (408, "the body must be whole within 0.2 seconds")
        assert app.num_left == 1
        trickling.cancel()


async def test_an_answer_may_take_longer_than_anything_a_client_does() -> None:
    app = App()
    app.gate.clear()
    times = {f"{what}_timeout_seconds": SHORT for what in ("header", "body", "idle", "unread")}
    async with served(app, **times) as server:
        client = await server.connect()
        client.send(GET + b"GET / HT")  # and half of the next
        await asyncio.sleep(3 * SHORT)
        app.gate.set()
        assert await client.response() == (200, b"hello")
        client.send(b"TP/1.1\r\nhost: x\r\n\r\n")
        assert await client.response() == (200, b"hello")


async def test_a_connection_is_kept_for_another_request_for_so_long() -> None:
    async with served(App(), idle_timeout_seconds=SHORT) as server:
        client = await server.connect()
        for _ in range(4):
            client.send(GET)
            assert await client.response() == (200, b"hello")
            await asyncio.sleep(SHORT / 2)
        assert await client.answer() == b""
        await eventually(server.is_empty, "its place is free again")


async def test_nothing_is_kept_of_a_connection_that_was_reset_after_its_answer() -> None:
    async with served(App()) as server:
        client = await server.connect()
        client.send(GET)
        assert (await client.response())[0] == 200
        (connection,) = server.connections._open
        kept = weakref.ref(connection)
        del connection
        client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        await eventually(server.is_empty, "its place is free again")

        async def is_gone() -> bool:
            gc.collect()
            return kept() is None

        await eventually(is_gone, "nobody refers to it")


async def test_who_goes_on_sending_after_the_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "LEAVING_SECONDS", SHORT)
    async with served(answers_early) as server:
        client = await server.connect()
        client.send(POST % 1_000_000)
        trickling = asyncio.create_task(trickle(client, b"x" * 100))
        assert (await client.answer()).endswith(b"no")
        await eventually(server.is_empty, "its place is free again")
        trickling.cancel()
        client = await server.connect()
        client.send(POST % 5)
        assert await client.response() == (200, b"no")
        client.send(b"late!" + GET)
        assert await client.response() == (200, b"no")


async def test_a_client_that_does_not_read_is_cut_off_and_one_that_reads_slowly_is_not() -> None:
    body = b"x" * 2_000_000

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(body)(scope, receive, send)

    async with served(app, unread_timeout_seconds=SHORT) as server:
        slow = await server.connect(receive_buffer=SMALL)
        slow.send(GET)
        for request in (GET, GET.replace(b"host: x", b"host: x\r\nconnection: close")):
            deaf = await server.connect(receive_buffer=SMALL)
            deaf.send(request)

        async def read() -> bytes:
            received = await slow.reader.readuntil(b"\r\n\r\n")
            while len(received) < len(body):
                received += await slow.reader.read(SMALL)
                if len(received) % 50_000 < SMALL:
                    await asyncio.sleep(SHORT / 10)
            return received

        reading = asyncio.create_task(read())

        async def are_cut() -> bool:
            return server.num_cut("unread_time") == 2

        await eventually(are_cut, "those that do not read are cut")
        assert (await reading).endswith(body)
        assert server.num_cut("unread_time") == 2
        assert len(server.connections) == 1


# What is kept -------------------------------------------------------------------------------------------------------


def streams_for_ever(num_events: int = 1 << 30) -> tuple[ASGIApp, asyncio.Event]:
    """An application that makes events until it is stopped, and what is set then."""
    has_ended = asyncio.Event()

    async def produce(put: Put) -> None:
        try:
            for _ in range(num_events):
                put(b"data: " + b"x" * 1000 + b"\n\n")
                await asyncio.sleep(0)
        finally:
            has_ended.set()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await EventStream(produce, pytest.fail)(scope, receive, send)

    return app, has_ended


async def test_a_stream_that_nobody_reads_is_cut_and_its_work_ends() -> None:
    app, has_ended = streams_for_ever()
    async with served(app, max_unread_bytes=300_000) as server:
        client = await server.connect(receive_buffer=SMALL)
        client.send(GET)
        await has_ended.wait()
        await eventually(server.is_empty, "its place is free again")
        assert server.num_cut("unread_bytes") == 1
        assert server.connections.unread.num_bytes == 0


async def test_a_stream_that_is_read_later_is_kept_and_counted_until_then() -> None:
    app, has_ended = streams_for_ever(num_events=500)
    async with served(app, max_unread_bytes=1_000_000) as server:
        client = await server.connect(receive_buffer=SMALL)
        client.send(GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        await has_ended.wait()
        assert 300_000 < server.connections.unread.num_bytes < 600_000
        assert (await client.answer()).count(b"data: ") == 500
        await eventually(server.is_empty, "its place is free again")
        assert server.connections.unread.num_bytes == 0


async def test_of_many_streams_that_nobody_reads_the_longest_goes_first() -> None:
    app, _ = streams_for_ever(num_events=500)
    async with served(app, max_total_unread_bytes=1_200_000) as server:
        clients = [await server.connect(receive_buffer=SMALL) for _ in range(4)]
        for client in clients:
            client.send(GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))

        async def are_cut() -> bool:
            assert server.connections.unread.num_bytes <= 1_200_000
            return server.num_cut("total_unread_bytes") == 2

        await eventually(are_cut, "two go")
        answers = await asyncio.gather(*(client.answer() for client in clients))
        assert sum(answer.count(b"data: ") == 500 for answer in answers) == 2, "the others get all of it"


async def test_whole_answers_that_nobody_reads_are_counted_too() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(b"x" * 1_000_000)(scope, receive, send)

    async with served(app, max_total_unread_bytes=2_500_000) as server:
        for _ in range(6):
            client = await server.connect(receive_buffer=SMALL)
            client.send(GET)

        async def are_cut() -> bool:
            return server.num_cut("total_unread_bytes") == 4

        await eventually(are_cut, "two are left")
        assert server.connections.unread.num_bytes <= 2_500_000


async def test_of_many_bodies_that_do_not_end_the_largest_go() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive_body(Request(scope, receive), 1_000_000)
        await PlainTextResponse("whole")(scope, receive, send)

    head = POST.replace(b"host: x", b"host: x\r\ncontent-type: application/json")
    async with served(app, max_total_body_bytes=250_000) as server:
        for _ in range(6):
            greedy = await server.connect()
            greedy.send(head % 200_000 + b"x" * 100_000)

        async def are_cut() -> bool:
            return server.num_cut("total_body_bytes") == 4

        await eventually(are_cut, "two are left")
        assert server.connections.bodies.num_bytes == 200_000
        modest = await server.connect()
        for _ in range(3):
            modest.send(head % 1000 + b"x" * 1000)
            assert await modest.response() == (200, b"whole")
        assert server.connections.bodies.num_bytes == 200_000


# Their number -------------------------------------------------------------------------------------------------------

Claim = Callable[[], Awaitable[object]]


async def test_a_newcomer_takes_the_place_of_the_one_that_rests_for_longest() -> None:
    async with served(App(), most=3) as server:
        clients = [await server.connect() for _ in range(3)]
        for client in clients:
            client.send(GET)
            await client.response()
        clients[0].send(GET)  # it rests for the shortest time now
        await clients[0].response()
        newcomer = await server.connect()
        newcomer.send(GET)
        assert await newcomer.response() == (200, b"hello")
        assert await clients[1].answer() == b""
        for client in (clients[0], clients[2], newcomer):
            client.send(GET)
            assert await client.response() == (200, b"hello")
        assert server.num_cut("displaced") == 1
        assert len(server.connections) == 3


async def test_clients_that_say_nothing_keep_out_nobody() -> None:
    async with served(App(), most=5) as server:
        for _ in range(50):
            silent = await server.connect()
            silent.send(b"GET / HT")
        client = await server.connect()
        client.send(GET)
        assert await client.response() == (200, b"hello")
        assert len(server.connections) <= 5


async def test_no_place_is_said_at_once_where_all_have_requests_under_way() -> None:
    app = App()
    app.gate.clear()
    async with served(app, most=2) as server:
        busy = [await server.connect() for _ in range(2)]
        for client in busy:
            client.send(GET)

        async def are_busy() -> bool:
            return app.num_requests == 2

        await eventually(are_busy, "both have begun")
        late = await server.connect()
        head, _, body = (await late.answer()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in head
        assert json.loads(body)["error"] == "2 connections are open, at most 2"
        app.gate.set()
        for client in busy:
            assert await client.response() == (200, b"hello")
        assert server.num_cut("full") == 1
