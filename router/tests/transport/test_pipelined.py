"""What a client that sends several requests ahead can do by leaving, or by sending too many."""

import asyncio
import logging

import pytest
import uvloop
from fakes import eventually
from sockets import served
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from funitel.router.transport.sse import EventStream, Put

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.sleep(0.02)
    await PlainTextResponse("hello")(scope, receive, send)


def test_too_many_requests_ahead_leave_no_traceback_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The first is being answered when its connection is cut: a traceback for each connection would fill a disk."""

    async def send_too_many() -> None:
        async with served(hello) as server:
            for _ in range(20):
                client = await server.connect()
                client.send(GET * 1000)
                await client.answer()
            assert server.num_cut("pipelined") == 20

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as in production: it refuses to write
        runner.run(send_too_many())
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("behind", [b"", GET, GET * 5, b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nhalf"])
async def test_a_stream_ends_with_its_client_whatever_was_sent_behind_it(behind: bytes) -> None:
    has_ended = asyncio.Event()

    async def produce(put: Put) -> None:
        try:
            while True:
                put(b"data: 1\n\n")
                await asyncio.sleep(0.01)
        finally:
            has_ended.set()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()
        await EventStream(produce, pytest.fail)(scope, receive, send)

    async with served(app) as server:
        client = await server.connect()
        client.send(GET)
        await client.reader.readuntil(b"data: 1\n\n")
        client.send(behind)
        await asyncio.sleep(0.05)
        client.close()
        await asyncio.wait_for(has_ended.wait(), 5)
        await eventually(server.is_empty, "its place is free again")


async def test_a_handler_that_waits_for_its_client_to_leave_is_told() -> None:
    left = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async with served(app) as server:
        client = await server.connect()
        client.send(GET * 3)
        await asyncio.sleep(0.05)
        client.close()
        await asyncio.wait_for(left.wait(), 5)
