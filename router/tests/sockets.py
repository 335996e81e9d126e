"""An application behind the router's own protocol on a real socket, and clients that do what they like with it."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import uvicorn
from fakes import eventually
from starlette.types import ASGIApp

from funitel.router.settings import MAX_TIMEOUT_SECONDS, RouterSettings
from funitel.router.telemetry.metrics import Metrics
from funitel.router.transport.connection import HttpConnection
from funitel.router.transport.connection_limits import Connections
from funitel.router.transport.stream_writer import DirectSend

PATIENCE_SECONDS = 10.0
SMALL = 4096  # bytes of a kernel's buffer, that one can be filled


@dataclass
class Raw:
    """One client's end of a connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> bytes:
        """All that comes until the server ends the connection, cleanly or not."""
        received = b""
        try:
            while data := await self.reader.read(1 << 16):
                received += data
        except ConnectionError:
            pass
        return received

    async def response(self) -> tuple[int, bytes]:
        """The next response with a length: its status and its body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return int(head.split()[1]), await self.reader.readexactly(length)

    def close(self) -> None:
        self.writer.transport.abort()


@dataclass
class Served:
    """A server that runs."""

    address: tuple[str, int]
    connections: Connections
    metrics: Metrics
    clients: list[Raw]

    async def connect(self, *, receive_buffer: int | None = None) -> Raw:
        """A client, which reads `receive_buffer` bytes ahead if so asked."""
        sock = socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self.address)
        self.clients.append(Raw(*await asyncio.open_connection(sock=sock, limit=receive_buffer or 1 << 16)))
        return self.clients[-1]

    def num_cut(self, reason: str) -> float:
        return self.metrics.registry.get_sample_value("funitel_cut_connections_total", {"reason": reason}) or 0.0

    async def is_empty(self) -> bool:
        return len(self.connections) == 0


@asynccontextmanager
async def served(app: ASGIApp, *, most: int = 100, **settings: Any) -> AsyncIterator[Served]:
    """Serve an application with these settings of the router."""
    metrics = Metrics()
    chosen = RouterSettings(**settings)
    connections = Connections(most, chosen, metrics)
    protocol = partial(HttpConnection, connections, chosen)
    config = uvicorn.Config(
        DirectSend(app),
        http=cast(type[HttpConnection], protocol),
        log_config=None,
        ws="none",
        lifespan="off",
        timeout_keep_alive=MAX_TIMEOUT_SECONDS,  # as the program has it
    )
    server = uvicorn.Server(config)

    async def is_started() -> bool:
        return server.started

    clients: list[Raw] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
            running = asyncio.create_task(server._serve([listener]))
            await eventually(is_started, "listening")
            try:
                yield Served(listener.getsockname()[:2], connections, metrics, clients)
            finally:
                for client in clients:
                    client.close()
                server.should_exit = True
                await running
