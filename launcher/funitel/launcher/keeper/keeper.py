"""The keeper holds duplicates of the listening sockets and of every accepted connection, and the journal of requests.

It accepts connections and passes them to the newest generation of routers that is ready. When a router ends, the next
one of its generation gets its connections with their journals. One thread, one loop; it reads no HTTP.

While no router is ready, connections wait in the backlog. A router that serves when this process starts has those of an
earlier keeper, and brings them: others of its generation wait for it a moment.
"""

import errno
import logging
import os
import resource
import secrets
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from funitel.proto.keeper.channel import Channel, ChannelLost
from funitel.proto.keeper.kernel import is_over, reset_on_close
from funitel.proto.keeper.messages import VERSION, Kind, Packet, RouterHello

logger = logging.getLogger(__name__)

YIELD_SECONDS = 10.0  # for a router to end once it was told to; one that hangs is killed
FEED_SECONDS = 0.5  # after the start, for routers that serve already
FULL_SECONDS = 0.1  # without accepting, where no descriptor is left
FULL_LOG_SECONDS = 10.0  # between two lines that say so
TICK_SECONDS = 0.5
OTHER_FILES = 64  # beside connections: listening sockets, routers, and bytes of requests on their way
OTHER_SHARE = 0.5  # of few files that may be open
MAX_ACCEPTED = 64  # connections in a turn


@dataclass(slots=True)
class KeptRequest:
    """A request in the journal, as packets that say it again."""

    raw: bytes
    facts: list[bytes] = field(default_factory=list)  # JSON objects; later ones add to earlier ones


@dataclass(slots=True, eq=False)
class HeldConnection:
    """A connection, and what is known of its requests."""

    id: int
    sock: socket.socket
    listener: int
    generation: int
    requests: dict[int, KeptRequest] = field(default_factory=dict)  # by number, in order
    partial: bytes = b""
    settled: bytes = b""  # how far the last router was with it, as it says
    router: "RouterChannel | None" = None  # that has it
    alone_since: float | None = None  # since no router has it; an instant of the monotonic clock


@dataclass(slots=True, eq=False)
class RouterChannel:
    """The channel to one router, and what waits to be sent to it."""

    channel: Channel
    pid: int
    generation: int | None = None  # before it has said
    finishing: int | None = None  # generation of a router of another version, which serves its connections to their end
    is_ready: bool = False
    is_waiting: bool = False  # for connections: others of its generation have to end, or to come
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
        self._connections: dict[int, HeldConnection] = {}
        self._routers: list[RouterChannel] = []
        self._next_id = (1 + secrets.randbits(31)) << 32  # far from the numbers of other keepers; 0 is no connection
        self._max_connections = _max_connections()
        self._accepts = False
        self._full_until = self._said_full_at = 0.0
        self._feeds_until = time.monotonic() + FEED_SECONDS
        self._tick_at = self._feeds_until
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
        until_tick = max(0.0, self._tick_at - time.monotonic())
        for key, events in self._selector.select(min(seconds, until_tick)):
            act: Callable[[int], None] = key.data
            act(events)
        now = time.monotonic()
        if now >= self._tick_at:
            self._tick_at = now + TICK_SECONDS
            self._tick(now)
        self._watch_listeners(now)

    # Clients --------------------------------------------------------------------------------------------------------

    def _accepting(self) -> RouterChannel | None:
        """The router that gets new connections."""
        ready = [router for router in self._routers if router.is_ready]
        return max(ready, key=lambda router: router.generation or 0, default=None)

    def _watch_listeners(self, now: float) -> None:
        """Accept connections while a router takes them; else they wait in the backlog."""
        router = self._accepting()
        accepts = router is not None and not router.waiting and now >= self._full_until
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
                if len(self._connections) >= self._max_connections:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                sock, _ = self._listeners[number].accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._note_full(error)
                return
            sock.setblocking(False)
            self._take(HeldConnection(self._next_id, sock, number, router.generation or 0), router)
            self._next_id += 1

    def _note_full(self, error: OSError) -> None:
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
            return  # the client has left
        now = time.monotonic()
        self._full_until = now + FULL_SECONDS
        if now >= self._said_full_at + FULL_LOG_SECONDS or not self._said_full_at:
            self._said_full_at = now
            count = len(self._connections)
            logger.error("no connection can be accepted beside %d that are open: %s", count, os.strerror(error.errno))

    def _take(self, kept: HeldConnection, router: RouterChannel) -> None:
        self._connections[kept.id] = kept
        self._give(kept, router)

    def _give(self, kept: HeldConnection, router: RouterChannel) -> None:
        kept.router, kept.alone_since = router, None
        self._send(router, self._introduction(kept))

    def _introduction(self, kept: HeldConnection) -> Packet:
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
        """Receive all that a router has sent, and send it what waits.

        Where a router that was lost comes again, its first channel is received to the end before the second is greeted.
        """
        if router not in self._routers:
            return  # its end was noted in this turn
        try:
            if events & selectors.EVENT_WRITE:
                self._flush(router)
        except ChannelLost:
            router.waiting.clear()  # it has ended; what it has sent is received all the same
        try:
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
        if kept is not None and kept.router not in (router, None):
            kept = None  # it is another router's
        match packet.kind:
            case Kind.HELLO:
                self._greet(router, packet)
            case Kind.READY:
                is_chosen = router.generation is not None and not router.is_waiting
                router.is_ready = is_chosen and router.told_to_yield is None
            case Kind.ADOPT:
                self._adopt(router, packet)
            case Kind.FED:
                self._give_unseen(router)
            case Kind.LISTENERS:
                descriptors = tuple(listener.fileno() for listener in self._listeners)
                self._send(router, Packet(Kind.LISTENERS, fds=descriptors))
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
        hello = None
        try:
            hello = RouterHello.decode(packet.raw)
            problem = "" if hello.version == VERSION else f"it speaks version {VERSION}, not {hello.version}"
        except ValueError:
            problem = f"it speaks version {VERSION}, and was greeted otherwise"
        if hello is None or problem:
            router.finishing = hello.generation if hello is not None and hello.feeds else None
            logger.error("a router of another version, process %d, is refused: %s", router.pid, problem)
            self._send(router, Packet(Kind.REFUSED, number=VERSION, raw=problem.encode()))
            return
        if router.generation is not None:
            return
        router.generation = hello.generation
        if hello.feeds:
            self._send(router, Packet(Kind.END))
        else:
            router.is_waiting = True
            self._advance(hello.generation)

    def _advance(self, generation: int) -> None:
        """Give the newest router that waits what it waits for, once the others of its generation have ended."""
        routers = [router for router in self._routers if router.generation == generation]
        waiting = [router for router in routers if router.is_waiting]
        if not waiting or time.monotonic() < self._feeds_until:
            return
        if any(router.finishing == generation for router in self._routers):  # both would use the same shards
            for router in waiting:
                self._turn_away(router, b"a router of another version finishes its connections first")
            return
        others = [router for router in routers if not router.is_waiting]
        for other in others:
            if other.told_to_yield is None:
                other.told_to_yield, other.is_ready = time.monotonic(), False
                self._send(other, Packet(Kind.YIELD))
        if others:
            return
        for early in waiting[:-1]:
            self._turn_away(early, b"a later router has come")
        self._hand_over(waiting[-1])

    def _turn_away(self, router: RouterChannel, reason: bytes) -> None:
        """Refuse a router that waits."""
        router.generation, router.is_waiting = None, False
        self._send(router, Packet(Kind.REFUSED, raw=reason))

    def _hand_over(self, router: RouterChannel) -> None:
        """Give a router all connections of its generation, with their journals."""
        router.is_waiting = False
        for kept in self._alone(router.generation):
            self._give(kept, router)
            for number, request in kept.requests.items():
                self._send(router, Packet(Kind.REQUEST, kept.id, number, request.raw))
                for facts in request.facts:
                    self._send(router, Packet(Kind.FACTS, kept.id, number, facts))
            if kept.partial:
                self._send(router, Packet(Kind.PARTIAL, kept.id, raw=kept.partial))
        self._send(router, Packet(Kind.END))

    def _alone(self, generation: int | None) -> list[HeldConnection]:
        """The connections of a generation that no router has."""
        return [kept for kept in self._connections.values() if kept.router is None and kept.generation == generation]

    def _give_unseen(self, router: RouterChannel) -> None:
        """Give a router that has lost its channel the connections that were on their way to it."""
        for kept in self._alone(router.generation):
            if not kept.requests and not kept.settled and not kept.partial:
                self._give(kept, router)

    def _adopt(self, router: RouterChannel, packet: Packet) -> None:
        """Take a connection that an earlier keeper had, or this one from a channel that was lost."""
        if not packet.fds:
            logger.error("no descriptor is left for a connection that router %d brings: it is not kept", router.pid)
            return
        sock = socket.socket(fileno=packet.fds[0])
        kept = self._connections.get(packet.connection)
        if kept is None:
            kept = HeldConnection(packet.connection, sock, packet.number, router.generation or 0)
            self._connections[kept.id] = kept
        else:
            sock.close()
            kept.requests.clear()  # the router says them again
        kept.settled, kept.router, kept.alone_since = packet.raw, router, None

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
            is_wanted = not packet.connection or packet.connection in self._connections
            if is_wanted and not router.channel.try_send(packet):
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
        router.waiting.clear()
        self._selector.unregister(router.channel.sock)
        router.channel.close()
        if router.generation is None or router.is_waiting:
            return
        left = [kept for kept in self._connections.values() if kept.router is router]
        num_requests = sum(len(kept.requests) for kept in left)
        logger.info(
            "router has ended pid=%d generation=%d connections=%d requests=%d",
            *(router.pid, router.generation, len(left), num_requests),
        )
        for kept in left:
            kept.router, kept.alone_since = None, time.monotonic()
        self._advance(router.generation)

    # Time -----------------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        """Reset connections that no router has taken in time, and kill a router that does not yield."""
        for generation in {router.generation for router in self._routers if router.is_waiting}:
            self._advance(generation or 0)
        late = []
        for kept in tuple(self._connections.values()):
            if kept.alone_since is not None and is_over(kept.sock):
                self._forget(kept)
            elif kept.alone_since is not None and now - kept.alone_since > self._adopt_seconds:
                late.append(kept)
                self._reset(kept)
        if late:
            logger.error("no router came within %g s: connections=%d were reset", self._adopt_seconds, len(late))
        for router in self._routers:
            if router.told_to_yield is not None and now - router.told_to_yield > YIELD_SECONDS:
                logger.error("router %d has not handed over within %g s: it is killed", router.pid, YIELD_SECONDS)
                router.told_to_yield = now
                if router.pid > 0:  # 0 is one of another namespace
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(router.pid, signal.SIGKILL)

    def _reset(self, kept: HeldConnection) -> None:
        reset_on_close(kept.sock)
        self._forget(kept)

    def _forget(self, kept: HeldConnection) -> None:
        """Close the duplicate of a connection, the last one: its client gets the end."""
        del self._connections[kept.id]
        kept.sock.close()

    def close(self) -> None:
        """Close everything: connections that a router has go on, and others are reset."""
        for router in self._routers:
            router.channel.close()
        alone = [kept for kept in self._connections.values() if kept.router is None]
        if alone:
            num_requests = sum(len(kept.requests) for kept in alone)
            logger.error("connections=%d requests=%d that no router has were reset", len(alone), num_requests)
        for kept in alone:
            self._reset(kept)
        for kept in tuple(self._connections.values()):
            self._forget(kept)
        for sock in (self._control, *self._listeners):
            sock.close()
        self._selector.close()


def _max_connections() -> int:
    """The connections that this process may hold, so that routers always find a descriptor."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return files - min(OTHER_FILES, int(files * OTHER_SHARE))
