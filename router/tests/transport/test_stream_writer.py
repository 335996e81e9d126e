"""What is written is sent with the loop's next turn, or once the client reads again; each event is a chunk of its own.

Over a double and over a socket.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fakes import eventually
from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from funitel.router.transport.sse import EventStream, Put
from funitel.router.transport.stream_writer import DirectSend, StreamWriter, chunk_writer

EVENT = b"data: " + b"x" * 1000 + b"\n\n"


class Connection:
    """Takes what is sent, or makes senders wait while it is stuck."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.failure: Exception | None = None

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        if self.failure is not None:
            raise self.failure
        if message["type"] == "http.response.body":
            self.bodies.append(message["body"])


def outlet_to(connection: Connection) -> StreamWriter:
    return StreamWriter(connection.send, connection.send, [])


async def test_what_is_written_is_sent_with_the_next_turn_each_by_itself() -> None:
    connection = Connection()
    outlet = outlet_to(connection)
    outlet.write(b"a")
    outlet.write(b"b")
    assert connection.bodies == []
    await asyncio.sleep(0)
    assert connection.bodies == [b"a", b"b"]
    outlet.write(b"c")
    await outlet.end(b"d")
    assert connection.bodies == [b"a", b"b", b"c", b"d"]
    await asyncio.sleep(0)
    assert connection.bodies == [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize("sent_before", [0, 1])
async def test_what_a_client_does_not_read_is_sent_event_by_event_once_it_does(sent_before: int) -> None:
    connection = Connection()
    outlet = outlet_to(connection)
    for _ in range(sent_before):
        outlet.write(b"!")
        await asyncio.sleep(0)
    connection.reads.clear()
    for data in (b"a", b"b", b"c", b"d"):
        outlet.write(data)
    await asyncio.sleep(0.01)
    assert connection.bodies == [b"!"] * sent_before
    connection.reads.set()
    await asyncio.sleep(0.01)
    assert connection.bodies == [b"!"] * sent_before + [b"a", b"b", b"c", b"d"]
    outlet.write(b"e")
    await asyncio.sleep(0)
    assert connection.bodies[-1] == b"e", "it is sent at once again"


async def test_the_end_waits_for_what_waits() -> None:
    connection = Connection()
    outlet = outlet_to(connection)
    connection.reads.clear()
    outlet.write(b"a")
    outlet.write(b"b")
    ending = asyncio.create_task(outlet.end(b"c"))
    await asyncio.sleep(0.01)
    connection.reads.set()
    await ending
    assert b"".join(connection.bodies) == b"abc"


async def test_an_abandoned_outlet_sends_nothing_more() -> None:
    connection = Connection()
    outlet = outlet_to(connection)
    connection.reads.clear()
    outlet.write(b"a")
    await asyncio.sleep(0)
    outlet.abandon()
    await asyncio.sleep(0)
    connection.reads.set()
    await asyncio.sleep(0.01)
    assert connection.bodies == []


async def test_a_failure_to_send_is_raised_to_who_writes_or_ends() -> None:
    connection = Connection()
    outlet = outlet_to(connection)
    outlet.write(b"!")
    connection.failure = RuntimeError("broken")
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="broken"):
        outlet.write(b"b")
    with pytest.raises(RuntimeError, match="broken"):
        await outlet.end(b"c")


async def test_a_failure_while_the_client_does_not_read_is_raised_too() -> None:
    connection = Connection()
    outlet = outlet_to(connection)
    connection.reads.clear()
    outlet.write(b"a")
    await asyncio.sleep(0)
    connection.failure = RuntimeError("broken")
    connection.reads.set()
    await asyncio.sleep(0.01)
    with pytest.raises(RuntimeError, match="broken"):
        outlet.write(b"b")


# Over a socket


@asynccontextmanager
async def server_of(app: Any) -> AsyncIterator[tuple[str, int]]:
    """An application behind a real uvicorn socket whose kernel buffers are small."""
    server = uvicorn.Server(uvicorn.Config(DirectSend(app), http="httptools", log_config=None, ws="none"))

    async def is_started() -> bool:
        return server.started

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        running = asyncio.create_task(server._serve([listener]))
        await eventually(is_started, "listening")
        yield listener.getsockname()[:2]
        server.should_exit = True
        await running


async def connect(address: tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that has asked, and reads little by itself."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, address)
    reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    return reader, writer


def dechunked(body: bytes) -> bytes:
    """What chunks hold, to their last."""
    parts = []
    while True:
        size, _, body = body.partition(b"\r\n")
        part, end, body = body[: int(size, 16)], body[int(size, 16) :][:2], body[int(size, 16) + 2 :]
        assert end == b"\r\n"
        if not part:
            assert body == b""
            return b"".join(parts)
        parts.append(part)


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_client_that_stops_reading_holds_up_nobody_and_gets_all_of_it_later(leaves: bool) -> None:
    has_put, ended = asyncio.Event(), asyncio.Event()

    async def producer(put: Put) -> None:
        try:
            for number in range(1000):
                put(EVENT)
                if number % 100 == 0:
                    await asyncio.sleep(0)
            has_put.set()
            if leaves:
                await asyncio.sleep(60.0)
        finally:
            ended.set()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await EventStream(producer, pytest.fail)(scope, receive, send)

    async with asyncio.timeout(10.0), server_of(app) as address:
        reader, writer = await connect(address)
        await has_put.wait()  # whoever makes tokens is not held up
        if leaves:
            writer.transport.abort()
            await ended.wait()
        else:
            _, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert dechunked(body) == EVENT * 1000
        writer.close()


class Cycle(RequestResponseCycle):
    """uvicorn's answer to one request, over a transport that takes down what is written."""

    def __init__(self, **state: Any) -> None:
        self.written: list[bytes] = []
        self.transport = SimpleNamespace(write=self.written.append)  # type: ignore[assignment]
        self.flow = SimpleNamespace(write_paused=state.pop("write_paused", False))  # type: ignore[assignment]
        self.response_complete = self.disconnected = False
        self.chunked_encoding = True
        vars(self).update(state)


@pytest.mark.parametrize("chunks", [[EVENT], [EVENT, b"", b"a"], [b"", b"a"], [b""]])
def test_chunks_are_written_as_http_has_them_in_one_write(chunks: list[bytes]) -> None:
    cycle = Cycle()
    write_chunks = chunk_writer(cycle.send)
    assert write_chunks is not None
    assert write_chunks(chunks)
    assert cycle.written == [b"".join(b"%x\r\n" % len(data) + data + b"\r\n" for data in chunks if data)]


async def test_all_that_a_step_gives_to_a_stream_is_sent_in_one_write() -> None:
    cycle = Cycle()
    writer = StreamWriter(Connection().send, cycle.send, [])
    for data in (b"a", b"b", b"", b"c"):
        writer.write(data)
    assert cycle.written == []
    await asyncio.sleep(0)
    writer.write(b"d")
    await asyncio.sleep(0)
    assert cycle.written == [b"1\r\na\r\n1\r\nb\r\n1\r\nc\r\n", b"1\r\nd\r\n"]


@pytest.mark.parametrize(
    "state",
    [{"write_paused": True}, {"response_complete": True}, {"disconnected": True}, {"chunked_encoding": None}],
    ids=["a client that does not read", "an answer that has ended", "a client that left", "a body without chunks"],
)
def test_no_chunk_is_written_to(state: dict[str, Any]) -> None:
    cycle = Cycle(**state)
    write_chunks = chunk_writer(cycle.send)
    assert write_chunks is not None
    assert not write_chunks([EVENT])
    assert cycle.written == []


async def test_another_server_has_no_such_way() -> None:
    assert chunk_writer(Connection().send) is None
