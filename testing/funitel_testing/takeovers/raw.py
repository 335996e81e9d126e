"""A client of bytes: it sends requests as they are, keeps every byte that it gets, and checks the framing itself."""

import asyncio
import re
import time
from dataclasses import dataclass, field

_HEAD_END = b"\r\n\r\n"
READ_BYTES = 1 << 16
SLOW_BYTES, SLOW_SECONDS = 512, 0.02  # of a slow reader: so much at once, and a pause
SILENCE_SECONDS = 90.0  # without a byte: the answer hangs


class BrokenFraming(Exception):
    """The bytes of an answer are no HTTP."""


@dataclass
class RawAnswer:
    """One answer as it came; instants are on the monotonic clock."""

    head: bytes = b""
    chunks: list[bytes] = field(default_factory=list)  # or one, of a body with a length
    is_chunked: bool = False
    instants: list[float] = field(default_factory=list)  # of every arrival of bytes

    @property
    def body(self) -> bytes:
        """Without its framing."""
        return b"".join(self.chunks)

    @property
    def status(self) -> int:
        """Of HTTP."""
        return int(self.head.split(b" ", 2)[1])

    @property
    def silence(self) -> float:
        """The longest time between two arrivals, in seconds."""
        return max((b - a for a, b in zip(self.instants, self.instants[1:], strict=False)), default=0.0)


class RawConnection:
    """One connection, on which requests may be pipelined."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_slow: bool = False) -> None:
        self._reader = reader
        self._writer = writer
        self._is_slow = is_slow
        self._buffer = b""
        self._instants: list[float] = []

    @classmethod
    async def to(cls, port: int, *, is_slow: bool = False) -> "RawConnection":
        """Connect to a port of this machine; a slow reader has small buffers, too."""
        limit = 1 << 10 if is_slow else 1 << 16
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=limit)
        return cls(reader, writer, is_slow=is_slow)

    async def send(self, *requests: bytes) -> None:
        """Send requests, all at once."""
        self._writer.write(b"".join(requests))
        await self._writer.drain()

    async def answer(self) -> RawAnswer:
        """Read the next answer to its last byte.

        Raises:
            BrokenFraming: it is not HTTP, or the connection ends within it.
            TimeoutError: nothing comes for SILENCE_SECONDS.
        """
        found = RawAnswer(instants=self._instants)
        found.head = await self._until(_HEAD_END)
        length = re.search(rb"(?i)\r\ncontent-length: (\d+)\r\n", found.head)
        found.is_chunked = re.search(rb"(?i)\r\ntransfer-encoding: chunked\r\n", found.head) is not None
        if found.is_chunked:
            while chunk := await self._chunk():
                found.chunks.append(chunk)
        elif length is not None:
            found.chunks.append(await self._exactly(int(length[1])))
        else:
            found.chunks.append(await self._rest())
        self._instants = []
        return found

    async def close(self) -> None:
        """Close the connection."""
        self._writer.close()
        await asyncio.gather(self._writer.wait_closed(), return_exceptions=True)

    async def has_ended(self, seconds: float = 10.0) -> bool:
        """Whether the server ends the connection, without a further byte, within some seconds."""
        try:
            async with asyncio.timeout(seconds):
                return not self._buffer and not await self._reader.read(1)
        except TimeoutError:
            return False

    async def _chunk(self) -> bytes:
        line = await self._until(b"\r\n")
        if re.fullmatch(rb"[0-9a-f]+\r\n", line) is None:
            raise BrokenFraming(f"a chunk begins with {line[:80]!r}")
        data = await self._exactly(int(line, 16) + 2)
        if not data.endswith(b"\r\n"):
            raise BrokenFraming(f"a chunk ends with {data[-2:]!r}")
        return data[:-2]

    async def _until(self, end: bytes) -> bytes:
        while end not in self._buffer:
            if not await self._read():
                raise BrokenFraming(f"the connection ended behind {self._buffer[-80:]!r}")
        found, _, self._buffer = self._buffer.partition(end)
        return found + end

    async def _exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            if not await self._read():
                raise BrokenFraming(f"the connection ended {count - len(self._buffer)} bytes early")
        found, self._buffer = self._buffer[:count], self._buffer[count:]
        return found

    async def _rest(self) -> bytes:
        while await self._read():
            pass
        found, self._buffer = self._buffer, b""
        return found

    async def _read(self) -> bool:
        if self._is_slow:
            await asyncio.sleep(SLOW_SECONDS)
        async with asyncio.timeout(SILENCE_SECONDS):
            data = await self._reader.read(SLOW_BYTES if self._is_slow else READ_BYTES)
        self._instants.append(time.monotonic())
        self._buffer += data
        return bool(data)
