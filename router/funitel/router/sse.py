"""Server-Sent Events, and answers that end the work behind them when the client leaves.

Knows no route: a producer yields records or finished frames, and how an error looks is the route's business.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from funitel.proto.errors import Cancelled, FunitelError
from funitel.router.frames import Event, frame

logger = logging.getLogger(__name__)
T = TypeVar("T")

KEEP_ALIVE_SECONDS = 15.0
KEEP_ALIVE = b":\n\n"
DONE = b"data: [DONE]\n\n"
DIRECT = "funitel.send"  # in a request's scope: sends bodies past the layers that look at an answer's start only
HEADERS = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; end it at once when the client leaves.

    Args:
        receive: the request's, once its body was read.
        work: cancelled, and waited for, when the client leaves.

    Raises:
        Cancelled: the client left.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Cancelled("the client left")
    finally:
        await _end(working, watching)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: "asyncio.Future[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class DirectSend:
    """Note in a request's scope how to send past all layers below this one.

    They look at nothing but the start of an answer, and each would cost every token a call.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[DIRECT] = send
        await self._app(scope, receive, send)


class EventStream(Response):
    """Send what a producer yields as events.

    An error before the first event is raised, to become an ordinary answer with its own status; only when
    nothing comes for the keep-alive time are the headers sent early. A later error becomes the last event.
    When the client leaves, the producer is cancelled at once.
    """

    def __init__(
        self,
        events: AsyncGenerator[Event, None],
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
            events: the producer; its first event decides between an answer of its own and an ordinary error.
            error_event: shapes an error as the route's clients expect it.
            done: whether `[DONE]` ends the stream, after an error too.
            headers: further response headers.
            frame: writes a record for the wire.
            keep_alive: what is sent while there are no events; a comment, unless the route's clients expect else.
            keep_alive_seconds: idle time after which it is sent.
        """
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS | dict(headers or {}))
        self._events = events
        self._error_event = error_event
        self._done = done
        self._frame = frame
        self._keep_alive = keep_alive
        self._keep_alive_seconds = keep_alive_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wire = _Wire(send, scope.get(DIRECT, send), self.raw_headers)
        try:
            await run_until_disconnect(receive, self._run(wire))
        except Cancelled:
            logger.debug("the client left a stream")

    async def _run(self, wire: "_Wire") -> None:
        keep_alive = asyncio.ensure_future(wire.repeat(self._keep_alive, self._keep_alive_seconds))
        try:
            await self._send_events(wire)
        finally:
            await _end(keep_alive)
        await wire.send(DONE if self._done else b"", more=False)

    async def _send_events(self, wire: "_Wire") -> None:
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await wire.send(event if isinstance(event, bytes) else self._frame(event))
        except FunitelError as error:
            if not wire.started:
                raise
            await wire.send(self._frame(self._error_event(error)))
        except Exception:
            if not wire.started:
                raise
            logger.exception("a stream failed")
            await wire.send(self._frame(self._error_event(FunitelError("internal error"))))


class _Wire:
    """The sending half of one response; frames of the keep-alive never cut into others."""

    def __init__(self, send_start: Send, send_body: Send, raw_headers: list[tuple[bytes, bytes]]) -> None:
        self.started = False
        self._send_start = send_start
        self._send_body = send_body
        self._raw_headers = raw_headers
        self._is_sending = False  # an event
        self._keeping_alive = asyncio.Lock()  # held while a keep-alive is sent
        self._last_sent = time.monotonic()

    async def send(self, data: bytes, *, more: bool = True) -> None:
        """Send an event, or what ends the answer; after a keep-alive that is on its way."""
        if self._keeping_alive.locked():
            async with self._keeping_alive:
                pass
        self._is_sending = True
        await self._send(data, more)
        self._is_sending = False

    async def repeat(self, data: bytes, seconds: float) -> None:
        """Send `data` whenever `seconds` pass without an event."""
        while True:
            idle = time.monotonic() - self._last_sent
            if self._is_sending:  # the client does not read
                await asyncio.sleep(seconds)
            elif idle >= seconds:
                async with self._keeping_alive:
                    await self._send(data, more=True)
            else:
                await asyncio.sleep(seconds - idle)

    async def _send(self, data: bytes, more: bool) -> None:
        if not self.started:
            self.started = True
            await self._send_start({"type": "http.response.start", "status": 200, "headers": self._raw_headers})
        await self._send_body({"type": "http.response.body", "body": data, "more_body": more})
        self._last_sent = time.monotonic()
