"""Server-Sent Events: stream a producer's events, and cancel the work when the client disconnects.

Knows no route: a producer writes records or complete frames, and the route shapes errors.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from funitel.proto.errors import Cancelled, FunitelError
from funitel.router.core import request_context
from funitel.router.core.journal import UNKEPT, RequestJournal
from funitel.router.transport.kept_answer import JOURNAL
from funitel.router.transport.kept_connection import HEAD
from funitel.router.transport.memory_budget import CLIENT, Client
from funitel.router.transport.sse_frames import Event, frame
from funitel.router.transport.stream_writer import DIRECT, StreamWriter

logger = logging.getLogger(__name__)
T = TypeVar("T")
Put = Callable[[Event], None]  # sends an event, now or once the client reads again
Producer = Callable[[Put], Awaitable[None]]

FAILURE = "failure"  # a fact of a journal: events before the error that ends a stream, and the frame of that
KEEP_ALIVE_SECONDS = 15.0
KEEP_ALIVE = b":\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}


class EventWriter(Protocol):
    """What the events of a stream are written to."""

    @property
    def is_started(self) -> bool:
        """Whether the answer has begun: an error can only be an event then."""

    @property
    def num_events(self) -> int:
        """The events written so far, without keep-alives."""

    def write(self, event: Event) -> None:
        """Write an event, or its frame."""

    def flush(self) -> None:
        """Send what was written, if the client reads."""

    async def end(self, data: bytes) -> None:
        """Write the end."""


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; cancel it at once when the client disconnects.

    Args:
        receive: that of the request, once its body was read.
        work: cancelled, and awaited, when the client disconnects.

    Raises:
        Cancelled: the client left.
    """
    task = asyncio.current_task()
    assert task is not None
    num_cancels = task.cancelling()  # by others
    has_left = False

    def leave(watching: asyncio.Future[None]) -> None:
        nonlocal has_left
        if not watching.cancelled():
            watching.exception()  # a connection without a next message has ended too
            has_left = True
            task.cancel()

    watching = asyncio.ensure_future(_disconnect(receive))
    watching.add_done_callback(leave)
    try:
        return await work
    finally:
        watching.remove_done_callback(leave)
        watching.cancel()
        if has_left and task.uncancel() <= num_cancels:
            raise Cancelled("the client left") from None


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _FailedEarlier(FunitelError):
    """An earlier router has ended the stream here, with an error."""


async def _end(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Send the events of a producer.

    An error before the first event is raised, and becomes an ordinary answer with its own status; headers are sent
    early only when there is no event for the keep-alive time. A later error becomes the last event. When the client
    disconnects, the producer is cancelled at once.
    """

    def __init__(
        self,
        producer: Producer,
        error_event: Callable[[FunitelError], BaseModel],
        *,
        done: bool = False,
        headers: Mapping[str, str] | None = None,
        frame: Callable[[BaseModel], bytes] = frame,
        keep_alive: bytes = KEEP_ALIVE,
        keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
    ) -> None:
        """Prepare a stream; nothing runs yet.

        Args:
            producer: is given a function that sends an event, and returns at the end. Events that a slow reader does
                not read are buffered, until it is disconnected.
            error_event: makes the record of an error.
            done: whether `[DONE]` ends the stream, also after an error.
            headers: further response headers.
            frame: makes the frame of a record.
            keep_alive: sent while there are no events; a comment by default.
            keep_alive_seconds: idle time after which it is sent.
        """
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS | dict(headers or {}))
        self.frame = frame
        self.keep_alive = keep_alive
        self.keep_alive_seconds = keep_alive_seconds
        self.error_event = error_event
        self.producer = producer
        self._done = done
        self._journal: RequestJournal = UNKEPT
        self._client: Client | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.join(scope)
        direct = scope.get(DIRECT, send)
        writer = StreamWriter(send, direct, self.raw_headers, self._client, self.frame, self._journal)
        try:
            await run_until_disconnect(receive, self._run(writer))
        except Cancelled as error:
            if not writer.is_ended:  # else the server ends the connection, which looks the same
                request_context.current().error = error
                logger.debug("the client left a stream")
        finally:
            writer.abandon()

    def join(self, scope: Scope) -> None:
        """Take the client and the journal of a request, to be called before events are produced."""
        self._client, self._journal = scope.get(CLIENT), scope.get(JOURNAL, UNKEPT)

    async def _run(self, writer: StreamWriter) -> None:
        if self._journal.knows(HEAD):  # an error cannot become an ordinary answer any more
            writer.flush()
        keep_alive = asyncio.ensure_future(writer.repeat(self.keep_alive, self.keep_alive_seconds))
        try:
            await self.send_events(writer)
        finally:
            await _end(keep_alive)

    async def send_events(self, writer: StreamWriter) -> None:
        """Send all events to the client; raises as `produce`."""
        await self.produce(writer)

    async def produce(self, writer: EventWriter) -> None:
        """Write all events, and the end.

        Raises:
            Exception: it came before the answer has begun.
        """
        journal = self._journal
        has_failed = journal.knows(FAILURE)
        try:
            await self.producer(partial(_write_until_failure, writer, journal) if has_failed else writer.write)
            if has_failed:
                raise _FailedEarlier("this stream has failed")
        except FunitelError as error:
            if not writer.is_started and not journal.knows(HEAD):
                raise
            self._fail(writer, error)
        except Exception:
            if not writer.is_started and not journal.knows(HEAD):
                raise
            logger.exception("a stream failed")
            self._fail(writer, FunitelError("internal error"))
        await writer.end(DONE if self._done else b"")

    def _fail(self, writer: EventWriter, error: FunitelError) -> None:
        """End a stream that has begun with an error: the one that an earlier router has ended it with, if one has.

        Where its client has other bytes already, the connection ends.
        """
        request_context.current().error = error
        journal, client = self._journal, self._client
        if not journal.key:
            writer.write(self.error_event(error))
            return
        if not journal.knows(FAILURE):
            writer.flush()
            if journal.is_behind and client is not None:
                logger.error("a stream that was taken over fails before the place that it had reached: %s", error)
                client.disconnect("takeover")
                return
        frame = self.frame(self.error_event(error)).decode()
        _, frame = journal.draw(FAILURE, lambda: (writer.num_events, frame))
        writer.write(frame.encode())


def _write_until_failure(writer: EventWriter, journal: RequestJournal, event: Event) -> None:
    """Write an event unless an earlier router has ended the stream with an error before it."""
    num_events, _ = journal.draw(FAILURE, lambda: (0, ""))
    if writer.num_events >= num_events:
        raise _FailedEarlier("this stream has failed")
    writer.write(event)
