"""The server of the control socket, in the event loop of the launcher."""

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from funitel.proto.errors import StartupError

KEEP_ALIVE_SECONDS = 75
LAST_SECONDS = 2  # for requests in flight when it stops
START_SECONDS = 0.005  # between two looks whether it has started
BACKLOG = 256


class ControlServer:
    """HTTP over a Unix socket that only this user may use."""

    def __init__(self, app: Starlette, path: Path) -> None:
        self.path = path
        self._app = app
        config = uvicorn.Config(
            self._app,
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=LAST_SECONDS,
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Accept connections; a socket that another process has left is replaced.

        Raises:
            StartupError: the socket cannot be made.
        """
        listener = _listen(self.path)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started and not self._serving.done():  # noqa: ASYNC110 - it tells of nothing
            await asyncio.sleep(START_SECONDS)
        if self._serving.done():
            await self._serving

    async def stop(self) -> None:
        """Accept no more, end streams, let requests end for a short time."""
        if self._serving is None:
            return
        self._app.state.closing.set()
        self._server.should_exit = True
        await self._serving
        with suppress(OSError):
            self.path.unlink()


class _Server(uvicorn.Server):
    """A server that leaves signals to the launcher."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        os.chmod(path, 0o600)  # nothing connects before it listens
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartupError(f"the control socket {path} cannot be made: {error.strerror or error}") from error
    return listener
