"""One connection that outlives its routers: each router dies at a chosen moment, and the next one takes over."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import uvicorn
from fakes import eventually
from sockets import Raw
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from funitel.proto.keeper.kernel import bytes_written
from funitel.proto.keeper.messages import JournalledRequest
from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics
from funitel.router.transport.connection import HttpConnection
from funitel.router.transport.connection_limits import Connections
from funitel.router.transport.keeper_link import KeptSocket
from funitel.router.transport.kept_connection import NOTHING, KeptConnection, Settled
from funitel.router.transport.stream_writer import DirectSend
from funitel.router.transport.takeover import journal_of

PATIENCE_SECONDS = 20.0
DATE = (b"date", b"Sat, 28 Nov 2026 12:00:00 GMT")


class KeptJournals:
    """Stands in for the keeper of one connection: what was put survives a router."""

    def __init__(self) -> None:
        self.requests: dict[int, JournalledRequest] = {}
        self.settled = NOTHING
        self.partial = b""
        self.is_released = self.loses_release = False
        self.num_seen = 0  # requests, ever
        self.on_put: Callable[[dict[str, Any]], None] = lambda facts: None

    def put_request(self, connection: int, number: int, raw: bytes, facts: dict[str, Any]) -> None:
        self.partial = b""
        self.num_seen += 1
        self.requests[number] = JournalledRequest(number, raw)
        self.put_facts(connection, number, facts)

    def put_facts(self, connection: int, number: int, facts: dict[str, Any]) -> None:
        self.requests[number].facts |= json.loads(json.dumps(facts))
        self.on_put(facts)

    def done(self, connection: int, number: int, settled: Settled) -> None:
        self.requests.pop(number, None)
        self.settled = Settled.decode(settled.encode())

    def release(self, connection: int) -> None:
        self.is_released = True

    def put_partial(self, connection: int, raw: bytes) -> None:
        self.partial = raw


class OneRouter:
    """What a router tells the keeper, as long as it lives."""

    def __init__(self, journals: KeptJournals, release: Callable[[], None]) -> None:
        self._journals: KeptJournals | None = journals
        self._release = release

    def __getattr__(self, name: str) -> Any:
        if self._journals is None:
            return lambda *_: None
        return getattr(self._journals, name)

    def release(self, connection: int) -> None:
        if self._journals is not None and not self._journals.loses_release:
            self._journals.release(connection)
            self._release()

    def die(self) -> None:
        self._journals = None


JOURNALLED_PATHS = frozenset({"/late"})


class KeptSockets:
    """A client's connection, and the router that has it for the time being."""

    def __init__(self, accepted: socket.socket, client: Raw, app: ASGIApp, settings: RouterSettings) -> None:
        self.client = client
        self.journals = KeptJournals()
        self.connection: HttpConnection | None = None
        self._accepted = accepted
        self._app = app
        self._settings = settings
        self._router: OneRouter | None = None

    async def start(self, app: ASGIApp | None = None) -> None:
        """Let a router take the connection; raises Lost where that cannot be."""
        self._router = OneRouter(self.journals, self._accepted.close)
        sock = self._accepted.dup()
        requests = [
            JournalledRequest(each.number, each.raw, dict(each.facts)) for each in self.journals.requests.values()
        ]
        kept = KeptSocket(1, 0, sock, self.journals.settled, requests, self.journals.partial)
        try:
            journal, _ = journal_of(kept, cast(Any, self._router))
        except Exception:
            sock.close()
            raise
        await self._connect(sock, journal, app or self._app)

    async def _connect(self, sock: socket.socket, journal: KeptConnection, app: ASGIApp) -> None:
        connections = Connections(10, self._settings, Metrics(), JOURNALLED_PATHS)
        config = uvicorn.Config(DirectSend(app), log_config=None, ws="none", lifespan="off")
        config.load()
        state = ServerState()
        state.default_headers = [DATE]

        def make() -> HttpConnection:
            self.connection = HttpConnection(
                connections, self._settings, journal, config=config, server_state=state, app_state={}
            )
            return self.connection

        await asyncio.get_running_loop().connect_accepted_socket(make, sock)

    async def die(self) -> None:
        """End the router at once: what its transport has not given to the kernel is lost."""
        assert self._router is not None
        assert self.connection is not None
        self._router.die()
        self.connection.transport.abort()
        await self._is_gone()

    async def hand_over(self) -> None:
        """End the router as SIGUSR2 does."""
        assert self.connection is not None
        self.connection.hand_over()
        await self.die()

    async def _is_gone(self) -> None:
        async def is_gone() -> bool:
            return self.connection is not None and self.connection not in self.connection.connections

        await eventually(is_gone, "the router's end of the connection is gone")

    async def restart(self, app: ASGIApp | None = None) -> None:
        """Let a router die, and the next one take over."""
        await self.die()
        await self.start(app)

    def num_written(self) -> int:
        """Bytes that the kernel was given."""
        return bytes_written(self._accepted)

    async def has_written(self, count: int) -> None:
        """Wait until the kernel was given so many bytes."""

        async def written() -> bool:
            return self.num_written() >= count

        await eventually(written, f"{count} bytes were written")


@asynccontextmanager
async def kept_sockets(
    app: ASGIApp, *, send_buffer: int = 1 << 17, receive_buffer: int | None = None, **settings: Any
) -> AsyncIterator[KeptSockets]:
    """A connection to the application, with its first router."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
            near = socket.socket()
            if receive_buffer is not None:
                near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            near.connect(listener.getsockname())
            near.setblocking(False)
            accepted, _ = listener.accept()
        accepted.setblocking(False)
        client = Raw(*await asyncio.open_connection(sock=near, limit=receive_buffer or 1 << 16))
        found = KeptSockets(accepted, client, app, RouterSettings(**settings))
        await found.start()
        try:
            yield found
        finally:
            client.close()
            if found.connection is not None:
                found.connection.transport.abort()
                await found._is_gone()
            accepted.close()
