"""The streams that clients may resume: found by owner and id, within a budget of bytes, for a time after their end."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from funitel.proto.errors import Cancelled, FunitelError, Gone, InvalidRequest, NotFound
from funitel.router.core import request_context
from funitel.router.resumable.frame_log import FrameLog
from funitel.router.transport.sse import EventStream
from funitel.router.transport.stream_writer import StreamWriter

logger = logging.getLogger(__name__)

STREAM_BYTES = 1024  # that a kept stream takes beside its frames
MAX_GONE = 4096  # streams that cannot be resumed any more, of which the reason is known

StreamKey = tuple[bytes, str]  # owner, and id of the request


class ResumableStreams:
    """All streams that can be resumed. Event loop only."""

    def __init__(self, max_seconds: int, max_bytes: int) -> None:
        """Keep none yet; the limits are `--max-resume-seconds` and `--max-resume-bytes`."""
        self.max_seconds = max_seconds
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._streams: OrderedDict[StreamKey, ResumableStream] = OrderedDict()
        self._gone: OrderedDict[StreamKey, str] = OrderedDict()

    def begin(self, owner: bytes, request_id: str, seconds: int, stream: EventStream) -> "ResumableStream":
        """Make a stream one that can be resumed, as the only one of its owner and id.

        Args:
            owner: of the request, as a hash.
            request_id: of the HTTP request.
            seconds: that it goes on without a client, and that its events are kept after its end.
            stream: to be answered.
        """
        key = owner, request_id
        if key in self._streams:
            self.forget(key, "another request has the same id")
        self._gone.pop(key, None)
        begun = self._streams[key] = ResumableStream(self, key, seconds, stream)
        self.count(STREAM_BYTES)
        return begun

    def attach(self, owner: bytes, request_id: str, after: int, field: str) -> Response:
        """Make the answer with all events of a stream after a number; one without a body where it has ended there.

        Args:
            owner: as in `begin`.
            request_id: as in `begin`.
            after: number of the last event that the client has.
            field: that gave the number, for errors.

        Raises:
            NotFound: the owner has no such stream.
            Gone: it cannot be resumed any more.
            InvalidRequest: it has no event of that number.
        """
        key = owner, request_id
        stream = self._streams.get(key)
        if stream is None:
            reason = self._gone.get(key)
            if reason is None:
                raise NotFound(f"no stream with id {request_id!r} can be resumed: see x-resume-seconds")
            raise Gone(f"stream {request_id!r} cannot be resumed any more: {reason}")
        log = stream.log
        if after > log.num_frames:
            message = f"{field}: must be an event that the stream has sent, <= {log.num_frames}. Given: {after}"
            raise InvalidRequest(message, field)
        if log.is_ended and log.error is None and after == log.num_frames:
            return Response(status_code=204)
        return stream.answer(after)

    def count(self, num_bytes: int) -> None:
        """Count bytes that are kept, or are not any more; over the limit streams that take the most are forgotten.

        Those that have ended are forgotten first, the earliest first.
        """
        self.num_bytes += num_bytes
        while num_bytes > 0 and self.num_bytes > self._max_bytes and self._streams:
            key = next((key for key, stream in self._streams.items() if stream.log.is_ended), None) or self._largest()
            self.forget(key, f"its events did not fit in --max-resume-bytes {self._max_bytes}")

    def _largest(self) -> StreamKey:
        return max(self._streams, key=lambda key: self._streams[key].log.num_bytes)

    def move_to_end(self, key: StreamKey) -> None:
        """Note that a stream has ended later than all others."""
        self._streams.move_to_end(key)

    def forget(self, key: StreamKey, reason: str) -> None:
        """Keep a stream no longer; a client that asks for it is told the reason."""
        stream = self._streams.pop(key)
        self._gone[key] = reason
        if len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)
        self.count(-STREAM_BYTES)
        stream.lose()


class ResumableStream(Response):
    """A stream that goes on for a while after its client has left.

    As an answer it sends the events to the client that has asked for them, and lasts until the stream ends: what
    counts requests in flight counts it as long.
    """

    def __init__(self, streams: ResumableStreams, key: StreamKey, seconds: int, stream: EventStream) -> None:
        self.log = FrameLog(stream.frame, streams.count)
        self._streams = streams
        self._key = key
        self._seconds = seconds
        self._stream = stream
        self.num_attached = 0
        self._is_lost = False
        self._was_left = False
        self._producing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = request_context.current()
        self._stream.join(scope)
        producing = self._producing = asyncio.create_task(self._produce())
        try:
            await self.answer(0)(scope, receive, send)
            if not producing.done():
                context.error = None  # the client has left, the request goes on
                await asyncio.wait([producing])
            if self._was_left:
                context.error = Cancelled("the client left")
            elif self.log.error is not None:
                context.error = self.log.error
        finally:
            producing.cancel()
            await asyncio.wait([producing])
            self._note_end()
            if not producing.cancelled() and (error := producing.exception()) is not None:
                logger.error("a stream failed", exc_info=error)

    def answer(self, after: int) -> "AttachedStream":
        """Make the answer to one client: all events after a number."""
        return AttachedStream(self, self._stream, after)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Count a client while the block runs."""
        self.num_attached += 1
        if not self.log.is_ended:
            self._set_timer(None)
        try:
            yield
        finally:
            self.num_attached -= 1
            if not self.log.is_ended and not self.num_attached:
                if self._is_lost:
                    self._leave()
                else:
                    self._set_timer(self._seconds)

    def lose(self) -> None:
        """Keep no events, and end with the last client."""
        self._is_lost = True
        self._set_timer(None)
        self.log.drop()
        if not self.num_attached:
            self._leave()

    async def _produce(self) -> None:
        try:
            await self._stream.produce(self.log)
        except FunitelError as error:
            self.log.fail(error)
        except asyncio.CancelledError:
            self.log.fail(Cancelled("the stream was ended"))
            raise
        finally:
            self.log.fail(FunitelError("internal error"))  # unless it has ended

    def _note_end(self) -> None:
        self.log.fail(Cancelled("the stream was ended"))  # unless it has ended
        if not self._is_lost:
            self._streams.move_to_end(self._key)
            self._set_timer(self._seconds)

    def _set_timer(self, seconds: int | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        if self.log.is_ended:
            reason = f"it ended more than {self._seconds} seconds ago"
        else:
            reason = f"it had no client for {self._seconds} seconds"
        self._streams.forget(self._key, reason)

    def _leave(self) -> None:
        """End a stream that no client can have any more, if it runs."""
        if self._producing is not None and not self.log.is_ended:
            self._was_left = True
            self._producing.cancel()


class AttachedStream(EventStream):
    """The answer to one client of a stream that can be resumed."""

    def __init__(self, stream: ResumableStream, source: EventStream, after: int) -> None:
        super().__init__(
            source.producer,
            source.error_event,
            keep_alive=source.keep_alive,
            keep_alive_seconds=source.keep_alive_seconds,
        )
        self.raw_headers = source.raw_headers
        self._resumable = stream
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._resumable.attached():
            await super().__call__(scope, receive, send)

    async def send_events(self, writer: StreamWriter) -> None:
        """See EventStream."""
        await self._resumable.log.follow(writer, self._after)
        await writer.end(b"")
