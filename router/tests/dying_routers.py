"""A process that forks routers, each of which serves a fake application on the connections of a keeper.

It reads lines: each starts another router, and it prints the process id. `python dying_routers.py KEEPER_PATH`.
"""

import asyncio
import gc
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Collection, Container, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from funitel.proto.errors import FunitelError, StartupError
from funitel.router.core.drain import Drain
from funitel.router.core.file_watch import Reloadable
from funitel.router.core.journal import RequestJournal
from funitel.router.settings import RouterSettings
from funitel.router.telemetry.metrics import Metrics
from funitel.router.transport import takeover
from funitel.router.transport.kept_answer import keep
from funitel.router.transport.server import Server
from funitel.router.transport.sse import EventStream, Put

EVENT_SECONDS = 0.005  # between two events
KEEP_ALIVE_SECONDS = 0.05
PAUSE_SECONDS = 0.12  # before every fortieth event, for a keep-alive
EVERY_DRAWN, EVERY_PAUSE, EVERY_BURST = 7, 40, 5
WHOLE_SECONDS = 0.2


class Models:
    """What is served, as far as the server needs it."""

    is_started = True

    def __init__(self) -> None:
        self.drain = Drain()
        self.metrics = Metrics()

    def replays_begun(self, journals: Collection[str]) -> None:
        pass

    def fail_all(self, error: FunitelError) -> None:
        pass


class ErrorEvent(BaseModel):
    error: str


def text_of(seed: int, number: int) -> bytes:
    """What an event says, of up to two thousand bytes."""
    made = random.Random(seed * 1000 + number)
    return made.randbytes(made.choice((1, 5, 40, 1000))).hex().encode()


def event(seed: int, number: int, drawn: int) -> bytes:
    """The frame of an event; `drawn` is a fact, or 0."""
    return b"data: %d %d %b\n\n" % (number, drawn, text_of(seed, number))


def _drawn() -> int:
    return random.SystemRandom().randrange(10**9)


def _stream(journal: RequestJournal, count: int) -> EventStream:
    seed, began = journal.draw("seed", _drawn), journal.draw("arrived", time.time)

    async def produce(put: Put) -> None:
        at = began
        for number in range(count):
            if number % EVERY_BURST == 0:
                at += EVENT_SECONDS * EVERY_BURST + (PAUSE_SECONDS if number % EVERY_PAUSE == EVERY_PAUSE - 5 else 0)
                if (seconds := at - time.time()) > 0:  # what was made before comes at once
                    await asyncio.sleep(seconds)
            drawn = journal.draw(f"drawn.{number}", _drawn) if number % EVERY_DRAWN == 0 else 0
            put(event(seed, number, drawn))

    return EventStream(
        produce,
        lambda error: ErrorEvent(error=error.message),
        done=True,
        headers={"x-seed": str(seed), "x-varies": "y" * (_drawn() % 50)},
        keep_alive_seconds=KEEP_ALIVE_SECONDS,
    )


async def stream(request: Request) -> EventStream:
    await request.body()
    return _stream(keep(request.scope), int(request.path_params["count"]))


async def whole(request: Request) -> Response:
    await request.body()
    journal = keep(request.scope)
    seed = journal.draw("seed", _drawn)
    await asyncio.sleep(max(0.0, journal.draw("arrived", time.time) + WHOLE_SECONDS - time.time()))
    content = random.Random(seed).randbytes(int(request.path_params["length"]))
    return Response(content, headers={"x-seed": str(seed), "x-varies": "y" * (_drawn() % 50)})


async def plain(request: Request) -> Response:
    return PlainTextResponse("plain")


class JournalledPaths(Container[str]):
    """The paths of streams and whole answers."""

    def __contains__(self, path: object) -> bool:
        return str(path).startswith(("/stream/", "/whole/"))


def build(fail: Callable[[FunitelError], None], reloadables: Sequence[Reloadable]) -> Starlette:
    """The application."""
    routes: list[Any] = [
        Route("/stream/{count}", stream, methods=["POST"]),
        Route("/whole/{length}", whole, methods=["POST"]),
        Route("/plain", plain),
    ]
    app = Starlette(routes=routes)
    app.state.models, app.state.journalled_paths = Models(), JournalledPaths()
    return app


def serve(path: str) -> None:
    """Serve until this process is killed, or another router takes over."""
    taking = takeover.Takeover(path, 1)
    server = Server(RouterSettings(), build, 1000, taking)
    taking.connect()
    server.run(sockets=[])


def main() -> None:
    """Fork a router for each line, which says how many routers in a row may end while they answer a request."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            takeover.MAX_TRIES = int(line)
            try:
                serve(sys.argv[1])
            except StartupError as error:  # the keeper has ended
                print(f"error: {error}", file=sys.stderr)
            os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
