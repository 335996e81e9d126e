"""HTTP client of the command-line tools: JSON answers, event streams, TLS, and errors of one line."""

import http.client
import json
import socket
import ssl
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import SplitResult, urlsplit

from funitel.launcher.settings import LauncherSettings
from funitel.launcher.terminal_ui.credentials import credential_for
from funitel.launcher.terminal_ui.terminal import one_line
from funitel.proto.errors import FunitelError, InvalidRequest, NotReady, SettingsError, Unauthorized
from funitel.proto.security.tls import Pair, client_context
from funitel.proto.settings.fields import require


def check_client_tls(settings: Any, *urls: str | None) -> None:
    """Raise SettingsError where the TLS settings of a client are incomplete, or no URL is https."""
    given = [flag for flag in ("tls_ca", "tls_cert", "tls_key") if getattr(settings, flag) is not None]
    is_https = any(url is not None and url.startswith("https://") for url in urls)
    flags = ", ".join(f"--{flag.replace('_', '-')}" for flag in given)
    require(
        is_https or not given, f"{flags} {'is' if len(given) == 1 else 'are'} for a --url that begins with https://"
    )
    require(
        (settings.tls_cert is None) == (settings.tls_key is None),
        f"--tls-cert and --tls-key need each other, given {settings.tls_cert or settings.tls_key} alone",
    )


def context_of(settings: Any) -> ssl.SSLContext | None:
    """The context for https servers from settings checked by `check_client_tls`; None means the system's default.

    Raises:
        SettingsError: a file is missing or invalid.
    """
    if settings.tls_ca is None and settings.tls_cert is None:
        return None
    pair = None if settings.tls_cert is None else Pair(settings.tls_cert, settings.tls_key)
    return client_context(settings.tls_ca, pair)


LOCAL_URL = f"http://127.0.0.1:{LauncherSettings().port}"
CONNECT_SECONDS = 5.0
READ_TIMEOUT_SECONDS = 600.0  # a server in a long prefill sends nothing

START_ADVICE = "start one by funitel serve MODEL, or name another by --url"

UNIX = "unix"
JSON = Any


class Api:
    """One server, with a connection for each request; closing a stream early cancels its request."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        context: ssl.SSLContext | None = None,
        *,
        takes_sockets: bool = False,
    ) -> None:
        """Make a client of one server.

        Args:
            url: `host:port` alone means HTTP.
            api_key: as the settings have it; `credential_for` decides whether this server gets it.
            context: for HTTPS.
            takes_sockets: whether `url` may be `unix:///path`, the control socket of a server.

        Raises:
            SettingsError: `url` is invalid.
        """
        self.url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        self._parts = _split(self.url, takes_sockets=takes_sockets)
        self._base = "" if self._parts.scheme == UNIX else self._parts.path
        self._context = context
        credential = credential_for(api_key, self.url)
        self._headers = {"Authorization": f"Bearer {credential.key}"} if credential.key else {}
        self._advice = credential.advice

    def get(self, path: str) -> JSON:
        """The answer to a GET.

        Raises:
            NotReady: no server answers, or it is starting.
            FunitelError: the server refused.
        """
        with self._request("GET", path, None) as response:
            return parsed(response.read())

    def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> JSON:
        """The answer to a request that may take minutes.

        Raises: as `get`.
        """
        with self._request(method, path, body, READ_TIMEOUT_SECONDS) as response:
            return parsed(response.read())

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[JSON, None, None]:
        """POST and yield the events of the answer; closing the generator closes the connection.

        Raises:
            FunitelError: the server refused, failed midway or closed the connection.
        """
        with self._request("POST", path, body, READ_TIMEOUT_SECONDS) as response:
            while line := response.readline():
                field, _, value = line.decode().rstrip("\r\n").partition(":")
                if field != "data" or not value:
                    continue
                if value.strip() == "[DONE]":
                    return
                event = parsed(value.encode())
                if isinstance(event, dict) and event.get("error"):
                    raise FunitelError(_message(event))
                yield event

    @contextmanager
    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, read_seconds: float = CONNECT_SECONDS
    ) -> Iterator[http.client.HTTPResponse]:
        """An answer with a status of success."""
        connection = self._connection()
        headers = self._headers | ({"Content-Type": "application/json"} if body is not None else {})
        content = None if body is None else json.dumps(body).encode()
        response = None
        try:
            connection.request(method, self._base + path, content, headers)
            if connection.sock is not None:
                connection.sock.settimeout(read_seconds)
            response = connection.getresponse()
            if not 200 <= response.status < 300:
                raise self._refusal(response, response.read())
            yield response
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            if response is not None:
                raise FunitelError(f"{self.url} closed the connection: {reason}") from error
            raise NotReady(f"no server answers at {self.url}: {reason}; {START_ADVICE}") from error
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self._parts.scheme == UNIX:
            return _UnixConnection(self._parts.path)
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=CONNECT_SECONDS, context=self._context)
        return http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS)

    def _refusal(self, response: http.client.HTTPResponse, content: bytes) -> FunitelError:
        """The server's error message, as the error class of its status; a redirect, which may lead away, is one."""
        status = response.status
        message = _message(parsed(content)) or f"{self.url} answers with status {status}"
        match status:
            case 401 | 403:
                return Unauthorized(f"{message}: {self._advice}")
            case _ if 300 <= status < 400:
                return FunitelError(f"{self.url} redirects to {response.headers['Location']!r}: give that as --url")
            case 503:
                return NotReady(message)
            case _ if 400 <= status < 500:
                return InvalidRequest(message)
            case _:
                return FunitelError(message)


class _UnixConnection(http.client.HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CONNECT_SECONDS)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _split(url: str, *, takes_sockets: bool) -> SplitResult:
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_right |= takes_sockets and parts.scheme == UNIX and not parts.netloc and len(parts.path) > 1
        is_right &= url.isprintable() and " " not in url
    except ValueError:
        is_right = False
    if not is_right:
        form = "http://host:port or unix:///path" if takes_sockets else "http://host:port"
        raise SettingsError(f"--url must be like {form}, given {url!r}")
    return parts


def parsed(content: bytes) -> JSON:
    """Content parsed as JSON, or None."""
    try:
        return json.loads(content)
    except ValueError:
        return None


def _message(content: JSON) -> str:
    """The text of an error in TGI's form or OpenAI's, in one line."""
    error = content.get("error") if isinstance(content, dict) else None
    text = error.get("message") if isinstance(error, dict) else error
    return one_line(text) if isinstance(text, str) else ""
