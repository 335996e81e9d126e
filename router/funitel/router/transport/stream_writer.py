"""The writer of one streamed answer, with backpressure: writes are sent soon, or buffered for a slow reader.

A server's `send` is a coroutine that does not wait while the connection accepts data. So a callback runs it as far as
it goes, and no task wakes up for each token of a stream. A task takes over where `send` has to wait: once the client
reads again, it sends all that was buffered. Each event is a chunk of its own, however late it is sent: the bytes of an
answer do not depend on its reader.

Nothing is sent before the caller of `write` has returned to the event loop: the engine delivers a step's tokens to all
streams, and then all of them are sent. Alternating the two for every token costs a fifth more CPU time with a thousand
streams, since neither stays in the processor's caches. What a step gives to one stream is sent in one write.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, ClassVar

from pydantic import BaseModel
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from funitel.router.core.journal import EARLIER, UNKEPT, RequestJournal
from funitel.router.transport.kept_answer import client_of, kept_receive, kept_send, stored_answer
from funitel.router.transport.memory_budget import Client
from funitel.router.transport.sse_frames import Event, frame

DIRECT = "funitel.send"  # in a request's scope: the server's own `send`, past all layers
REPEAT = "repeat."  # facts of a journal: how many events come before data that is repeated
WriteChunks = Callable[[list[bytes]], bool]  # False: not written, they would have to wait


class DirectSend:
    """Around an application: put into a request's scope a `send` that bypasses all layers.

    They handle only the start of an answer; a chunk sent through them costs six times as much CPU time.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("http_version") == "1.0":
            send = without_chunks(send)
        scope[DIRECT] = send
        client = client_of(scope)
        if client is not None:
            scope[EARLIER] = client.facts_of(scope)
            send, receive = kept_send(scope, client, send), kept_receive(client, receive)
            if stored := stored_answer(scope):
                for message in stored:
                    await send(message)
                return
        await self._app(scope, receive, send)


def chunk_writer(send: Send) -> WriteChunks | None:
    """Return a function that writes chunks of the answer of a `send` at once, without a coroutine and a message.

    None where `send` is not uvicorn's own. They are written while the body has no given length and the client is
    connected and not a slow reader. An empty one, which would end the body, is left out.
    """
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle):
        return None
    flow, write = cycle.flow, cycle.transport.write

    def write_chunks(chunks: list[bytes]) -> bool:
        if flow.write_paused or not cycle.chunked_encoding or cycle.response_complete or cycle.disconnected:
            return False
        if len(chunks) == 1 and chunks[0]:
            write(b"%x\r\n%b\r\n" % (len(chunks[0]), chunks[0]))
        else:
            write(b"".join([b"%x\r\n%b\r\n" % (len(data), data) for data in chunks if data]))
        return True

    return write_chunks


def without_chunks(send: Send) -> Send:
    """Return a `send` for a client of HTTP/1.0: a body without a length ends with the connection.

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
    """Sends one answer of unknown length. Event loop only."""

    def __init__(
        self,
        send_start: Send,
        send_body: Send,
        raw_headers: list[tuple[bytes, bytes]],
        client: Client | None = None,
        frame: Callable[[BaseModel], bytes] = frame,
        journal: RequestJournal = UNKEPT,
    ) -> None:
        """Send nothing yet; start and body of the answer may be sent by different functions.

        The client counts bytes that wait for a slow reader, and disconnects past its limit. The journal is flushed
        before anything is written, and knows where repeated data lies: between which two events.
        """
        self.is_started = self.is_ended = False
        self._send_start = send_start
        self._send_body = send_body
        self._raw_headers = raw_headers
        self._write_chunks = chunk_writer(send_body)
        self._client = client
        self._frame = frame
        self._journal = journal
        self._num_events = 0  # written, without what `repeat` has added
        self._num_repeats = 0
        self._repeated = b""  # what `repeat` adds
        self._num_kept = 0  # bytes counted by the client
        self._loop = asyncio.get_running_loop()
        self._waiting: list[bytes] = []
        self._draining: asyncio.Future[None] | None = None  # sends what waits, for a slow reader
        self._last_sent = time.monotonic()

    @property
    def num_events(self) -> int:
        """Events that were given to `write`."""
        return self._num_events

    def write(self, event: Event) -> None:
        """Send an event, or its frame, after all that waits.

        Raises:
            Exception: an earlier write could not be sent.
        """
        data = event if isinstance(event, bytes) else self._frame(event)
        self._num_events += 1
        self._put(data)
        if self._journal.is_replayed:
            self._repeat_again()

    def _put(self, data: bytes) -> None:
        if not self.is_started:
            self._start()
        if self._draining is None:
            if not self._waiting:
                _FlushBatch.of_next_loop_iteration(self._loop).writers.append(self)
        elif self._draining.done() and not self._draining.cancelled():
            self._draining.result()
        self._waiting.append(data)
        self._last_sent = time.monotonic()
        if self._draining is not None:
            self._keep(len(data))

    async def end(self, data: bytes) -> None:
        """Send the end of the body, after all that waits."""
        self.flush()
        if self._draining is not None:
            await self._draining
        self._journal.flush()
        await self._send_body({"type": "http.response.body", "body": data, "more_body": False})
        self.is_ended = True

    def flush(self) -> None:
        """Send the start of the answer, and what waits, at once; a slow reader gets it later."""
        if not self.is_started:
            self._start()
        self._flush()

    def abandon(self) -> None:
        """Discard what waits, and send nothing more."""
        self._waiting.clear()
        self._keep(-self._num_kept)
        if self._draining is not None:
            self._draining.cancel()

    def repeat(self, data: bytes, seconds: float) -> Coroutine[Any, Any, None]:
        """Return what sends `data` whenever `seconds` pass without an event, unless the client is a slow reader.

        What an earlier router has repeated is sent again at its places, and nothing more before all of that.
        """
        self._repeated = data
        if self._journal.is_replayed:
            self._repeat_again()
        return self._repeat(seconds)

    async def _repeat(self, seconds: float) -> None:
        while True:
            idle = time.monotonic() - self._last_sent
            if idle < seconds:
                await asyncio.sleep(seconds - idle)
            elif self._draining is not None or self._journal.is_behind or self._journal.knows(self._place):
                await asyncio.sleep(seconds)
            else:
                self._journal.draw(self._place, lambda: self._num_events)
                self._num_repeats += 1
                self._put(self._repeated)

    @property
    def _place(self) -> str:
        """The fact that says behind how many events the next repetition lies."""
        return f"{REPEAT}{self._num_repeats}"

    def _repeat_again(self) -> None:
        """Add what an earlier router has repeated behind the last event."""
        while self._journal.knows(self._place):
            if self._journal.draw(self._place, lambda: self._num_events) != self._num_events:
                return
            self._num_repeats += 1
            self._put(self._repeated)

    def _start(self) -> None:
        self.is_started = True
        self._begin(self._send_start({"type": "http.response.start", "status": 200, "headers": self._raw_headers}))

    def _flush(self) -> None:
        if self._draining is not None or not self._waiting:
            return
        self._journal.flush()
        if self._write_chunks is not None and self._write_chunks(self._waiting):
            self._waiting.clear()
        while self._waiting and self._draining is None:
            data = self._waiting.pop(0)
            self._begin(self._send_body({"type": "http.response.body", "body": data, "more_body": True}))

    def _begin(self, sending: Awaitable[None]) -> None:
        """Send without waiting; where that is not possible, a task sends the remainder."""
        steps = sending.__await__()
        try:
            awaited = next(steps)
        except StopIteration:
            return
        except Exception as error:  # raised by the next `write` or `end`
            self._draining = self._loop.create_future()
            self._draining.set_exception(error)
            return
        self._draining = asyncio.ensure_future(self._drain(_RestOfSend(steps, awaited)))
        self._keep(sum(map(len, self._waiting)))

    async def _drain(self, remainder: "_RestOfSend") -> None:
        await remainder
        while self._waiting:
            self._journal.flush()
            num_bytes = sum(map(len, self._waiting))
            if self._write_chunks is not None and self._write_chunks(self._waiting):
                self._waiting.clear()
            else:
                data = self._waiting.pop(0)
                await self._send_body({"type": "http.response.body", "body": data, "more_body": True})
                num_bytes = len(data)
            self._last_sent = time.monotonic()
            self._keep(-num_bytes)
        self._draining = None

    def _keep(self, num_bytes: int) -> None:
        self._num_kept += num_bytes
        if self._client is not None and num_bytes:
            self._client.keep_unread(num_bytes)


class _FlushBatch:
    """The writers with unsent data since the loop's last iteration: all are flushed in the next one."""

    _newest: ClassVar["_FlushBatch | None"] = None

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.writers: list[StreamWriter] = []
        self._loop = loop
        loop.call_soon(self._send)

    @classmethod
    def of_next_loop_iteration(cls, loop: asyncio.AbstractEventLoop) -> "_FlushBatch":
        """Return the batch of the next iteration of a loop."""
        if cls._newest is None or cls._newest._loop is not loop:
            cls._newest = cls(loop)
        return cls._newest

    def _send(self) -> None:
        if _FlushBatch._newest is self:
            _FlushBatch._newest = None
        for writer in self.writers:
            writer._flush()


class _RestOfSend:
    """The remainder of an awaitable that was begun by hand, and the future that it waits for."""

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
