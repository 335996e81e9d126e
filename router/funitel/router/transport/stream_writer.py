"""The sending half of one streamed answer: what is written is sent soon, or waits until the client reads again.

A server's `send` is a coroutine, but one that waits for nothing while the connection takes what it is given. So it is
run by a callback, as far as it goes, and no task has to wake up for each token of a stream. A task takes over where it
does have to wait: once the client reads again it sends what has come meanwhile, in one piece.

Nothing is sent before whoever writes has returned to the event loop: the engine hands a step's tokens to all of their
streams first, and then all of them are sent. To go back and forth between the two for every token, with the kernel's
network in between, costs a fifth more with a thousand streams, for neither stays in the processor's caches.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any, ClassVar

from pydantic import BaseModel
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from funitel.router.transport.memory_budget import Client
from funitel.router.transport.sse_frames import Event, frame

DIRECT = "funitel.send"  # in a request's scope: the server's own `send`, past all layers
WriteChunk = Callable[[bytes], bool]  # False: nothing was written, as something has to be waited for


class DirectSend:
    """Around an application: note in a request's scope how to send past all of its layers.

    They look at nothing but the start of an answer, and each would cost every token a call.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("http_version") == "1.0":
            send = without_chunks(send)
        scope[DIRECT] = send
        await self._app(scope, receive, send)


def chunk_writer(send: Send) -> WriteChunk | None:
    """A way to write chunks of the answer whose `send` this is, without a coroutine and a message for each.

    None where `send` is not uvicorn's own. A chunk is written while the answer's body has no given length, the client
    is there, and reads what it is sent.
    """
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle):
        return None
    flow, write = cycle.flow, cycle.transport.write

    def write_chunk(data: bytes) -> bool:
        if flow.write_paused or not cycle.chunked_encoding or cycle.response_complete or cycle.disconnected:
            return False
        write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    return write_chunk


def without_chunks(send: Send) -> Send:
    """How an answer is sent to a client of HTTP/1.0: a body of no given length ends where its connection does.

    uvicorn would send it in chunks, which came with HTTP/1.1.
    """
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle):
        return send
    has_length = True

    async def send_plain(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_plain


class StreamWriter:
    """Sends one answer whose length is not known before. Event loop only."""

    def __init__(
        self,
        send_start: Send,
        send_body: Send,
        raw_headers: list[tuple[bytes, bytes]],
        client: Client | None = None,
        frame: Callable[[BaseModel], bytes] = frame,
    ) -> None:
        """Send nothing yet; the start of the answer, and its body, may take different ways.

        What waits for a client to read is told it, and cuts it off where it is too much.
        """
        self.is_started = self.is_ended = False
        self._send_start = send_start
        self._send_body = send_body
        self._raw_headers = raw_headers
        self._write_chunk = chunk_writer(send_body)
        self._client = client
        self._frame = frame
        self._num_kept = 0  # bytes of what waits while the client does not read
        self._loop = asyncio.get_running_loop()
        self._waiting: list[bytes] = []
        self._clearing: asyncio.Future[None] | None = None  # sends what waits, while the client does not read
        self._last_sent = time.monotonic()

    def write(self, event: Event) -> None:
        """Send an event, or its frame, after all that waits.

        Raises:
            Exception: an earlier write could not be sent.
        """
        data = event if isinstance(event, bytes) else self._frame(event)
        if not self.is_started:
            self._start()
        if self._clearing is None:
            if not self._waiting:
                _FlushBatch.of_next_turn(self._loop).outlets.append(self)
        elif self._clearing.done() and not self._clearing.cancelled():
            self._clearing.result()
        self._waiting.append(data)
        self._last_sent = time.monotonic()
        if self._clearing is not None:
            self._keep(len(data))

    async def end(self, data: bytes) -> None:
        """Send the last of the body, once everything before it was sent."""
        if not self.is_started:
            self._start()
        self._send_waiting()
        if self._clearing is not None:
            await self._clearing
        await self._send_body({"type": "http.response.body", "body": data, "more_body": False})
        self.is_ended = True

    def abandon(self) -> None:
        """Send nothing more."""
        self._waiting.clear()
        self._keep(-self._num_kept)
        if self._clearing is not None:
            self._clearing.cancel()

    async def repeat(self, data: bytes, seconds: float) -> None:
        """Send `data` whenever `seconds` pass without anything else, unless the client does not read."""
        while True:
            idle = time.monotonic() - self._last_sent
            if idle < seconds:
                await asyncio.sleep(seconds - idle)
            elif self._clearing is not None:
                await asyncio.sleep(seconds)
            else:
                self.write(data)

    def _start(self) -> None:
        self.is_started = True
        self._begin(self._send_start({"type": "http.response.start", "status": 200, "headers": self._raw_headers}))

    def _send_waiting(self) -> None:
        write_chunk = self._write_chunk
        while self._waiting and self._clearing is None:
            data = self._waiting.pop(0)
            if data and write_chunk is not None and write_chunk(data):
                continue
            self._begin(self._send_body({"type": "http.response.body", "body": data, "more_body": True}))

    def _begin(self, sending: Awaitable[None]) -> None:
        """Send as far as nothing has to be waited for; leave the rest to a task, if there is one."""
        steps = sending.__await__()
        try:
            awaited = next(steps)
        except StopIteration:
            return
        except Exception as error:  # is for whoever writes next, or ends
            self._clearing = self._loop.create_future()
            self._clearing.set_exception(error)
            return
        self._clearing = asyncio.ensure_future(self._clear(_RestOfSend(steps, awaited)))
        self._keep(sum(map(len, self._waiting)))

    async def _clear(self, rest: "_RestOfSend") -> None:
        await rest
        while self._waiting:
            data = b"".join(self._waiting)
            self._waiting.clear()
            await self._send_body({"type": "http.response.body", "body": data, "more_body": True})
            self._last_sent = time.monotonic()
            self._keep(-len(data))
        self._clearing = None

    def _keep(self, num_bytes: int) -> None:
        self._num_kept += num_bytes
        if self._client is not None and num_bytes:
            self._client.keep_unread(num_bytes)


class _FlushBatch:
    """The outlets that were written to since the loop's last turn: all are sent in the next one."""

    _newest: ClassVar["_FlushBatch | None"] = None

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.outlets: list[StreamWriter] = []
        self._loop = loop
        loop.call_soon(self._send)

    @classmethod
    def of_next_turn(cls, loop: asyncio.AbstractEventLoop) -> "_FlushBatch":
        """The round of a loop that has not been sent yet."""
        if cls._newest is None or cls._newest._loop is not loop:
            cls._newest = cls(loop)
        return cls._newest

    def _send(self) -> None:
        if _FlushBatch._newest is self:
            _FlushBatch._newest = None
        for outlet in self.outlets:
            outlet._send_waiting()


class _RestOfSend:
    """What is left of an awaitable that was begun by hand, and what it waits for."""

    def __init__(self, steps: Generator[Any, None, None], awaited: Any) -> None:
        self._steps = steps
        self._awaited = awaited

    def __await__(self) -> Generator[Any, None, None]:
        try:
            yield self._awaited
        except BaseException:  # this task is cancelled
            self._steps.close()
            raise
        yield from self._steps
