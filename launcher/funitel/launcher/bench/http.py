"""HTTP client of the load generator, which records when each piece of an answer arrived.

Nothing is decoded while an answer arrives, since the load generator shares its machine with the server.
"""

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

from funitel.launcher.bench.figures import Failure
from funitel.launcher.terminal_ui.credentials import credential_for

CONNECT_SECONDS = 10.0


class RequestFailed(Exception):
    """A request without a complete answer."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(kind, " ".join(message.split()))


@dataclass(slots=True)
class HttpReply:
    """A complete answer: its pieces with their arrival times (`time.perf_counter`)."""

    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    ended: float = 0.0

    @property
    def body(self) -> bytes:
        """All pieces joined."""
        return b"".join(piece for _, piece in self.pieces)


class Endpoint:
    """A server's address; each request has its own connection, as those of unrelated clients do."""

    def __init__(self, url: str, api_key: str | None = None, context: ssl.SSLContext | None = None) -> None:
        """`url` has been checked by `settings`; `credential_for` decides on `api_key`; `context` is for HTTPS."""
        self.url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        parts = urlsplit(self.url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = (context or ssl.create_default_context()) if parts.scheme == "https" else None
        self._path = parts.path
        credential = credential_for(api_key, self.url)
        self.advice = credential.advice
        key = f"Authorization: Bearer {credential.key}\r\n" if credential.key else ""
        self._head = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\nConnection: close\r\n{key}"

    async def request(self, method: str, path: str, body: bytes, seconds: float) -> HttpReply:
        """Return the complete answer, of any status.

        Raises:
            RequestFailed: of kind `connect`, `cut`, `timeout` or `malformed`.
        """
        loop = asyncio.get_running_loop()
        reply = HttpReply()
        over: asyncio.Future[None] = loop.create_future()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                transport, _ = await loop.create_connection(
                    lambda: _Connection(reply, over), self._host, self._port, ssl=self._ssl
                )
        except TimeoutError as error:
            raise RequestFailed("connect", f"no connection to {self.url} within {CONNECT_SECONDS:g} s") from error
        except OSError as error:
            raise RequestFailed("connect", f"no server answers at {self.url}: {error}") from error
        try:
            head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
            transport.write(head.encode() + body)
            async with asyncio.timeout(seconds):
                await over
        except TimeoutError as error:
            raise RequestFailed("timeout", f"not answered within {seconds:g} s") from error
        finally:
            transport.abort()
        return reply


class _Connection(asyncio.Protocol):
    """Reads one answer into a `HttpReply`; `over` ends with it, or fails."""

    def __init__(self, reply: HttpReply, over: "asyncio.Future[None]") -> None:
        self._reply, self._over = reply, over
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._has_length = False

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(RequestFailed("malformed", f"the answer is not HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._now = time.perf_counter()
        # Without a length, the end of the connection ends the answer.
        if self._reply.status and not self._has_length and error is None:
            self.on_message_complete()
        after = f"after {len(self._reply.body)} bytes of the answer" if self._reply.status else "before it answered"
        self._end(RequestFailed("cut", f"the connection was closed {after}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_length |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._reply.pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._over.done():
            return
        self._reply.ended = self._now
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)
