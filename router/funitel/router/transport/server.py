"""The HTTP server as a process: it opens the port, takes signals, drains on SIGTERM and hands over on SIGUSR1.

The port answers from the start: 503 until the shards are ready, and again once SIGTERM has come and `--shutdown-delay`
has passed. Requests in flight may finish then; a second SIGTERM ends them with an error, a second SIGINT closes their
connections.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from math import inf
from types import FrameType
from typing import Any, Protocol, cast

import uvicorn
from starlette.applications import Starlette

from funitel.proto.errors import FunitelError, ShuttingDown, StartupError
from funitel.proto.process.deployment_file import end_with_launcher, is_launcher_gone
from funitel.router.core.drain import Drain
from funitel.router.core.file_watch import Reloadable
from funitel.router.settings import MAX_TIMEOUT_SECONDS, RouterSettings
from funitel.router.telemetry.metrics import Metrics
from funitel.router.transport.connection import HttpConnection
from funitel.router.transport.connection_limits import Connections
from funitel.router.transport.stream_writer import DirectSend
from funitel.router.transport.takeover import Takeover
from funitel.router.transport.tls import Https

logger = logging.getLogger(__name__)

BACKLOG = 2048
ORPHAN_SECONDS = 5  # of a drain without a parent: no other process would end one that hangs
LAST_SECONDS = 5  # for errors to reach clients, once the drain has timed out
IDLE_SECONDS = 5.0  # without a request, after which connections that were open at a hand-over are closed
TICK_SECONDS = 0.1
START_SECONDS = 0.01  # between two looks whether the shards are ready
TIME_IS_UP = "the server has shut down before this answer was whole"


class Served(Protocol):
    """What is served behind the port, as far as the server needs it."""

    @property
    def drain(self) -> Drain:
        """The drain of all requests."""

    @property
    def metrics(self) -> Metrics:
        """Those of the router."""

    @property
    def is_started(self) -> bool:
        """Whether the shards are ready."""

    def replays_begun(self, journals: Collection[str]) -> None:
        """Requests of these journals, of an earlier router, are answered anew from now on."""

    def fail_all(self, error: FunitelError) -> None:
        """End every request that runs or waits; clients get the error."""


# Makes the application, with the models in its state: calls the first on a failed start, reloads the second.
Build = Callable[[Callable[[FunitelError], None], Sequence[Reloadable]], Starlette]


class Server(uvicorn.Server):
    """One uvicorn server that also stops when the router cannot start, or when its parent is gone."""

    def __init__(
        self, settings: RouterSettings, build: Build, max_connections: int, keeper: Takeover | None = None
    ) -> None:
        """Prepare the server; `keeper` gives it connections, in place of listening sockets."""
        https = Https.of(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        app = build(self.fail, [] if https is None else [https])
        self._service: Served = app.state.models
        self._shutdown_delay_seconds = settings.shutdown_delay
        self._drain_timeout_seconds = inf
        self._is_told_to_stop = False
        self._hands_over = False
        self.is_refused = False  # by a keeper of another version, which has come meanwhile
        self._ready_fd = settings.ready_fd
        self._accepts_early = settings.accepts_early
        self._telling: asyncio.Task[None] | None = None
        self._handshake_seconds = settings.header_timeout_seconds
        connections = Connections(max_connections, settings, self._service.metrics, app.state.journalled_paths)
        protocol = partial(HttpConnection, connections, settings)
        super().__init__(uvicorn_config(app, protocol, https))
        self._takeover = keeper
        if keeper is not None:
            keeper.on_refused = self.finish
        self.failure: FunitelError | None = None
        self._launcher = (settings.exit_with_parent, settings.deployment_file)
        for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again after it has run
            signal.signal(number, self.handle_exit)
        signal.signal(signal.SIGUSR1, self.hand_over)
        end_with_launcher(*self._launcher)

    def fail(self, error: FunitelError) -> None:
        """Stop, remembering why."""
        self.failure = error
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop because of a signal; a process without a parent got it from the kernel, and drains for a short time."""
        if self._is_told_to_stop and sig == signal.SIGTERM:
            self._drain_timeout_seconds = 0.0
        elif is_launcher_gone(*self._launcher):
            logger.warning("the process that started this one is gone: stopping")
            self._drain_timeout_seconds = ORPHAN_SECONDS
        self._is_told_to_stop = True
        super().handle_exit(sig, frame)

    def hand_over(self, sig: int, frame: FrameType | None) -> None:
        """Take no more connections because another router does; requests on open connections are served."""
        self._hands_over = self.should_exit = True

    def finish(self) -> None:
        """Serve open connections to their end: the next keeper gives this router no others."""
        self.is_refused = self._hands_over = self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections; where another router still does, only once the shards are ready."""
        await super().startup([])
        has_others = self._ready_fd is not None and not self._accepts_early
        takes_over = self._takeover is not None and self._takeover.has_connections
        while (has_others or takes_over) and not self._service.is_started:
            if await self.on_tick(0):
                return
            await asyncio.sleep(START_SECONDS)
        loop, config = asyncio.get_running_loop(), self.config
        # `Connections` does not count a client before its TLS handshake is complete.
        handshake_seconds = None if config.ssl is None else self._handshake_seconds
        for listener in sockets or []:
            protocol: Callable[[], asyncio.Protocol] = partial(
                cast(Any, config.http_protocol_class),
                config=config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
            )
            self.servers.append(
                await loop.create_server(
                    protocol,
                    sock=listener,
                    ssl=config.ssl,
                    backlog=config.backlog,
                    ssl_handshake_timeout=handshake_seconds,
                )
            )
        if self._takeover is not None:
            if await self.on_tick(0):  # it makes the header `date`, of answers that go on too
                return
            journals = await self._takeover.begin(config, self.server_state, self.lifespan.state, handshake_seconds)
            self._service.replays_begun(journals)
        if self._ready_fd is not None:
            self._telling = asyncio.create_task(self._tell_once_started(self._ready_fd))

    async def _tell_once_started(self, descriptor: int) -> None:
        while not self._service.is_started:  # noqa: ASYNC110 - it tells of nothing
            await asyncio.sleep(START_SECONDS)
        os.write(descriptor, b"\n")

    async def main_loop(self) -> None:
        """Serve until a signal, then drain: the port still answers, incoming requests are refused."""
        await super().main_loop()
        if self._hands_over:
            await self._serve_open_connections()
        elif self.failure is None and self._service.is_started:
            await self._serve_unready()
        if self.failure is None:
            await self._drain()

    async def _serve_open_connections(self) -> None:
        """Serve open connections until they have ended, or are idle."""
        drain, last_busy = self._service.drain, time.monotonic()
        for server in self.servers:
            server.close()
        drain.hand_over()
        logger.info("handing over requests=%d connections=%d", drain.num_running, len(self.server_state.connections))
        while self.server_state.connections and not self._is_told_to_stop:
            now = time.monotonic()
            last_busy = now if drain.num_running else last_busy
            if now - last_busy > IDLE_SECONDS:
                return
            await self.on_tick(0)
            await asyncio.sleep(TICK_SECONDS)

    async def _serve_unready(self) -> None:
        """Serve on for the shutdown delay, in which balancers and clients find out; a second signal ends it."""
        end = time.monotonic() + self._shutdown_delay_seconds
        if self._shutdown_delay_seconds:
            self._service.drain.announce()
            logger.info("not ready: requests are taken for %g s yet", self._shutdown_delay_seconds)
        while time.monotonic() < end and self._drain_timeout_seconds == inf and not self.force_exit:
            await self.on_tick(0)
            await asyncio.sleep(TICK_SECONDS)

    async def _drain(self) -> None:
        drain, began = self._service.drain, time.monotonic()
        drain.begin()
        logger.info("draining requests=%d", drain.num_running)
        while drain.num_running and not self.force_exit:
            late = time.monotonic() - began - self._drain_timeout_seconds
            if late > LAST_SECONDS:
                break
            if late >= 0:  # in each turn: requests that were being read have been queued since
                self._service.fail_all(ShuttingDown(TIME_IS_UP))
                self.config.timeout_graceful_shutdown = LAST_SECONDS
            await self.on_tick(0)
            await asyncio.sleep(TICK_SECONDS)


def uvicorn_config(app: Starlette, protocol: Callable[..., HttpConnection], https: Https | None) -> uvicorn.Config:
    return uvicorn.Config(
        DirectSend(app),
        loop="uvloop",
        http=cast(type[HttpConnection], protocol),  # uvicorn does no more than call it
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # a client's address is not used
        ssl_context_factory=None if https is None else lambda *_: https.context,
        timeout_keep_alive=MAX_TIMEOUT_SECONDS,  # the connection has its own
        timeout_graceful_shutdown=None,  # the sender of the signal decides how long running requests may take
    )


def bind(address: str, port: int) -> socket.socket:
    """Open the port.

    Raises:
        StartupError: it is taken, or this process may not open it.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise StartupError(f"cannot listen on {address} port {port}: {os.strerror(error.errno or 0)}") from error
