"""`funitel-router`: serve HTTP in front of the model shards. With `print-schema`: print the OpenAPI document.

The port answers from the start: 503 until the shards are ready, and again once SIGTERM has come. What is under way then
may finish; a second SIGTERM ends it with an error, a second SIGINT cuts it off.
"""

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from math import inf
from types import FrameType
from typing import Any, cast

import typer
import uvicorn
from starlette.applications import Starlette

from funitel.proto.errors import FunitelError, ShuttingDown, StartupError
from funitel.proto.process import logs
from funitel.proto.process.parent import is_parent_ending, stop_with_parent
from funitel.proto.settings.fields import as_command, run_app
from funitel.proto.settings.listen_address import LOCAL_ONLY, is_local_by_default, listen_address
from funitel.proto.tracing.export import export
from funitel.router.api.routes import document
from funitel.router.app import build_app
from funitel.router.replica_set.replica_set import connect
from funitel.router.serving.service import Service
from funitel.router.settings import MOST_TIMEOUT_SECONDS, RouterSettings, is_guarded
from funitel.router.transport.connection import HttpConnection
from funitel.router.transport.connection_limits import Connections
from funitel.router.transport.fd_limit import allow_open_files, most_connections
from funitel.router.transport.sse import DirectSend
from funitel.router.transport.tls import Https

logger = logging.getLogger(__name__)

BACKLOG = 2048
SEND_BUFFER_BYTES = 1 << 17  # of a connection; the kernel would keep megabytes for each client that does not read
# What a token needs is freed by counting references. Python's collector of cycles, which is started by objects made and
# not yet freed, would go through all that belongs to the running streams several times a step: a fifth of the CPU time
# at 1000 streams. Requests do leave cycles behind, a few hundred objects each.
GARBAGE_THRESHOLDS = (50_000, 20, 20)
ORPHAN_SECONDS = 5  # without a parent nobody would end a drain that hangs
LAST_SECONDS = 5  # for errors to reach clients, once the time for answers is up
QUIET_SECONDS = 5.0  # after which nobody is expected to ask anything more on a connection that was open at a hand-over
TICK_SECONDS = 0.1
TIME_IS_UP = "the server has shut down before this answer was whole"


class Server(uvicorn.Server):
    """One uvicorn server that also stops when the router cannot start, or when its parent is gone."""

    def __init__(self, settings: RouterSettings, max_connections: int) -> None:
        https = Https.of(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        app = build_app(settings, connect, self.fail, [] if https is None else [https])
        self._service: Service = app.state.service
        self._most_seconds = inf  # of a drain
        self._is_told_to_stop = False
        self._hands_over = False
        self._ready_fd = settings.ready_fd
        self._handshake_seconds = settings.header_timeout_seconds
        connections = Connections(max_connections, settings, self._service.metrics)
        super().__init__(_uvicorn_config(app, partial(HttpConnection, connections, settings), https))
        self.failure: FunitelError | None = None
        self._parent = settings.exit_with_parent
        for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again after it has run: then no news
            signal.signal(number, self.handle_exit)
        signal.signal(signal.SIGUSR1, self.hand_over)
        stop_with_parent(self._parent)

    def fail(self, error: FunitelError) -> None:
        """Stop, remembering why."""
        self.failure = error
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop because of a signal; an orphan got it from the kernel, and has little time."""
        if self._is_told_to_stop and sig == signal.SIGTERM:
            self._most_seconds = 0.0
        elif is_parent_ending(self._parent):
            logger.warning("the process that started this one is gone: stopping")
            self._most_seconds = ORPHAN_SECONDS
        self._is_told_to_stop = True
        super().handle_exit(sig, frame)

    def hand_over(self, sig: int, frame: FrameType | None) -> None:
        """Take no more connections because another router does; what comes on those that are open is served."""
        self._hands_over = self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take connections; where another router still does, only once the shards are ready."""
        await super().startup([])
        while self._ready_fd is not None and not self._service.is_started:
            if await self.on_tick(0):
                return
            await asyncio.sleep(TICK_SECONDS)
        loop, config = asyncio.get_running_loop(), self.config
        # Before it has shaken hands a client is none of `Connections` yet.
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
        if self._ready_fd is not None:
            os.write(self._ready_fd, b"\n")

    async def main_loop(self) -> None:
        """Serve until a signal, then drain. The port still answers: that nothing new is let in."""
        await super().main_loop()
        if self._hands_over:
            await self._serve_what_is_open()
        if self.failure is None:
            await self._drain()

    async def _serve_what_is_open(self) -> None:
        """Serve connections that are open until they have ended, or nothing comes on them any more."""
        drain, busy = self._service.drain, time.monotonic()
        for server in self.servers:
            server.close()
        drain.hand_over()
        logger.info("handing over requests=%d connections=%d", drain.num_running, len(self.server_state.connections))
        while self.server_state.connections and not self._is_told_to_stop:
            now = time.monotonic()
            busy = now if drain.num_running else busy
            if now - busy > QUIET_SECONDS:
                return
            await self.on_tick(0)
            await asyncio.sleep(TICK_SECONDS)

    async def _drain(self) -> None:
        drain, began = self._service.drain, time.monotonic()
        drain.begin()
        logger.info("draining requests=%d", drain.num_running)
        while drain.num_running and not self.force_exit:
            late = time.monotonic() - began - self._most_seconds
            if late > LAST_SECONDS:
                break
            if late >= 0:  # again and again: requests that were on their way have only now come to wait
                self._service.fail_all(ShuttingDown(TIME_IS_UP))
                self.config.timeout_graceful_shutdown = LAST_SECONDS
            await self.on_tick(0)
            await asyncio.sleep(TICK_SECONDS)


def _uvicorn_config(app: Starlette, protocol: Callable[..., HttpConnection], https: Https | None) -> uvicorn.Config:
    return uvicorn.Config(
        DirectSend(app),
        loop="uvloop",
        http=cast(type[HttpConnection], protocol),  # uvicorn does no more than call it
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # nobody asks where a client is
        ssl_context_factory=None if https is None else lambda *_: https.context,
        timeout_keep_alive=MOST_TIMEOUT_SECONDS,  # the protocol has its own
        timeout_graceful_shutdown=None,  # whoever asks for the end decides how long running requests may take
    )


def bind(address: str, port: int) -> socket.socket:
    """Open the port.

    Raises:
        StartupError: it is taken, or not ours to open.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise StartupError(f"cannot listen on {address} port {port}: {os.strerror(error.errno or 0)}") from error


def _address(settings: RouterSettings) -> str:
    """Decide on the address to listen on, and say so if nobody asked for it."""
    asked = (settings.hostname, settings.default_hostname)
    if is_local_by_default(*asked, is_guarded=is_guarded(settings)):
        logger.info(LOCAL_ONLY)
    return listen_address(*asked, is_guarded=is_guarded(settings))


def collect_garbage_rarely() -> None:
    """Let the garbage collector leave alone what is imported by now, and seldom look at the rest."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)


def serve(settings: RouterSettings) -> None:
    """Run until a signal; raise StartupError when the router cannot start."""
    collect_garbage_rarely()
    with ExitStack() as stack:
        if settings.otlp_endpoint is not None:
            stack.callback(export(settings.otlp_endpoint, settings.otlp_service_name))
        ports = [settings.port, *([settings.prometheus_port] if settings.prometheus_port is not None else [])]
        if settings.listen_fd:
            listeners = [stack.enter_context(socket.socket(fileno=descriptor)) for descriptor in settings.listen_fd]
        else:
            address = _address(settings)
            listeners = [stack.enter_context(bind(address, port)) for port in ports]
        server = Server(settings, most_connections(settings.max_connections, allow_open_files()))
        for listener in listeners:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            logger.info("listening on %s port %d", *listener.getsockname()[:2])
        server.run(sockets=listeners)
    if server.failure is not None:
        raise server.failure


def _configure_logs(settings: RouterSettings) -> None:
    logs.configure("router", json_output=settings.json_output, level=settings.log_level)


def main() -> None:
    """Entry point of the console script."""
    if sys.argv[1:2] == ["print-schema"]:
        print(json.dumps(document(), indent=2))
        return
    app = typer.Typer(add_completion=False)
    app.command(epilog="`print-schema` as the first argument prints the OpenAPI document.")(
        as_command(RouterSettings, serve, program="router", set_up=_configure_logs)
    )
    run_app(app)


if __name__ == "__main__":
    main()
