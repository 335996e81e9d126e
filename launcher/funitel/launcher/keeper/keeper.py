"""The keeper holds duplicates of the listening sockets and of every accepted connection, and the journal of requests.

It accepts connections and passes them to the newest generation of routers that is ready. When a router ends, the next
one of its generation gets its connections with their journals. One thread, one loop; it reads no HTTP.
"""

import errno
import logging
import os
import selectors
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from funitel.proto.keeper.channel import Channel, ChannelLost
from funitel.proto.keeper.messages import VERSION, Hello, Kind, Packet

logger = logging.getLogger(__name__)

YIELD_SECONDS = 10.0  # for a router to end once it was told to; one that hangs is killed
FULL_SECONDS = 0.1  # without accepting, where no descriptor is left
TICK_SECONDS = 0.5
MAX_ACCEPTED = 64  # connections in a turn
_RESET = struct.pack("ii", 1, 0)  # struct linger: closing sends a reset


@dataclass(slots=True)
class KeptRequest:
    """A request in the journal, as packets that say it again."""

    raw: bytes
    facts: list[bytes] = field(default_factory=list)  # JSON objects; later ones add to earlier ones


@dataclass(slots=True, eq=False)
class KeptConnection:
    """A connection, and what is known of its requests."""

    id: int
    sock: socket.socket
    listener: int
    generation: int
    requests: dict[int, KeptRequest] = field(default_factory=dict)  # by number, in order
    partial: bytes = b""
    settled: bytes = b""  # how far the last router was with it, as it says
    alone_since: float | None = None  # since no router has it; an instant of the monotonic clock


@dataclass(slots=True, eq=False)
class RouterChannel:
    """The channel to one router, and what waits to be sent to it."""

    channel: Channel
    pid: int
    generation: int | None = None  # before it has said
    is_ready: bool = False
    is_waiting: bool = False  # for another one of its generation to end
    told_to_yield: float | None = None
    waiting: deque[Packet] = field(default_factory=deque)


class Keeper:
    """The state of the keeper, and its loop.

    Args:
        listeners: sockets that listen for clients.
        control: the socket that listens for routers.
        adopt_seconds: how long a connection waits for another router.
    """

    def __init__(self, listeners: Sequence[socket.socket], control: socket.socket, adopt_seconds: float) -> None:
        self._listeners = list(listeners)
        self._adopt_seconds = adopt_seconds
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, KeptConnection] = {}
        self._routers: list[RouterChannel] = []
        self._next_id = 1
        self._accepts = False
        self._full_until = 0.0
        self._said_full = False
        self._is_over = False
        for listener in self._listeners:
            listener.setblocking(False)
        self._control = control
        self._selector.register(control, selectors.EVENT_READ, self._meet)

    def stop(self) -> None:
        """End the loop after this turn."""
        self._is_over = True

    def run(self) -> None:
        """Serve until `stop`."""
        while not self._is_over:
            self.turn(TICK_SECONDS)

    def turn(self, seconds: float) -> None:
        """Wait so long for something to do, and do it."""
        for key, events in self._selector.select(seconds):
            act: Callable[[int], None] = key.data
            act(events)
        self._tick(time.monotonic())
        self._watch_listeners()

    # Clients --------------------------------------------------------------------------------------------------------

    def _accepting(self) -> RouterChannel | None:
        """The router that gets new connections."""
        ready = [router for router in self._routers if router.is_ready]
        return max(ready, key=lambda router: router.generation or 0, default=None)

    def _watch_listeners(self) -> None:
        """Accept connections while a router takes them; else they wait in the backlog."""
        router = self._accepting()
        accepts = router is not None and not router.waiting and time.monotonic() >= self._full_until
        if accepts == self._accepts:
            return
        self._accepts = accepts
        for number, listener in enumerate(self._listeners):
            if accepts:
                self._selector.register(listener, selectors.EVENT_READ, lambda _, number=number: self._accept(number))
            else:
                self._selector.unregister(listener)

    def _accept(self, number: int) -> None:
        for _ in range(MAX_ACCEPTED):
            router = self._accepting()
            if router is None or router.waiting:
                return
            try:
                sock, _ = self._listeners[number].accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._note_full(error)
                return
            sock.setblocking(False)
            self._take(KeptConnection(self._next_id, sock, number, router.generation or 0), router)
            self._next_id += 1

    def _note_full(self, error: OSError) -> None:
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
            return  # the client has left
        self._full_until = time.monotonic() + FULL_SECONDS
        if not self._said_full:
            self._said_full = True
            count = len(self._connections)
            logger.error("no connection can be accepted beside %d that are open: %s", count, os.strerror(error.errno))

    def _take(self, kept: KeptConnection, router: RouterChannel) -> None:
        self._connections[kept.id] = kept
        self._send(router, self._introduction(kept))

    def _introduction(self, kept: KeptConnection) -> Packet:
        return Packet(Kind.CONNECTION, kept.id, kept.listener, kept.settled, (kept.sock.fileno(),))

    # Routers --------------------------------------------------------------------------------------------------------

    def _meet(self, _: int) -> None:
        """Accept a router."""
        try:
            sock, _address = self._control.accept()
        except OSError as error:
            self._note_full(error)
            return
        channel = Channel(sock)
        pid, uid = channel.peer
        if uid not in (os.getuid(), 0):
            logger.error("process %d of user %d is no router of this deployment: its connection is closed", pid, uid)
            channel.close()
            return
        router = RouterChannel(channel, pid)
        self._routers.append(router)
        self._selector.register(channel.sock, selectors.EVENT_READ, lambda events: self._serve(router, events))

    def _serve(self, router: RouterChannel, events: int) -> None:
        """Receive what a router sends, and send it what waits."""
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(router)
            while (packet := router.channel.receive()) is not None:
                try:
                    self._handle(router, packet)
                finally:
                    if packet.kind is not Kind.ADOPT:
                        for descriptor in packet.fds:
                            os.close(descriptor)
        except ChannelLost:
            self._lose(router)

    def _handle(self, router: RouterChannel, packet: Packet) -> None:
        kept = self._connections.get(packet.connection)
        match packet.kind:
            case Kind.HELLO:
                self._greet(router, packet)
            case Kind.READY:
                router.is_ready = True
            case Kind.ADOPT:
                self._adopt(router, packet)
            case Kind.REQUEST if kept is not None:
                kept.partial = b""
                kept.requests[packet.number] = KeptRequest(packet.raw)
            case Kind.FACTS if kept is not None and packet.number in kept.requests:
                kept.requests[packet.number].facts.append(packet.raw)
            case Kind.DONE if kept is not None:
                kept.requests.pop(packet.number, None)
                kept.settled = packet.raw
            case Kind.PARTIAL if kept is not None:
                kept.partial = packet.raw
            case Kind.RELEASE if kept is not None:
                self._forget(kept)
            case _:
                pass  # of a connection that has ended

    def _greet(self, router: RouterChannel, packet: Packet) -> None:
        """Give a router the connections of its generation, once an earlier one has let go of them."""
        try:
            hello = Hello.decode(packet.raw)
            problem = "" if hello.version == VERSION else f"it speaks version {VERSION}, not {hello.version}"
        except ValueError:
            problem = f"it speaks version {VERSION}, and was greeted otherwise"
        if problem:
            logger.error("a router of another version, process %d, is refused: %s", router.pid, problem)
            self._send(router, Packet(Kind.REFUSED, raw=problem.encode()))
            return
        others = [each for each in self._routers if each.generation == hello.generation and each is not router]
        router.generation = hello.generation
        router.is_waiting = bool(others)
        for other in others:
            if other.told_to_yield is None and not other.is_waiting:
                other.told_to_yield, other.is_ready = time.monotonic(), False
                self._send(other, Packet(Kind.YIELD))
        if not others:
            self._hand_over(router)

    def _hand_over(self, router: RouterChannel) -> None:
        """Give a router all connections of its generation, with their journals."""
        router.is_waiting = False
        for kept in [kept for kept in self._connections.values() if kept.generation == router.generation]:
            kept.alone_since = None
            self._send(router, self._introduction(kept))
            for number, request in kept.requests.items():
                self._send(router, Packet(Kind.REQUEST, kept.id, number, request.raw))
                for facts in request.facts:
                    self._send(router, Packet(Kind.FACTS, kept.id, number, facts))
            if kept.partial:
                self._send(router, Packet(Kind.PARTIAL, kept.id, raw=kept.partial))
        self._send(router, Packet(Kind.END, number=self._next_id))

    def _adopt(self, router: RouterChannel, packet: Packet) -> None:
        """Take a connection that an earlier keeper had."""
        sock = socket.socket(fileno=packet.fds[0])
        self._connections[packet.connection] = KeptConnection(
            packet.connection, sock, packet.number, router.generation or 0, settled=packet.raw
        )
        self._next_id = max(self._next_id, packet.connection + 1)

    def _send(self, router: RouterChannel, packet: Packet) -> None:
        """Send a packet to a router, after those that wait for it to receive."""
        try:
            if router.waiting or not router.channel.try_send(packet):
                router.waiting.append(packet)
                self._watch(router)
        except ChannelLost:
            pass  # its end is noted where it is received

    def _flush(self, router: RouterChannel) -> None:
        while router.waiting:
            packet = router.waiting[0]
            is_gone = packet.kind is Kind.CONNECTION and packet.connection not in self._connections
            if not is_gone and not router.channel.try_send(packet):
                break
            router.waiting.popleft()
        self._watch(router)

    def _watch(self, router: RouterChannel) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if router.waiting else 0)
        key = self._selector.get_key(router.channel.sock)
        if key.events != events:
            self._selector.modify(router.channel.sock, events, key.data)

    def _lose(self, router: RouterChannel) -> None:
        """A router has ended: its connections wait for the next one."""
        if router not in self._routers:
            return
        self._routers.remove(router)
        self._selector.unregister(router.channel.sock)
        router.channel.close()
        if router.generation is None or router.is_waiting:
            return
        left = [kept for kept in self._connections.values() if kept.generation == router.generation]
        following = next((each for each in reversed(self._routers) if each.generation == router.generation), None)
        num_requests = sum(len(kept.requests) for kept in left)
        logger.info(
            "router has ended pid=%d generation=%d connections=%d requests=%d",
            *(router.pid, router.generation, len(left), num_requests),
        )
        for kept in left:
            kept.alone_since = time.monotonic()
        if following is not None:
            self._hand_over(following)

    # Time -----------------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        """Reset connections that no router has taken in time, and kill a router that does not yield."""
        late = [
            kept
            for kept in self._connections.values()
            if kept.alone_since is not None and now - kept.alone_since > self._adopt_seconds
        ]
        for kept in late:
            self._reset(kept)
        if late:
            logger.error("no router came within %g s: connections=%d were reset", self._adopt_seconds, len(late))
        for router in self._routers:
            if router.told_to_yield is not None and now - router.told_to_yield > YIELD_SECONDS:
                logger.error("router %d has not handed over within %g s: it is killed", router.pid, YIELD_SECONDS)
                router.told_to_yield = now
                try:
                    os.kill(router.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass

    def _reset(self, kept: KeptConnection) -> None:
        kept.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._forget(kept)

    def _forget(self, kept: KeptConnection) -> None:
        """Close the duplicate of a connection, the last one: its client gets the end."""
        del self._connections[kept.id]
        kept.sock.close()
        self._said_full = False

    def close(self) -> None:
        """Close everything."""
        for router in self._routers:
            router.channel.close()
        for kept in tuple(self._connections.values()):
            self._forget(kept)
        for sock in (self._control, *self._listeners):
            sock.close()
        self._selector.close()
