"""An HTTP/1.1 connection by uvicorn, with timeouts and limits on bytes and requests.

uvicorn waits without a timeout for the end of a header or a body, and for a slow reader; it buffers headers of any
length, and any number of pipelined requests. Here each of these has a limit: a client that exceeds one gets an error,
if no answer has begun, and is disconnected.
"""

import asyncio
import json
from collections.abc import Callable
from enum import Enum
from http import HTTPStatus
from math import inf
from typing import Any, cast

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from funitel.router.core.journal import RequestJournal
from funitel.router.settings import MEDIA_PAYLOAD_LIMIT, RouterSettings
from funitel.router.transport.connection_limits import Connections
from funitel.router.transport.framing import BodyTooLarge, Framing, LimitExceeded, malformed
from funitel.router.transport.kept_answer import JOURNAL, WHOLE
from funitel.router.transport.kept_connection import KeptConnection, LeftInput
from funitel.router.transport.memory_budget import CLIENT, TOO_LARGE
from funitel.router.transport.request_head import body_length, check_version, origin_target

MAX_PIPELINED = 32  # requests in flight on one connection
MAX_HEADERS = 128  # of a request
MIN_READ_BYTES = 1 << 14  # that a slow reader must read within its timeout, while more than that waits
LEAVING_SECONDS = 5.0  # for a client to read its answer, and to stop sending
NUMBER = "funitel.number"  # in a scope: of the request on its connection, where that is kept
EARLY_SECONDS = 0.002  # timers have a resolution of milliseconds


class Phase(Enum):
    """The thing that a connection waits for."""

    FRESH = "a first request"
    IDLE = "another request"
    HEADER = "the rest of a request's header"
    BODY = "the rest of a request's body"
    ANSWER = "us"
    LEAVING = "the end of a request that was answered before"


class HttpConnection(HttpToolsProtocol):
    """The connection of one client."""

    def __init__(
        self,
        connections: Connections,
        settings: RouterSettings,
        kept: KeptConnection | None = None,
        on_lost: Callable[[], None] | None = None,
        **uvicorn: Any,
    ) -> None:
        """Prepare a connection.

        `kept` is the journal of one that outlives this router; `on_lost` is called at the end of any other.
        """
        super().__init__(**uvicorn)
        self._kept = kept
        self._on_lost = on_lost
        self._raw: list[bytes] | None = []  # of the newest request; None if it is too large to be kept
        self._num_raw = 0  # bytes of it
        self._has_lost_input = False
        self._renew_parser()
        self._connections = connections
        self._settings = settings
        self._num_requests = 0
        self._answered: RequestResponseCycle | None = None  # now, or last; `cycle` is of the newest request
        self._is_in_header = False  # of the newest request
        self._is_whole = True  # the newest request was received to its end
        self._is_leaving = False  # nothing more is read
        self._is_deaf = False  # the same, but a handler may answer
        self._num_header_lines = 0
        self._framing = Framing(settings.max_header_bytes, settings.payload_limit or MEDIA_PAYLOAD_LIMIT)
        self._waits_for: tuple[Phase, int] | None = None  # and of which request
        self._deadline = inf  # instants of the loop's clock
        self._unread_deadline = inf
        self._num_unread_bytes = 0  # in the send buffer, when it was last checked
        self._num_waiting_bytes = 0  # of streams, and not in the send buffer yet
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf

    # Reading --------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count this connection, or refuse it where there are too many."""
        if self._kept is not None:
            transport = cast(asyncio.Transport, self._kept.around(transport))
        super().connection_made(transport)
        if self._connections.enter(self):
            self._watch()
            if self._kept is not None and self._kept.left is not None:
                left, self._kept.left = self._kept.left, None
                self._take_over(left)  # here: no data is received before
        else:
            limit = self._connections.limit
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{limit} connections are open, at most {limit}", "overloaded")
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything."""
        super().connection_lost(exc)
        if self._kept is not None:
            self._kept.release()
        if self._on_lost is not None:
            self._on_lost()
        self._tell_of_leaving()
        self._unset_keepalive_if_required()  # uvicorn leaves that timer running after a reset
        self._connections.leave(self)
        if self._timer is not None:
            self._timer.cancel()
        if self.scope is not None:
            cast(dict[str, Any], self.scope).pop(CLIENT, None)  # refers back to this

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Remember which request is being answered: uvicorn knows the newest, which may wait behind it."""
        self._answered = cycle
        scope = cast(dict[str, Any], cycle.scope)
        if self._kept is not None and not self._is_journalled(scope):
            self._kept.begin(scope[NUMBER])
        super()._start_asgi_task(cycle, app)

    def _tell_of_leaving(self) -> None:
        """Tell the handler that nothing more can be sent."""
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Parse data; refuse what is not HTTP, or exceeds a limit."""
        self._unset_keepalive_if_required()
        if self._is_leaving or self._is_deaf:
            return
        try:
            for piece in self._framing.pieces(data):
                if self._kept is not None:
                    self._keep_raw(piece)
                    self._kept.num_input += len(piece)
                self._parse(piece)
        except httptools.HttpParserError as error:
            self._refuse(error.__context__)
        except LimitExceeded as error:
            self._refuse(error)
        except BodyTooLarge:
            self._end_body()
        self._watch()

    def _end_body(self) -> None:
        """Wake the handler, which answers 413 as its route does, and read no more."""
        self._is_deaf = True
        cast(dict[str, Any], self.scope)[TOO_LARGE] = True
        self.cycle.body += b" "
        self.cycle.message_event.set()

    def _parse(self, data: bytes) -> None:
        """Parse data. The parser stops after a header that offers an upgrade, which is not accepted."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = self._head_without_offer() + data[offer.args[0] :]
                self._renew_parser()

    def _renew_parser(self) -> None:
        """Make a parser, with uvicorn's leniency, that leaves versions to `check_version`."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True, lenient_version=True)

    def _head_without_offer(self) -> bytes:
        """Rebuild the header that was just parsed, without the upgrade."""
        line = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        lines = [line, *(b"%b: %b" % header for header in self.headers if header[0] != b"upgrade")]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        """Begin to read a request."""
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[CLIENT] = self
        self._num_requests += 1
        self._num_header_lines = 0
        self._is_in_header = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Read a line of the header; one of the trailer is no part of it and is dropped."""
        self._num_header_lines += 1
        if self._num_header_lines > MAX_HEADERS:
            raise LimitExceeded(
                "header_bytes",
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"the header must have at most {MAX_HEADERS} lines",
            )
        if self._is_in_header:
            super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        """Begin to answer a request, unless earlier ones are in flight."""
        if len(self.pipeline) >= MAX_PIPELINED:
            raise LimitExceeded("pipelined")
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise malformed("this is no proxy")
            return  # parsed again without the upgrade
        version = self.parser.get_http_version()
        check_version(version)
        num_bytes = body_length(version, self.headers)
        self.url = origin_target(self.parser.get_method(), self.url, version, self.headers)
        if self._kept is not None:
            self._kept.num_requests += 1
            cast(dict[str, Any], self.scope)[NUMBER] = self._kept.num_requests
        super().on_headers_complete()
        cast(dict[str, Any], self.scope)["http_version"] = "1.0" if version == "1.0" else "1.1"
        self._framing.begin_body(num_bytes)
        self._is_in_header = self._is_whole = False

    def on_message_complete(self) -> None:
        """Note that a request was received to its end."""
        if self.parser.should_upgrade():
            return
        self._is_whole = True
        if self._kept is not None:
            self._end_raw(self._kept)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Go on with the next request, or wait for it."""
        if self._kept is not None and self._answered is not None:
            scope = cast(dict[str, Any], self._answered.scope)
            scope.pop(WHOLE, None)
            self._kept.complete(scope[NUMBER], scope.get(JOURNAL), closes=self.transport.is_closing())
        super().on_response_complete()
        if self._has_lost_input and not self.pipeline and self.cycle.response_complete:
            self._refuse_lost()
        self._watch()

    def pause_writing(self) -> None:
        """Apply backpressure: begin the timeout of a slow reader, once the writer has returned."""
        super().pause_writing()
        self.loop.call_soon(self._expect_reading)

    def resume_writing(self) -> None:
        """End backpressure: the client has read."""
        super().resume_writing()
        self._unread_deadline = inf
        self._connections.unread.add(self, -self._num_unread_bytes)
        self._num_unread_bytes = 0

    def _expect_reading(self) -> None:
        """Start the timeout of a slow reader."""
        if not self.flow.write_paused:
            return
        num_bytes = self.transport.get_write_buffer_size()
        self._connections.unread.add(self, num_bytes - self._num_unread_bytes)
        self._num_unread_bytes = num_bytes
        self._unread_deadline = self.loop.time() + self._settings.unread_timeout_seconds
        self._set_timer()

    # Timeouts --------------------------------------------------------------------------------------------------------

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
        """Start the timeout of the current phase, once for each phase of each request."""
        phase = self._phase
        if self._waits_for == (phase, self._num_requests):
            return
        self._waits_for = phase, self._num_requests
        if phase in (Phase.BODY, Phase.ANSWER):
            self._connections.mark_busy(self)
        else:
            self._connections.mark_idle(self)
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
        """Set the timer to the next deadline; an earlier timer stays, and is set anew when it fires."""
        deadline = min(self._deadline, self._unread_deadline)
        if deadline < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_at(deadline, self._check_deadlines)
            self._timer_at = deadline

    def _check_deadlines(self) -> None:
        """End the connection if a deadline has passed."""
        self._timer, self._timer_at = None, inf
        now = self.loop.time() + EARLY_SECONDS
        if now >= self._unread_deadline:
            if self._num_unread_bytes - self.transport.get_write_buffer_size() < MIN_READ_BYTES:
                self.disconnect("unread_time")
            else:
                self._expect_reading()
        elif now >= self._deadline:
            self._time_out()
        else:
            self._set_timer()

    def _time_out(self) -> None:
        """End a connection that has timed out."""
        match self._phase:
            case Phase.HEADER:
                seconds = self._settings.header_timeout_seconds
                message = f"the header must be whole within {seconds:g} seconds"
                self._refuse(LimitExceeded("header_time", HTTPStatus.REQUEST_TIMEOUT, message))
                self._watch()
            case Phase.BODY:
                seconds = self._settings.body_timeout_seconds
                message = f"the body must be whole within {seconds:g} seconds"
                self._refuse(LimitExceeded("body_time", HTTPStatus.REQUEST_TIMEOUT, message))
                self._watch()
            case _:
                self.transport.abort()

    # The journal -----------------------------------------------------------------------------------------------------

    @property
    def is_kept(self) -> bool:
        """Whether the connection outlives this router."""
        return self._kept is not None

    def keep(self, scope: Scope) -> RequestJournal:
        """Put the request of a scope into the journal; it must be whole."""
        assert self._kept is not None, "only kept connections have a journal"
        return self._kept.keep(scope[NUMBER], scope.pop(WHOLE))

    def begin_unkept(self, scope: Scope) -> bool:
        """Note that the answer of a request begins that is not in the journal; False if it may not."""
        assert self._kept is not None, "only kept connections have a journal"
        return self._kept.begin_unkept(scope[NUMBER])

    def facts_of(self, scope: Scope) -> dict[str, Any]:
        """The facts that an earlier router has left of the request of a scope."""
        assert self._kept is not None, "only kept connections have a journal"
        return self._kept.facts_of(scope[NUMBER])

    def note_interim(self, num_bytes: int) -> None:
        """Note that so many bytes follow which belong to no answer."""
        assert self._kept is not None, "only kept connections have a journal"
        self._kept.note_interim(num_bytes)

    def _keep_raw(self, piece: bytes) -> None:
        """Keep bytes of the newest request until it is whole."""
        if self._raw is None:
            return
        self._raw.append(piece)
        self._num_raw += len(piece)
        self.keep_body(len(piece))
        if self._num_raw > self._settings.max_header_bytes + (self._settings.payload_limit or MEDIA_PAYLOAD_LIMIT):
            self.keep_body(-self._num_raw)
            self._raw, self._num_raw = None, 0

    def _end_raw(self, kept: KeptConnection) -> None:
        """Note that a request is whole, and put it into the journal, unless its handler may have had an effect."""
        raw, scope = self._raw, cast(dict[str, Any], self.scope)
        self.keep_body(-self._num_raw)
        self._raw, self._num_raw = [], 0
        kept.end_input(scope[NUMBER])
        if raw is None or self.cycle.response_complete:
            return
        scope[WHOLE] = b"".join(raw)
        if self.cycle is not self._answered or self._is_journalled(scope):
            kept.wait(scope[NUMBER], scope[WHOLE])

    def _is_journalled(self, scope: Scope) -> bool:
        """Whether a request has no effect before its handler puts it into the journal."""
        return scope["method"] == "POST" and scope["path"] in self._connections.journalled_paths

    @property
    def has_unkept(self) -> bool:
        """Whether a request that is not in the journal is whole and not answered yet."""
        if self._kept is None:
            return False
        cycles = [each for each, _ in self.pipeline]
        if self._answered is not None and not self._answered.response_complete:
            cycles.append(self._answered)
        scopes = (cast(dict[str, Any], cycle.scope) for cycle in cycles if not cycle.more_body)
        waits = any(JOURNAL not in each and not self._kept.is_waiting(each[NUMBER]) for each in scopes)
        return waits or self._kept.has_unkept_bytes

    def _take_over(self, left: LeftInput) -> None:
        """Answer the requests that an earlier router has left, then go on; one that is lost ends the connection."""
        self.data_received(left.requests)
        if left.has_lost:
            self._has_lost_input = self._is_deaf = True
            if not left.requests:
                self._refuse_lost()
                self._watch()
        elif left.partial:
            self.data_received(left.partial)

    def _refuse_lost(self) -> None:
        """Answer what is not in the journal with an error."""
        self._has_lost_input = False
        if self.transport.is_closing():
            return
        message = "the router was restarted while this request came in"
        self._answer(HTTPStatus.SERVICE_UNAVAILABLE, message, "overloaded")
        self._is_leaving = True
        self.transport.write_eof()

    def hand_over(self) -> None:
        """Read nothing more, and hand over the beginning of a request that is not whole."""
        self._is_deaf = True
        if self._kept is not None and self._raw and not self.transport.is_closing():
            self._kept.hand_over(b"".join(self._raw))

    # Memory ----------------------------------------------------------------------------------------------------------

    def keep_unread(self, num_bytes: int) -> None:
        """Add bytes of a stream that wait for a slow reader; negative ones have been sent."""
        self._num_waiting_bytes += num_bytes
        if self.transport.is_closing():
            return
        self._connections.unread.add(self, num_bytes)
        if self._num_waiting_bytes > self._settings.max_unread_bytes:
            self.disconnect("unread_bytes")

    def keep_body(self, num_bytes: int) -> None:
        """Add bytes of a body that is not complete; negative ones were released."""
        if not self.transport.is_closing():
            self._connections.bodies.add(self, num_bytes)

    # The end ---------------------------------------------------------------------------------------------------------

    def disconnect(self, reason: str) -> None:
        """End the connection at once; requests in flight see that their client has left."""
        self._connections.count_disconnect(reason)
        self._tell_of_leaving()
        self.transport.abort()

    def _refuse(self, why: BaseException | None) -> None:
        """Answer with an error, unless an answer has begun, and stop reading."""
        error = why if isinstance(why, LimitExceeded) else malformed()
        is_answering = self._phase in (Phase.ANSWER, Phase.LEAVING)
        if is_answering or (self.cycle is not None and self._phase is Phase.BODY and self.cycle.response_started):
            self.disconnect(error.reason)
            return
        self._connections.count_disconnect(error.reason)
        self._answer(error.status, error.message, "validation")
        self._is_leaving = True
        if self.cycle is not None:  # a handler that reads its body stops waiting
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _answer(self, status: HTTPStatus, message: str, error_type: str) -> None:
        """Write an error in the shape of TGI's routes, since the route is not known."""
        body = json.dumps({"error": message, "error_type": error_type}).encode()
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n"
        )
        retry = "retry-after: 1\r\n" if status is HTTPStatus.SERVICE_UNAVAILABLE else ""
        self.transport.write(f"{head}{retry}\r\n".encode() + body)
