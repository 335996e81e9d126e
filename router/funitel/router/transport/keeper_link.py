"""The router's link to the keeper: connections and journals come from it, and are handed to it. Event loop only.

What `put_request` and `put_facts` have returned from survives this process. A keeper that is lost costs nothing but
that: the router serves on, and gives everything to the next keeper. One of another version refuses it: then it has no
keeper any more.
"""

import asyncio
import json
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from funitel.proto.errors import OtherKeeper, StartupError
from funitel.proto.keeper.channel import Channel, ChannelLost
from funitel.proto.keeper.messages import JournalledRequest, Kind, Packet, RouterHello
from funitel.router.transport.kept_connection import NOTHING, Settled

logger = logging.getLogger(__name__)

STATE_SECONDS = 30.0  # until the keeper has given its state: an earlier router may have to end first
SEND_SECONDS = 1.0  # for a keeper that is busy
ANSWER_SECONDS = 5.0  # for the next keeper to answer
RETRY_SECONDS = 0.1  # between two attempts to reach the next keeper


@dataclass(slots=True, eq=False)
class KeptSocket:
    """A connection as the keeper gave it, with the journal of its requests, and the input of one that is not whole."""

    id: int
    listener: int  # its number among those of the keeper
    sock: socket.socket
    settled: Settled = NOTHING
    requests: list[JournalledRequest] = field(default_factory=list)
    partial: bytes = b""


@dataclass(slots=True)
class _Live:
    """A connection that is open, for a keeper that has to be told of it."""

    sock: socket.socket  # the transport closes it
    listener: int
    settled: bytes = b""
    requests: dict[int, JournalledRequest] = field(default_factory=dict)


class RefusedByKeeper(Exception):
    """The keeper does not serve this router; `version` is its own if that is why, else 0."""

    def __init__(self, refusal: Packet) -> None:
        self.version = refusal.number
        super().__init__(refusal.raw.decode())


class KeeperLink:
    """The channel to the keeper. `on_connection`, `on_yield` and `on_refused` are to be set before `watch`."""

    def __init__(self, path: str, generation: int, channel: Channel) -> None:
        self.on_connection: Callable[[KeptSocket], None] = lambda kept: None
        self.on_yield: Callable[[], None] = lambda: None
        self.on_refused: Callable[[], None] = lambda: None
        self._path = path
        self._generation = generation
        self._channel: Channel | None = channel
        self._loop: asyncio.AbstractEventLoop | None = None
        self._live: dict[int, _Live] = {}
        self._is_ready = False
        self._released: list[int] = []  # connections that have ended without a keeper
        self._finding: asyncio.Task[None] | None = None
        self._refusing: Channel | None = None  # open until the end, which the keeper waits for

    @classmethod
    def connect(cls, path: str, generation: int) -> tuple["KeeperLink", list[KeptSocket]]:
        """Greet the keeper; return the link, and the connections of an earlier router.

        Raises:
            OtherKeeper: the keeper is of another version.
            StartupError: there is no keeper, or it does not serve this router.
        """
        try:
            channel = Channel.to(path)
        except OSError as error:
            raise StartupError(f"the keeper at {path} cannot be reached: {error.strerror or error}") from error
        link = cls(path, generation, channel)
        try:
            channel.send(Packet(Kind.HELLO, raw=RouterHello(generation).encode()), SEND_SECONDS)
            return link, link._state(channel)
        except ChannelLost as error:
            link._abandon()
            raise StartupError(f"the keeper at {path} is lost: {error}") from error
        except RefusedByKeeper as error:
            link._abandon()
            kind = OtherKeeper if error.version else StartupError
            raise kind(f"the keeper at {path} refuses this router: {error}") from error

    def _abandon(self) -> None:
        for live in self._live.values():
            live.sock.close()
        self.close()

    def _state(self, channel: Channel) -> list[KeptSocket]:
        found: dict[int, KeptSocket] = {}
        while (packet := channel.receive_within(STATE_SECONDS)).kind is not Kind.END:
            match packet.kind:
                case Kind.CONNECTION:
                    if (kept := self._kept(packet)) is not None:
                        found[kept.id] = kept
                case Kind.REFUSED:
                    raise RefusedByKeeper(packet)
                case _ if packet.connection not in found:
                    pass
                case Kind.REQUEST:
                    found[packet.connection].requests.append(_request_of(packet))
                case Kind.FACTS if found[packet.connection].requests:
                    _add_facts(found[packet.connection].requests[-1], packet.raw)
                case Kind.PARTIAL:
                    found[packet.connection].partial = packet.raw
                case _:
                    pass
        for kept in found.values():
            self._live[kept.id].requests = {request.number: request for request in kept.requests}
        return list(found.values())

    def _kept(self, packet: Packet) -> KeptSocket | None:
        """The connection of a packet; None where this process has no descriptor left for it: the keeper ends it."""
        if not packet.fds:
            logger.error("no descriptor is left: a connection of the keeper is closed")
            self._send(Packet(Kind.RELEASE, packet.connection))
            return None
        sock = socket.socket(fileno=packet.fds[0])
        self._live[packet.connection] = _Live(sock, packet.number, packet.raw)
        return KeptSocket(packet.connection, packet.number, sock, Settled.decode(packet.raw))

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Receive from now on."""
        self._loop = loop
        if self._channel is not None:
            loop.add_reader(self._channel.sock.fileno(), self._receive)
        else:
            self._finding = loop.create_task(self._find())

    def _receive(self) -> None:
        try:
            while self._channel is not None and (packet := self._channel.receive()) is not None:
                if packet.kind is Kind.CONNECTION:
                    if (kept := self._kept(packet)) is not None:
                        self.on_connection(kept)
                elif packet.kind is Kind.YIELD:
                    self.on_yield()
        except ChannelLost as lost:
            self._lose(lost)

    # What the router tells ------------------------------------------------------------------------------------------

    def ready(self) -> None:
        """Take connections from now on."""
        self._is_ready = True
        self._send(Packet(Kind.READY))

    def put_request(self, connection: int, number: int, raw: bytes, facts: dict[str, Any]) -> None:
        """Hand over the bytes of a request that is whole, and facts of it."""
        live = self._live.get(connection)
        if live is not None:
            request = live.requests[number] = JournalledRequest(number, raw, facts.copy())
            self._send(Packet(Kind.REQUEST, connection, number, request.encode()))

    def put_facts(self, connection: int, number: int, facts: dict[str, Any]) -> None:
        """Hand over facts of a request."""
        live = self._live.get(connection)
        if live is not None and number in live.requests:
            live.requests[number].facts |= facts
            self._send(Packet(Kind.FACTS, connection, number, json.dumps(facts).encode()))

    def done(self, connection: int, number: int, settled: Settled) -> None:
        """Say that the answer of a request was given to the kernel."""
        live = self._live.get(connection)
        if live is not None:
            live.requests.pop(number, None)
            live.settled = settled.encode()
            self._send(Packet(Kind.DONE, connection, number, live.settled))

    def release(self, connection: int) -> None:
        """Say that a connection has ended."""
        live = self._live.pop(connection, None)
        if live is not None:
            self._send(Packet(Kind.RELEASE, connection))
            if self._channel is None:
                self._released.append(connection)

    def put_partial(self, connection: int, raw: bytes) -> None:
        """Hand over the bytes of a request that is not whole, before this router ends."""
        self._send(Packet(Kind.PARTIAL, connection, raw=raw))

    def _send(self, packet: Packet) -> None:
        if self._channel is None:
            return
        try:
            self._channel.send(packet, SEND_SECONDS)
        except ChannelLost as lost:
            self._lose(lost)

    # The end of a keeper --------------------------------------------------------------------------------------------

    def _lose(self, lost: ChannelLost) -> None:
        channel, self._channel = self._channel, None
        if channel is None:
            return
        logger.error("the keeper is lost, serving on without one until the next: %s", lost)
        if self._loop is not None:
            self._loop.remove_reader(channel.sock.fileno())
            self._receive_rest(channel)
            self._finding = self._loop.create_task(self._find())
        channel.close()

    def _receive_rest(self, channel: Channel) -> None:
        """Take the connections that the keeper had accepted and sent before it ended."""
        assert self._loop is not None, "it sends connections to routers that are ready"
        with suppress(ChannelLost):
            while (packet := channel.receive()) is not None:
                if packet.kind is Kind.CONNECTION and (kept := self._kept(packet)) is not None:
                    self._loop.call_soon(self.on_connection, kept)  # the caller may be in the middle of a request

    async def _find(self) -> None:
        """Give everything to the next keeper, unless it refuses this router."""
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            try:
                channel = Channel.to(self._path)
            except OSError:
                continue
            try:
                await self._greet(channel)
                self._feed(channel)
                return
            except RefusedByKeeper as refused:
                count, words = len(self._live), "which serves its connections to their end and keeps none of them"
                logger.error("the next keeper refuses this router, %s: %s connections=%d", words, refused, count)
                self._refusing = channel
                self.on_refused()
                return
            except ChannelLost:
                pass  # the next one is looked for
            finally:
                if channel not in (self._channel, self._refusing):
                    channel.close()

    async def _greet(self, channel: Channel) -> None:
        """Say that this router brings its connections, and wait until the keeper takes them."""
        channel.send(Packet(Kind.HELLO, raw=RouterHello(self._generation, feeds=True).encode()), SEND_SECONDS)
        end = time.monotonic() + ANSWER_SECONDS
        while (packet := channel.receive()) is None:
            if time.monotonic() > end:
                raise ChannelLost(f"it has not answered within {ANSWER_SECONDS:g} s")
            await asyncio.sleep(RETRY_SECONDS / 10)
        if packet.kind is Kind.REFUSED:
            raise RefusedByKeeper(packet)

    def _feed(self, channel: Channel) -> None:
        """Say all that is live, in one turn of the loop: what comes later goes to this keeper."""

        def say(packet: Packet) -> None:
            channel.send(packet, SEND_SECONDS)

        for connection in self._released:
            say(Packet(Kind.RELEASE, connection))
        for connection, live in self._live.items():
            if live.sock.fileno() < 0:
                continue  # its transport has closed it, and releases it next
            say(Packet(Kind.ADOPT, connection, live.listener, live.settled, (live.sock.fileno(),)))
            for number, request in live.requests.items():
                say(Packet(Kind.REQUEST, connection, number, request.encode()))
        say(Packet(Kind.FED))
        if self._is_ready:
            say(Packet(Kind.READY))
        assert self._loop is not None, "`watch` comes before the search for a keeper"
        self._released.clear()
        self._channel = channel
        self._loop.add_reader(channel.sock.fileno(), self._receive)
        logger.info("another keeper holds the connections: %d", len(self._live))

    def close(self) -> None:
        """Leave the keeper."""
        if self._finding is not None:
            self._finding.cancel()
        if self._refusing is not None:
            self._refusing.close()
        if self._channel is not None:
            if self._loop is not None:
                self._loop.remove_reader(self._channel.sock.fileno())
            self._channel.close()
            self._channel = None


def _request_of(packet: Packet) -> JournalledRequest:
    request = JournalledRequest.decode(packet.number, packet.raw)
    if not request.facts:
        _note_unreadable(request)
    return request


def _add_facts(request: JournalledRequest, raw: bytes) -> None:
    if not request.add(raw):
        _note_unreadable(request)


def _note_unreadable(request: JournalledRequest) -> None:
    """Log that a request has no facts, and is not answered anew."""
    logger.error("facts of request %d in the journal cannot be read: it is not taken over", request.number)
