"""Take connections over from the keeper: those that an earlier router has left with their requests, then new ones.

A request that an earlier router has begun to answer is answered anew from its journal, behind the bytes that its client
has. What was read and is not in the journal is refused, by 503.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, cast

import uvicorn
from uvicorn.server import ServerState

from funitel.proto.keeper.kernel import bytes_read, bytes_written, reset_on_close
from funitel.proto.keeper.messages import JournalledRequest
from funitel.router.core.journal import KEY
from funitel.router.transport.connection import HttpConnection
from funitel.router.transport.keeper_link import KeeperLink, KeptSocket
from funitel.router.transport.kept_connection import (
    ANSWER,
    BEGUN,
    INPUT_END,
    START,
    UNKEPT_ANSWER,
    Keeping,
    KeptConnection,
    LeftInput,
)

logger = logging.getLogger(__name__)

SEND_BUFFER_BYTES = 1 << 17  # of a connection; the kernel would keep megabytes for each client that does not read
YIELD_SECONDS = 1.0  # for answers that are not in the journal, before this router hands over
MAX_TRIES = 10  # routers in a row that may end soon while they answer a request: it may be what ends them
STEADY_SECONDS = 10.0  # that a router lives, so that its end counts for none of its requests; nor does a handover
TRIES = "tries"  # a fact of a request: how many routers have taken it over in a row
LOOK_SECONDS = 0.005


class Lost(Exception):
    """A connection cannot be taken over: nothing that is sent now would be right."""


class Takeover:
    """The connections of the keeper. Event loop only.

    Args:
        path: of the keeper's socket.
        generation: of the deployment: routers of the same one take over from one another.
    """

    def __init__(self, path: str, generation: int) -> None:
        self.on_refused: Callable[[], None] = lambda: None  # by the next keeper; to be set before `begin`
        self._path = path
        self._generation = generation
        self._left: list[KeptSocket] = []  # connections of an earlier router
        self._connect: Callable[..., Any] = lambda **_: None
        self._tls: dict[str, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._tried: list[tuple[int, int]] = []  # requests that were taken over, by connection and number

    def connect(self) -> None:
        """Greet the keeper; an earlier router ends. Raises OtherKeeper, or StartupError where there is no keeper."""
        self._link, self._left = KeeperLink.connect(self._path, self._generation)

    def close(self) -> None:
        """Leave the keeper."""
        self._link.close()

    @property
    def has_connections(self) -> bool:
        """Whether an earlier router has left some."""
        return bool(self._left)

    async def begin(
        self, config: uvicorn.Config, state: ServerState, app_state: dict[str, Any], handshake_seconds: float | None
    ) -> list[str]:
        """Answer what an earlier router has left, and take new connections.

        Returns the journals of requests that are rendered again: those with a whole answer in the journal are not.
        """
        self._connect = partial(
            cast(Any, config.http_protocol_class), config=config, server_state=state, app_state=app_state
        )
        self._tls = {} if config.ssl is None else {"ssl": config.ssl, "ssl_handshake_timeout": handshake_seconds}
        left, self._left = self._left, []
        num_requests = 0
        journals: list[str] = []
        for kept in left:
            count = await self._take_over(kept)
            num_requests += count
            facts = [request.facts for request in kept.requests[:count]]
            journals += [each[KEY] for each in facts if KEY in each and ANSWER not in each]
        if left:
            logger.info("took over connections=%d requests=%d", len(left), num_requests)
            asyncio.get_running_loop().call_later(STEADY_SECONDS, self._forget_tries)
        self._link.on_connection = self._take
        self._link.on_yield = lambda: self._start(self._hand_over())
        self._link.on_refused = self.on_refused
        self._link.watch(asyncio.get_running_loop())
        self._link.ready()
        return journals

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _take(self, kept: KeptSocket) -> None:
        """Serve a new connection."""
        self._start(self._serve(kept, KeptConnection(self._link, kept.id)))

    async def _serve(self, kept: KeptSocket, journal: KeptConnection) -> None:
        """Begin to serve a connection, unless it has ended meanwhile."""
        is_kept = not self._tls
        lost = partial(self._link.release, kept.id)
        make = partial(self._connect, **({"kept": journal} if is_kept else {"on_lost": lost}))
        try:
            kept.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            await asyncio.get_running_loop().connect_accepted_socket(make, kept.sock, **self._tls)
        except OSError:
            self._link.release(kept.id)

    async def _take_over(self, kept: KeptSocket) -> int:
        """Go on with a connection of an earlier router; returns how many requests it has."""
        try:
            if self._tls:
                raise Lost("its keys were those of the earlier router")
            journal, num_requests = journal_of(kept, self._link)
        except (Lost, OSError) as why:
            logger.warning("a connection ends, which cannot be taken over: %s", why)
            reset_on_close(kept.sock)
            kept.sock.close()
            self._link.release(kept.id)
            return 0
        self._count_tries(kept, num_requests)
        await self._serve(kept, journal)
        return num_requests

    def _count_tries(self, kept: KeptSocket, num_requests: int) -> None:
        """Note that another router answers these requests."""
        for request in kept.requests[:num_requests]:
            request.facts[TRIES] = request.facts.get(TRIES, 0) + 1
            self._link.put_facts(kept.id, request.number, {TRIES: request.facts[TRIES]})
            self._tried.append((kept.id, request.number))

    def _forget_tries(self) -> None:
        """Start the counts again: this router has lived for long, or hands over; no request has ended it."""
        tried, self._tried = self._tried, []
        for connection, number in tried:
            self._link.put_facts(connection, number, {TRIES: 0})

    async def _hand_over(self) -> NoReturn:
        """End this router, once what is not in the journal was answered: another one takes over."""
        logger.info("another router takes over")
        loop = asyncio.get_running_loop()
        end = loop.time() + YIELD_SECONDS
        while any(each.has_unkept for each in self._connections()) and loop.time() < end:  # noqa: ASYNC110 - rare
            await asyncio.sleep(LOOK_SECONDS)
        for connection in self._connections():
            connection.hand_over()
        self._forget_tries()
        logging.shutdown()
        os._exit(0)

    def _connections(self) -> list[HttpConnection]:
        state: ServerState = self._connect.keywords["server_state"]  # type: ignore[attr-defined]
        return cast(list[HttpConnection], list(state.connections))


def journal_of(kept: KeptSocket, keeper: Keeping) -> tuple[KeptConnection, int]:
    """The journal of a connection with what an earlier router has left, and the number of requests in it.

    Raises:
        Lost: its client has got bytes of an answer that is not in the journal.
        OSError: the kernel knows nothing of the connection.
    """
    written, settled = bytes_written(kept.sock), kept.settled
    kept.requests.sort(key=lambda request: request.number)  # those that had to wait were noted first
    requests, input_end = _answerable(kept.requests, settled.input_end)
    start = requests[0].facts.get(START, written) if requests else settled.written
    if requests and requests[0].facts.get(TRIES, 0) >= MAX_TRIES:
        raise Lost(f"{MAX_TRIES} routers in a row have ended soon after they had begun to answer it")
    skip = written - start
    if skip < 0 or (skip and not requests):
        raise Lost(f"{skip} bytes more than those of answers in the journal were written")
    num_lost = bytes_read(kept.sock) - input_end - len(kept.partial)
    left = LeftInput(b"".join(each.raw for each in requests), b"" if num_lost else kept.partial, num_lost > 0)
    known = {request.number: request.facts for request in requests}
    if requests:
        settled = settled._replace(number=requests[0].number - 1)
    return KeptConnection(keeper, kept.id, known, settled, start, skip, left), len(requests)


def _answerable(requests: list[JournalledRequest], input_end: int) -> tuple[list[JournalledRequest], int]:
    """The requests that can be answered anew, one behind the other, and where the input of the last one ends."""
    found: list[JournalledRequest] = []
    for request in requests:
        facts = request.facts
        is_unkept = UNKEPT_ANSWER in facts or (BEGUN in facts and KEY not in facts)
        if is_unkept or facts.get(INPUT_END) != input_end + len(request.raw):
            break
        found.append(request)
        input_end = facts[INPUT_END]
    return found, input_end
