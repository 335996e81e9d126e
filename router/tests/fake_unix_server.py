"""A server for tests on a Unix socket: it speaks as much of HTTP/1.1 as the router's client does."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(kw_only=True)
class FakeUnixServer:
    """Subclasses answer each connection."""

    path: Path
    _server: asyncio.Server | None = field(default=None, init=False)
    _writers: set[asyncio.StreamWriter] = field(default_factory=set, init=False)

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))

    async def stop(self) -> None:
        """End all connections, as a process that is killed does."""
        assert self._server is not None
        self._server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()
        self.path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self.answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection."""
        raise NotImplementedError


async def question(reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
    """Method, target and body of a request."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    method, target, _ = head.split("\r\n")[0].split(" ")
    [length] = [int(line.partition(":")[2]) for line in head.lower().split("\r\n") if "content-length" in line]
    return method, target, await reader.readexactly(length)


def head_of(status: int, length: int | None = None) -> bytes:
    """The head of an answer; one without a length comes in chunks."""
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{size}\r\n\r\n".encode()


def chunk_of(data: bytes) -> bytes:
    """A chunk of an answer."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"
