"""An HTTP server of pictures that behaves as each path says, and notes which requests it has got."""

import gzip
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MAX_SENT = 256 << 20  # bytes of an endless answer
MAX_SECONDS = 30.0  # of a slow one


@dataclass
class Host:
    """A running server: its port, what it serves, and what became of requests."""

    port: int
    files: dict[str, tuple[bytes, str]]  # path -> content and kind
    redirects: dict[str, str] = field(default_factory=dict)  # path -> URL
    paths: list[str] = field(default_factory=list)  # of the requests that came
    connections: int = 0  # also of those that were no requests
    sent: int = 0  # bytes of endless answers

    def url(self, path: str, host: str = "127.0.0.1", scheme: str = "http") -> str:
        """Address of a path."""
        return f"{scheme}://{host}:{self.port}{path}"


@lru_cache
def gzip_bomb() -> bytes:
    """A gigabyte of zeros, packed."""
    return gzip.compress(bytes(1 << 27), 9) * 8


@contextmanager
def hosting(files: dict[str, tuple[bytes, str]], address: str = "127.0.0.1", port: int = 0) -> Iterator[Host]:
    """Serve `files`, and by name /slow, /stalled, /endless, /gzip, /long-header, /short, /closed, /nonsense, /status/N.

    `redirects` of the host can be filled later on; /loop redirects to itself. The address "::" is every one of this
    machine, of both kinds.
    """
    server = _Server((address, port), _handler())
    host = server.host = Host(server.server_address[1], files)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield host
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    host: Host

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.host.connections += 1
        super().process_request(request, client_address)


def _handler() -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Answers by the path."""

        server: _Server

        def do_GET(self) -> None:
            host = self.server.host
            path = self.path.partition("?")[0]
            host.paths.append(self.path)
            try:
                if path in host.redirects or path == "/loop":
                    self._head(302, {"Location": host.redirects.get(path, "/loop"), "Content-Length": "0"})
                elif path in host.files:
                    content, kind = host.files[path]
                    self._head(200, {"Content-Type": kind, "Content-Length": str(len(content))})
                    self.wfile.write(content)
                elif path.startswith("/status/"):
                    self._head(int(path.rpartition("/")[2]), {"Content-Length": "0"})
                else:
                    self._misbehave(path, host)
            except OSError:  # the other side has hung up
                self.close_connection = True

        do_HEAD = do_POST = do_GET

        def _misbehave(self, path: str, host: Host) -> None:
            self.close_connection = True
            picture = {"Content-Type": "image/png"}
            match path:
                case "/slow":
                    self._head(200, picture | {"Content-Length": "1000000"})
                    for _ in range(int(MAX_SECONDS / 0.2)):
                        self.wfile.write(b"x")
                        self.wfile.flush()
                        time.sleep(0.2)
                case "/stalled":
                    time.sleep(MAX_SECONDS)
                case "/endless":
                    self._head(200, picture)
                    chunk = bytes(1 << 16)
                    while host.sent < MAX_SENT:
                        self.wfile.write(chunk)
                        host.sent += len(chunk)
                case "/gzip":
                    content = gzip_bomb()
                    self._head(200, picture | {"Content-Encoding": "gzip", "Content-Length": str(len(content))})
                    self.wfile.write(content)
                case "/long-header":
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
                    for _ in range(1000):
                        self.wfile.write(b"x" * (1 << 16))
                case "/short":
                    content, _ = next(iter(host.files.values()))
                    self._head(200, picture | {"Content-Length": str(10 * len(content))})
                    self.wfile.write(content)
                case "/nonsense":
                    self.wfile.write(b"\x00\xff nonsense\r\n\r\n" * 20)
                case "/closed":
                    pass
                case _:
                    self._head(404, {"Content-Length": "0"})

        def _head(self, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    return Handler
