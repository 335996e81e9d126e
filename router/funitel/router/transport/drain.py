"""The end of a router's service: what is under way may finish, what comes is refused, and every connection ends."""

from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from funitel.proto.errors import ShuttingDown

SHUTTING_DOWN = "it lets running requests finish and takes no others"


class Drain:
    """Requests under way, and whether others are let in."""

    def __init__(self) -> None:
        self.has_begun = False
        self.ends_connections = False
        self.num_running = 0

    def begin(self) -> None:
        """Let nobody in from now on."""
        self.has_begun = self.ends_connections = True

    def hand_over(self) -> None:
        """Let connections end with their next answer: clients find another router where they found this one."""
        self.ends_connections = True

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request while the block runs. Raises ShuttingDown where it came too late."""
        if self.has_begun:
            raise ShuttingDown(SHUTTING_DOWN)
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1


class DrainGate:
    """Around the routes that work: each of their requests is counted, or refused."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._drain.admitted():
            await self._app(scope, receive, send)


class LastAnswers:
    """Around the application: with an answer that is given while it drains or hands over, its connection ends."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if self._drain.ends_connections and message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, send_last if scope["type"] == "http" else send)
