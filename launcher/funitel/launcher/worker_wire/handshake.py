"""Begin the connection of a worker: TLS, then `POST /v1/workers/join`, which both ends turn into a link.

HTTP/1.1 with `Upgrade`, as for WebSocket: a refusal is a status with one line, and proxies know how to pass it on.
"""

import asyncio
import json
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from funitel.launcher.worker_wire.link import MAX_LINE_BYTES, Link
from funitel.launcher.worker_wire.messages import Hello
from funitel.proto.errors import FunitelError, SettingsError
from funitel.proto.printable import printable
from funitel.proto.security.tls import MutualTls
from funitel.proto.settings.fields import require

PATH = "/v1/workers/join"
UPGRADE = "funitel-worker"
HANDSHAKE_SECONDS = 10.0
ALERT_SECONDS = 1.0
MAX_HEAD_BYTES = 16 << 10
MAX_BODY_BYTES = 1 << 20
_REASONS = {101: "Switching Protocols", 400: "Bad Request", 404: "Not Found", 409: "Conflict", 426: "Upgrade Required"}


class JoinRefused(FunitelError):
    """The other end does not want this connection; `is_tls` is whether a certificate is the reason."""

    def __init__(self, message: str, *, is_tls: bool = False) -> None:
        super().__init__(message)
        self.is_tls = is_tls


@dataclass(frozen=True, slots=True)
class Url:
    """Where the control plane listens for workers."""

    host: str
    port: int
    is_tls: bool

    @classmethod
    def parse(cls, text: str) -> "Url":
        """Parse https://HOST:PORT, or http://HOST:PORT without TLS; raises SettingsError, which names --join."""
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        is_bare = parts.path in ("", "/") and not (parts.query or parts.fragment or parts.username)
        is_valid = parts.scheme in ("http", "https") and parts.hostname and port and is_bare
        require(bool(is_valid), f"--join must be https://HOST:PORT, given {text!r}")
        assert parts.hostname is not None
        assert port is not None
        return cls(parts.hostname, port, parts.scheme == "https")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}"


# TLS ----------------------------------------------------------------------------------------------------------------


class _Connection(ssl.SSLObject):
    """One end of a connection, which keeps what TLS has to say of a handshake that fails: asyncio drops it."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError:
            assert isinstance(self.context, _KeepingAlerts)
            self.context.keep_alert()
            raise


class _KeepingAlerts(ssl.SSLContext):
    """A context for one connection; `alert` is what the other end is still to be sent of a failed handshake."""

    sslobject_class = _Connection
    alert = b""
    _outgoing: ssl.MemoryBIO | None = None

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *more: Any, **named: Any) -> ssl.SSLObject:
        self._outgoing = outgoing
        return super().wrap_bio(incoming, outgoing, *more, **named)

    def keep_alert(self) -> None:
        """Take what is not sent yet."""
        if self._outgoing is not None:
            self.alert = self._outgoing.read()


def server_side(tls: MutualTls) -> _KeepingAlerts:
    """The context of the control plane, made for each connection: replaced files count. Raises SettingsError."""
    return _context(tls, ssl.PROTOCOL_TLS_SERVER)


def client_side(tls: MutualTls) -> ssl.SSLContext:
    """The context of a worker; raises SettingsError."""
    return _context(tls, ssl.PROTOCOL_TLS_CLIENT)


def _context(tls: MutualTls, protocol: int) -> _KeepingAlerts:
    context = _KeepingAlerts(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    tls.pair.load_into(context)
    try:
        context.load_verify_locations(tls.ca)
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
        raise SettingsError(f"{tls.pair.flag}-ca {tls.ca} must be a PEM file of certificates: {reason}") from error
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def tls_reason(error: BaseException) -> str:
    """Why a handshake has failed, in a few words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid here: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or str(error)).replace("_", " ").lower()
        return "it shows no certificate" if "peer did not return" in reason else f"TLS failed: {reason}"
    if isinstance(error, TimeoutError):
        return f"no handshake within {HANDSHAKE_SECONDS:g} s"
    return "it ended the handshake; it may not know the authority of the certificate of this end"


# The worker's end ---------------------------------------------------------------------------------------------------


async def join(url: Url, tls: MutualTls | None, hello: Hello) -> tuple[Link, float]:
    """Connect to the control plane and be let in; with the link, the seconds after which silence is a loss.

    `hello.address` may be empty: the address of this end is filled in.

    Raises:
        JoinRefused: the control plane, or its certificate, is not right.
        OSError: it cannot be reached now.
    """
    context = client_side(tls) if tls is not None else None
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        try:
            reader, writer = await asyncio.open_connection(url.host, url.port, ssl=context, limit=MAX_LINE_BYTES)
        except ssl.SSLCertVerificationError as error:
            raise JoinRefused(
                f"the certificate of {url} is not valid here: {error.verify_message}", is_tls=True
            ) from error
        except ssl.SSLError as error:
            raise JoinRefused(f"no TLS with {url}: {_alert(error)}", is_tls=True) from error
        link = Link(reader, writer)
        if not hello.address:
            hello = hello.model_copy(update={"address": link.own_address})
        try:
            writer.write(_request(url, hello))
            status, answer = await _response(reader)
        except ssl.SSLError as error:
            link.close()
            raise JoinRefused(f"{url} refuses the certificate of this worker: {_alert(error)}", is_tls=True) from error
        except (OSError, EOFError) as error:
            link.close()
            raise OSError(0, "it closed the connection without an answer") from error
    if status != 101:
        link.close()
        raise JoinRefused(f"{url} refuses this worker: {answer.get('error') or f'status {status}'}")
    return link, float(answer["timeout"])


def _alert(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()


def _request(url: Url, hello: Hello) -> bytes:
    body = hello.model_dump_json().encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: {url.host}:{url.port}\r\nConnection: Upgrade\r\nUpgrade: {UPGRADE}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _response(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    first, headers = await _head(reader)
    words = first.split()
    if len(words) < 2 or not words[1].isdigit():
        raise EOFError
    if int(words[1]) == 101:
        return 101, {"timeout": headers.get("funitel-worker-timeout", "10")}
    try:
        answer = json.loads(await reader.readexactly(_length(headers)))
    except ValueError:
        answer = None
    return int(words[1]), answer if isinstance(answer, dict) else {}


# The control plane's end --------------------------------------------------------------------------------------------


class BadJoin(FunitelError):
    """What a worker has sent is no request to join, or not one that can be let in."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.http_status = status  # type: ignore[misc]


async def opened(connection: socket.socket, tls: MutualTls | None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Streams over a connection that was accepted, after the handshake of TLS.

    Raises:
        OSError, TimeoutError: the handshake has failed; see `tls_reason`.
        SettingsError: files of this end are not valid any more.
    """
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    context = None if tls is None else server_side(tls)
    with connection.dup() as spare:
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=context)
        except OSError:
            if context is not None and context.alert:
                await _send_alert(spare, context.alert)
            raise
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def _send_alert(connection: socket.socket, alert: bytes) -> None:
    """Send the last words of TLS, and read on until they have arrived: closing at once could overtake them."""
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        async with asyncio.timeout(ALERT_SECONDS):
            await loop.sock_sendall(connection, alert)
            connection.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(connection, MAX_HEAD_BYTES):
                pass


async def read_join(reader: asyncio.StreamReader) -> bytes:
    """The body of a request to join; raises BadJoin, EOFError, OSError or TimeoutError."""
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        first, headers = await _head(reader)
        if first.split()[:2] != ["POST", PATH]:
            raise BadJoin(f"this port takes POST {PATH} of workers only", 404)
        if headers.get("upgrade", "").lower() != UPGRADE:
            raise BadJoin(f"the request must have Upgrade: {UPGRADE}")
        length = _length(headers)
        if length > MAX_BODY_BYTES:
            raise BadJoin(f"the body must have at most {MAX_BODY_BYTES} bytes, given {length}")
        return await reader.readexactly(length)


def let_in(writer: asyncio.StreamWriter, timeout: float) -> None:
    """Tell a worker that it is connected; `timeout` is the seconds after which silence is a loss."""
    writer.write(
        f"HTTP/1.1 101 {_REASONS[101]}\r\nConnection: Upgrade\r\nUpgrade: {UPGRADE}\r\n"
        f"Funitel-Worker-Timeout: {timeout:g}\r\n\r\n".encode()
    )


async def refuse(writer: asyncio.StreamWriter, error: BadJoin) -> None:
    """Answer with the reason, and close the connection."""
    body = json.dumps({"error": error.message, "error_type": "worker_refused", "field": None}).encode()
    status = error.http_status
    writer.write(
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    await Link(asyncio.StreamReader(), writer).finish(HANDSHAKE_SECONDS)


async def _head(reader: asyncio.StreamReader) -> tuple[str, dict[str, str]]:
    """The first line, and the headers in lower case."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise BadJoin(f"the head must have at most {MAX_HEAD_BYTES} bytes") from None
    if len(head) > MAX_HEAD_BYTES:
        raise BadJoin(f"the head must have at most {MAX_HEAD_BYTES} bytes")
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    return printable(first), {name.strip().lower(): value.strip() for name, _, value in pairs}


def _length(headers: dict[str, str]) -> int:
    text = headers.get("content-length", "0")
    if not text.isdecimal() or len(text) > 12:
        raise BadJoin("Content-Length must be a number")
    return int(text)
