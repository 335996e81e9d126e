"""The events of a response as frames, to be streamed again from any number on. Event loop only."""

import asyncio
import zlib

from funitel.router.transport.sse import Put

_END = b"\n\n"  # of a frame, and nowhere within: JSON has no line breaks


class EventLog:
    """Frames in the order of their numbers, from 0; compressed once the response has ended."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._packed = b""
        self._has_ended = False
        self._changed = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        """Size of what is kept once the response has ended."""
        return len(self._packed)

    def add(self, frame: bytes) -> None:
        """Take the next frame."""
        self._frames.append(frame)
        self._wake()

    def end(self) -> None:
        """Take no more frames; a second time nothing changes."""
        if self._has_ended:
            return
        self._packed = zlib.compress(b"".join(self._frames), level=1)
        self._frames.clear()
        self._has_ended = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _now(self) -> list[bytes]:
        if not self._has_ended:
            return self._frames
        return [frame + _END for frame in zlib.decompress(self._packed).split(_END)[:-1]]

    async def follow(self, after: int, put: Put) -> None:
        """Send the frames with numbers above `after`, and those still to come; return when the response has ended."""
        place = after + 1
        while True:
            changed, frames = self._changed, self._now()
            for frame in frames[place:]:
                put(frame)
            place = max(place, len(frames))
            if self._has_ended:
                return
            await changed.wait()
