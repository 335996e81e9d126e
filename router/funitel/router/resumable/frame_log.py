"""The events of one stream as numbered frames, which are kept, and sent to each client that follows the stream.

A client that follows from an earlier event reads the kept frames at its own speed first. From then on it gets each
frame as it is written, and its writer buffers what it does not read. Knows no HTTP. Event loop only.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pydantic import BaseModel

from funitel.proto.errors import FunitelError
from funitel.router.transport.sse_frames import Event
from funitel.router.transport.stream_writer import StreamWriter

FRAME_BYTES = 48  # that a kept frame takes beside its content
BATCH_BYTES = 1 << 14  # of kept frames, after which a client that reads them is waited for
_END = b"\n\n"  # of a frame


class FrameLog:
    """What a producer writes to, and clients follow.

    Attributes:
        num_frames: written so far.
        num_bytes: that the kept frames take.
        is_ended: no frame follows.
        error: that the stream ended with before its first event.
    """

    def __init__(self, frame: Callable[[BaseModel], bytes], on_size: Callable[[int], None]) -> None:
        """Make an empty log; `frame` makes the frame of a record, `on_size` is told of changes of `num_bytes`."""
        self.num_frames = self.num_bytes = 0
        self.is_ended = False
        self.error: FunitelError | None = None
        self._frame = frame
        self._on_size = on_size
        self._frames: list[bytes] = []
        self._is_kept = True
        self._num_behind = 0  # clients that read kept frames
        self._live: list[_Reader] = []  # clients that have all frames
        self._writers: list[StreamWriter] = []  # of all clients

    @property
    def is_started(self) -> bool:
        """Whether the answer to a client has begun."""
        return self.num_frames > 0 or any(writer.is_started for writer in self._writers)

    @property
    def num_events(self) -> int:
        """See EventWriter; each event is a frame."""
        return self.num_frames

    def flush(self) -> None:
        """Send what was written to all clients that read."""
        for writer in self._writers:
            writer.flush()

    def write(self, event: Event) -> None:
        """Number an event, or its frame, or frames, and send it to all clients."""
        data = event if isinstance(event, bytes) else self._frame(event)
        for content in _frames_of(data):
            self.num_frames += 1
            frame = b"id: %d\n%b" % (self.num_frames, content)
            if self._is_kept or self._num_behind:
                self._frames.append(frame)
                self._resize(len(frame) + FRAME_BYTES)
            for reader in self._live:
                reader.write(frame)

    async def end(self, data: bytes) -> None:
        """Write the last frame, if it is not empty, and end the log."""
        if data:
            self.write(data)
        self._finish()

    def fail(self, error: FunitelError) -> None:
        """End the log by an error; clients with an answer that has not begun get it."""
        if not self.is_ended:
            self.error = error
            self._finish()

    def drop(self) -> None:
        """Keep no frames; clients that read them get the rest first."""
        self._is_kept = False
        self._shrink()

    async def follow(self, writer: StreamWriter, after: int) -> None:
        """Send to a client all frames after a number, until the log ends.

        Args:
            writer: of the client.
            after: a number of at most `num_frames`; with less, the frames must be kept.

        Raises:
            FunitelError: the stream has failed before its first event.
            Exception: a frame could not be sent to this client; the end of its answer raises it, too.
        """
        with self._written_by(writer):
            await self._catch_up(writer, after)
            if not self.is_ended:
                reader = _Reader(writer)
                self._live.append(reader)
                try:
                    await reader.is_done
                finally:
                    self._live.remove(reader)
        if self.error is not None:
            raise self.error

    async def _catch_up(self, writer: StreamWriter, after: int) -> None:
        """Send kept frames until there are no more; there is no other turn of the event loop after the last look."""
        self._num_behind += 1
        try:
            while after < self.num_frames:
                num_bytes = 0
                while after < self.num_frames and num_bytes < BATCH_BYTES:
                    writer.write(self._frames[after])
                    num_bytes += len(self._frames[after])
                    after += 1
                await writer.drain()
                await asyncio.sleep(0)
        finally:
            self._num_behind -= 1
            self._shrink()

    @contextmanager
    def _written_by(self, writer: StreamWriter) -> Iterator[None]:
        self._writers.append(writer)
        try:
            yield
        finally:
            self._writers.remove(writer)

    def _finish(self) -> None:
        self.is_ended = True
        for reader in self._live:
            reader.finish()

    def _shrink(self) -> None:
        if not self._is_kept and not self._num_behind:
            self._frames.clear()
            self._resize(-self.num_bytes)

    def _resize(self, num_bytes: int) -> None:
        if num_bytes:
            self.num_bytes += num_bytes
            self._on_size(num_bytes)


class _Reader:
    """A client that gets each frame as it is written."""

    def __init__(self, writer: StreamWriter) -> None:
        self.is_done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writer = writer

    def write(self, frame: bytes) -> None:
        """Send a frame; once that fails, this client is done, and the end of its answer raises why."""
        if self._writer.has_failed:
            self.finish()
        else:
            self._writer.write(frame)

    def finish(self) -> None:
        """Note that no frame follows."""
        if not self.is_done.done():
            self.is_done.set_result(None)


def _frames_of(data: bytes) -> list[bytes]:
    """The frames in what was written at once; a frame ends with an empty line, and has no other one."""
    if data.find(_END) == len(data) - len(_END):
        return [data]
    return [part + _END for part in data.removesuffix(_END).split(_END)]
