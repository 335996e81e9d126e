"""A client of the control socket: HTTP/1.1 over a Unix socket, one connection for each question."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import httptools

from funitel.proto.errors import FunitelError, NotReady

PIECE_BYTES = 65_536
SILENCE_SECONDS = 30.0  # of an answer that does not end: the control plane sends something each 10 s
NO_ANSWER = "the control plane does not answer; it is starting, or has ended"


@dataclass(slots=True)
class ControlAnswer:
    """An answer of the control plane; header names are in lower case."""

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    cookies: list[bytes] = field(default_factory=list)  # values of Set-Cookie
    content: bytes = b""

    @property
    def error(self) -> str:
        """The line that says why it refused."""
        try:
            found = json.loads(self.content)
        except ValueError:
            found = None
        line = found.get("error") if isinstance(found, dict) else None
        return line if isinstance(line, str) else f"the control plane answered with status {self.status}"


class ControlSocket:
    """The control plane behind a Unix socket.

    Attributes:
        path: of the socket.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    async def ask(
        self, method: str, target: str, body: bytes = b"", headers: Mapping[str, str] = MappingProxyType({})
    ) -> ControlAnswer:
        """Ask one question, and wait for the whole answer however long it takes.

        Args:
            method: of HTTP.
            target: path and query, percent-encoded.
            body: JSON; none where it is empty.
            headers: more of the question, in ASCII.

        Raises:
            NotReady: the control plane does not answer.
        """
        async with self._asked(method, target, body, headers) as reading:
            pieces = [piece async for piece in reading.pieces()]
        answer = reading.answer
        answer.content = b"".join(pieces)
        return answer

    async def tell(
        self, target: str, content: dict[str, Any], headers: Mapping[str, str] = MappingProxyType({})
    ) -> ControlAnswer:
        """Post a JSON object; raises as `ask`."""
        return await self.ask("POST", target, json.dumps(content).encode(), headers)

    async def lines(self, target: str) -> AsyncGenerator[bytes]:
        """The lines of an answer that does not end, as they come, without the blank ones.

        Raises:
            NotReady: the control plane does not answer, refuses, or has ended.
        """
        async with self._asked("GET", target, b"", {}) as reading:
            rest: list[bytes] = []  # pieces of a line that has not ended
            async for piece in reading.pieces(SILENCE_SECONDS):
                if reading.answer.status != 200:
                    raise NotReady(f"the control plane refuses {target}: status {reading.answer.status}")
                first, *others = piece.split(b"\n")
                rest.append(first)
                for other in others:
                    line = b"".join(rest)
                    rest = [other]
                    if line.strip():
                        yield line

    @asynccontextmanager
    async def _asked(
        self, method: str, target: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator["_Reading"]:
        """Send a question; yields what reads the answer."""
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_unix_connection(self.path, limit=PIECE_BYTES)
            head = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode("ascii") + body)
            await writer.drain()
            yield _Reading(reader)
        except (OSError, TimeoutError, httptools.HttpParserError) as error:
            raise NotReady(f"{NO_ANSWER}: {error}") from error
        finally:
            if writer is not None:
                writer.close()


class _Reading:
    """Reads one answer; the parser calls the methods with `on_`."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.answer = ControlAnswer()
        self._reader = reader
        self._taken: list[bytes] = []
        self._is_complete = False
        self._parser = httptools.HttpResponseParser(self)

    async def pieces(self, silence_seconds: float | None = None) -> AsyncIterator[bytes]:
        """The body as it comes.

        Args:
            silence_seconds: without a byte, after which the control plane counts as gone; None for ever.

        Raises:
            NotReady: the connection ended before the answer did.
        """
        while not self._is_complete:
            async with asyncio.timeout(silence_seconds):
                data = await self._reader.read(PIECE_BYTES)
            if not data:
                if self.answer.status and not self._has_length:
                    return
                raise NotReady(NO_ANSWER)
            self._parser.feed_data(data)
            if self._taken:
                taken, self._taken = self._taken, []
                yield b"".join(taken)

    @property
    def _has_length(self) -> bool:
        return b"content-length" in self.answer.headers or b"transfer-encoding" in self.answer.headers

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        name = name.lower()
        if name == b"set-cookie":
            self.answer.cookies.append(value)
        else:
            self.answer.headers[name] = value

    def on_headers_complete(self) -> None:
        """Take the status."""
        self.answer.status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        """Take a piece of the body."""
        self._taken.append(piece)

    def on_message_complete(self) -> None:
        """Note the end."""
        self._is_complete = True


class LoadRefused(FunitelError):
    """The control plane refuses to load a model, with a status of its own, such as 507: it does not fit."""

    def __init__(self, answer: ControlAnswer) -> None:
        super().__init__(answer.error)
        self.http_status = answer.status  # type: ignore[misc]
        self.error_type = "does_not_fit" if answer.status == 507 else "not_loaded"  # type: ignore[misc]
