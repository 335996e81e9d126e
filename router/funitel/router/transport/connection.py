"""HTTP/1.1 as uvicorn speaks it, within bounds on bytes, requests and seconds.

uvicorn waits for ever for a header or a body that does not end, and for a client that does not read; it keeps all of a
header, and any number of requests that a client sends before the first is answered. Here each of these has a bound.
Whoever passes one is told so, if nothing was answered yet, and cut.
"""

import asyncio
import json
from enum import Enum
from http import HTTPStatus
from math import inf
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from funitel.router.settings import RouterSettings
from funitel.router.transport.connection_limits import Connections
from funitel.router.transport.memory_budget import CLIENT

MOST_AHEAD = 32  # requests sent before the first of them is answered
MOST_HEADERS = 128  # of a request
LEAST_READ_BYTES = 1 << 14  # that a client must read, within its time, while more than that waits for it
LEAVING_SECONDS = 5.0  # for a client to read what it was answered, and to stop sending
EARLY_SECONDS = 0.002  # timers go by milliseconds


class Phase(Enum):
    """What a connection waits for."""

    FRESH = "a first request"
    IDLE = "another request"
    HEADER = "the rest of a request's header"
    BODY = "the rest of a request's body"
    ANSWER = "us"
    LEAVING = "the end of a request that was answered before"


class TooMuch(Exception):
    """A client sends more than it may, `reason` says of what; raised to stop the parser."""

    def __init__(self, reason: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST, message: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.status = status
        self.message = message


class HttpConnection(HttpToolsProtocol):
    """One client's connection, from its beginning to its end."""

    def __init__(self, connections: Connections, settings: RouterSettings, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._connections = connections
        self._settings = settings
        self._num_requests = 0
        self._is_in_header = False  # of the newest request
        self._is_whole = True  # the newest request has come to its end
        self._is_leaving = False  # nothing more is read
        self._num_header_bytes = 0
        self._num_stray_bytes = 0  # since something came that is of use by itself
        self._waits_for: tuple[Phase, int] | None = None  # and of which request
        self._deadline = inf  # instants of the loop's clock
        self._unread_deadline = inf
        self._num_unread_bytes = 0  # of what the connection was given to send, when the client was last looked at
        self._num_waiting_bytes = 0  # of streams, and not given to the connection yet
        self._timer: asyncio.TimerHandle | None = None
        self._timer_goes_off = inf

    # What comes ------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place among the connections, or say that there is none."""
        super().connection_made(transport)
        if self._connections.enter(self):
            self._watch()
        else:
            most = self._connections.most
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{most} connections are open, at most {most}", "overloaded")
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of everything."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn lets it run on behind a connection that was reset, and keep that
        self._connections.leave(self)
        if self._timer is not None:
            self._timer.cancel()
        if self.scope is not None:
            cast(dict[str, Any], self.scope).pop(CLIENT, None)  # refers back to this

    def data_received(self, data: bytes) -> None:
        """Parse what came; refuse what is no HTTP, or too much of it."""
        self._unset_keepalive_if_required()
        if self._is_leaving:
            return
        self._num_stray_bytes += len(data)
        try:
            self._parse(data)
            if self._num_stray_bytes > self._settings.max_header_bytes:
                raise self._header_too_large()
        except httptools.HttpParserError as error:
            self._refuse(error.__context__)
        except TooMuch as error:
            self._refuse(error)
        self._watch()

    def _parse(self, data: bytes) -> None:
        """Parse what came. The parser stops behind a header that offers another protocol, which is not taken."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = self._head_without_offer() + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's

    def _head_without_offer(self) -> bytes:
        """The header that was just read, to be read once more."""
        line = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        lines = [line, *(b"%b: %b" % header for header in self.headers if header[0] != b"upgrade")]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        """Begin to read a request."""
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[CLIENT] = self
        self._num_requests += 1
        self._num_header_bytes = 0
        self._is_in_header = True

    def on_url(self, url: bytes) -> None:
        """Read a part of the path."""
        self._count_header_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Read a line of the header, or of what may come behind the body."""
        self._count_header_bytes(len(name) + len(value))
        if len(self.headers) >= MOST_HEADERS:
            raise TooMuch(
                "header_bytes",
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"the header must have at most {MOST_HEADERS} lines",
            )
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer a request, unless others come first."""
        if len(self.pipeline) >= MOST_AHEAD:
            raise TooMuch("pipelined")
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise TooMuch("malformed", message="this is no proxy")
            return  # to be read once more
        super().on_headers_complete()
        self._num_stray_bytes = 0
        self._is_in_header = self._is_whole = False

    def on_body(self, body: bytes) -> None:
        """Keep a part of a body for the application."""
        self._num_stray_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that all of a request is there."""
        if self.parser.should_upgrade():
            return
        self._num_stray_bytes = 0
        self._is_whole = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Go on with the next request, or wait for it."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """Begin to wait for the client to read, once whoever writes has taken note that it has written."""
        super().pause_writing()
        self.loop.call_soon(self._expect_reading)

    def resume_writing(self) -> None:
        """Go on, for the client has read."""
        super().resume_writing()
        self._unread_deadline = inf
        self._connections.unread.add(self, -self._num_unread_bytes)
        self._num_unread_bytes = 0

    def _expect_reading(self) -> None:
        """Give the client its time to read more of what waits for it."""
        if not self.flow.write_paused:
            return
        num_bytes = self.transport.get_write_buffer_size()
        self._connections.unread.add(self, num_bytes - self._num_unread_bytes)
        self._num_unread_bytes = num_bytes
        self._unread_deadline = self.loop.time() + self._settings.unread_timeout_seconds
        self._set_timer()

    def _count_header_bytes(self, count: int) -> None:
        self._num_header_bytes += count
        if self._num_header_bytes > self._settings.max_header_bytes:
            raise self._header_too_large()

    def _header_too_large(self) -> TooMuch:
        return TooMuch(
            "header_bytes",
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"the header must have at most {self._settings.max_header_bytes} bytes",
        )

    # Time ------------------------------------------------------------------------------------------------------------

    @property
    def _phase(self) -> Phase:
        if self._is_leaving:
            return Phase.LEAVING
        if self.pipeline:
            return Phase.ANSWER
        if self.cycle is not None and not self.cycle.response_complete:
            return Phase.ANSWER if self._is_whole else Phase.BODY
        if self._is_in_header:
            return Phase.HEADER
        if not self._is_whole:
            return Phase.LEAVING
        return Phase.FRESH if self.cycle is None else Phase.IDLE

    def _watch(self) -> None:
        """Give the client its time for what is expected of it now, once for each such thing."""
        phase = self._phase
        if self._waits_for == (phase, self._num_requests):
            return
        self._waits_for = phase, self._num_requests
        if phase in (Phase.BODY, Phase.ANSWER):
            self._connections.work(self)
        else:
            self._connections.rest(self)
        self._deadline = self.loop.time() + self._seconds_for(phase)
        self._set_timer()

    def _seconds_for(self, phase: Phase) -> float:
        match phase:
            case Phase.FRESH | Phase.HEADER:
                return self._settings.header_timeout_seconds
            case Phase.IDLE:
                return self._settings.idle_timeout_seconds
            case Phase.BODY:
                return self._settings.body_timeout_seconds
            case Phase.LEAVING:
                return LEAVING_SECONDS
            case Phase.ANSWER:
                return inf

    def _set_timer(self) -> None:
        """Look again at the next deadline; a timer that goes off before it is left alone, and set anew then."""
        deadline = min(self._deadline, self._unread_deadline)
        if deadline < self._timer_goes_off:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_at(deadline, self._look)
            self._timer_goes_off = deadline

    def _look(self) -> None:
        """End the connection if a deadline has passed."""
        self._timer, self._timer_goes_off = None, inf
        now = self.loop.time() + EARLY_SECONDS
        if now >= self._unread_deadline:
            if self._num_unread_bytes - self.transport.get_write_buffer_size() < LEAST_READ_BYTES:
                self.cut("unread_time")
            else:
                self._expect_reading()
        elif now >= self._deadline:
            self._end_wait()
        else:
            self._set_timer()

    def _end_wait(self) -> None:
        """End a connection whose client has had its time."""
        match self._phase:
            case Phase.HEADER:
                seconds = self._settings.header_timeout_seconds
                message = f"the header must be whole within {seconds:g} seconds"
                self._refuse(TooMuch("header_time", HTTPStatus.REQUEST_TIMEOUT, message))
                self._watch()
            case Phase.BODY:
                seconds = self._settings.body_timeout_seconds
                message = f"the body must be whole within {seconds:g} seconds"
                self._refuse(TooMuch("body_time", HTTPStatus.REQUEST_TIMEOUT, message))
                self._watch()
            case _:
                self.transport.abort()

    # What is kept ----------------------------------------------------------------------------------------------------

    def keep_unread(self, num_bytes: int) -> None:
        """Note that so many bytes of a stream more wait until the client reads, or fewer."""
        self._num_waiting_bytes += num_bytes
        if self.transport.is_closing():
            return
        self._connections.unread.add(self, num_bytes)
        if self._num_waiting_bytes > self._settings.max_unread_bytes:
            self.cut("unread_bytes")

    def keep_body(self, num_bytes: int) -> None:
        """Note that so many bytes of a body more are kept until it is whole, or fewer."""
        if not self.transport.is_closing():
            self._connections.bodies.add(self, num_bytes)

    # The end ---------------------------------------------------------------------------------------------------------

    def cut(self, reason: str) -> None:
        """End the connection at once; what is under way on it sees that its client has left."""
        self._connections.note_cut(reason)
        self.transport.abort()

    def _refuse(self, why: BaseException | None) -> None:
        """Say what is wrong, where nothing else is being said, and read no more."""
        error = why if isinstance(why, TooMuch) else TooMuch("malformed", message="this is no HTTP request")
        is_answering = self._phase in (Phase.ANSWER, Phase.LEAVING)
        if is_answering or (self.cycle is not None and self._phase is Phase.BODY and self.cycle.response_started):
            self.cut(error.reason)
            return
        self._connections.note_cut(error.reason)
        self._answer(error.status, error.message, "validation")
        self._is_leaving = True
        if self.cycle is not None:  # whoever reads its body waits for no more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _answer(self, status: HTTPStatus, message: str, error_type: str) -> None:
        """Write an answer in the shape of TGI's routes: which one was meant is not known."""
        body = json.dumps({"error": message, "error_type": error_type}).encode()
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n"
        )
        retry = "retry-after: 1\r\n" if status is HTTPStatus.SERVICE_UNAVAILABLE else ""
        self.transport.write(f"{head}{retry}\r\n".encode() + body)
