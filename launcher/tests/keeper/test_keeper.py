"""The keeper's state, turn by turn: clients over TCP, and routers that say what they are told to."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from funitel.launcher.keeper import keeper as module
from funitel.launcher.keeper.keeper import Keeper
from funitel.proto.keeper.channel import Channel, ChannelLost, listen
from funitel.proto.keeper.kernel import reset_on_close
from funitel.proto.keeper.messages import MAX_RAW_BYTES, VERSION, Kind, Packet, RouterHello

PATIENCE_SECONDS = 10.0


class Router:
    """A router, as far as the keeper knows one."""

    def __init__(self, stage: "Stage", generation: int, *, feeds: bool = False, version: int = VERSION) -> None:
        self.stage = stage
        self.channel = Channel.to(stage.path)
        stage.closing.append(self.channel.close)
        self.say(Kind.HELLO, raw=RouterHello(generation, feeds, version).encode())

    def say(self, kind: Kind, connection: int = 0, number: int = 0, raw: bytes = b"", *fds: int) -> None:
        """Send a packet."""
        self.channel.send(Packet(kind, connection, number, raw, fds), 1.0)

    def next(self) -> Packet:
        """Receive a packet; descriptors are closed with the stage."""
        found: list[Packet] = []

        def has_come() -> bool:
            packet = self.channel.receive()
            found.extend([] if packet is None else [packet])
            return packet is not None

        self.stage.until(has_come)
        for descriptor in found[0].fds:
            self.stage.keep(descriptor)
        return found[0]

    def state(self) -> list[Packet]:
        """Receive packets up to the end of the state, without it; descriptors are left out."""
        packets = list(iter(self.next, Packet(Kind.END)))
        return [replace(packet, fds=()) for packet in packets]

    def is_told_nothing(self) -> bool:
        """Whether no packet comes, once the keeper has had its turns."""
        self.stage.settle()
        return self.channel.receive() is None

    def connection(self) -> tuple[int, socket.socket]:
        """Receive a connection."""
        packet = self.next()
        assert packet.kind is Kind.CONNECTION
        return packet.connection, self.stage.sockets[packet.fds[0]]

    def end(self) -> None:
        """End, as the kernel ends the descriptors of a process that was killed."""
        self.channel.close()
        for sock in self.stage.sockets.values():
            sock.close()
        self.stage.sockets.clear()


class Stage:
    """A keeper on free ports, and what has to be closed after it."""

    def __init__(self, path: str, adopt_seconds: float = 30.0) -> None:
        self.path = path
        self.closing: list[Callable[[], object]] = []
        self.sockets: dict[int, socket.socket] = {}  # that routers have got, by descriptor
        self.listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        self.ports = [listener.getsockname()[1] for listener in self.listeners]
        self.keeper = Keeper(self.listeners, listen(path), adopt_seconds)

    def keep(self, descriptor: int) -> None:
        """Close a descriptor in the end."""
        self.sockets[descriptor] = socket.socket(fileno=descriptor)

    def until(self, claim: Callable[[], object]) -> None:
        """Give the keeper turns until `claim` holds."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not claim():
            assert time.monotonic() < deadline
            self.keeper.turn(0.01)

    def settle(self) -> None:
        """Give the keeper turns for all that was sent to it before."""
        for _ in range(5):
            self.keeper.turn(0.0)

    def client(self, listener: int = 0) -> socket.socket:
        """Connect as a client does."""
        client = socket.create_connection(("127.0.0.1", self.ports[listener]), timeout=PATIENCE_SECONDS)
        self.closing.append(client.close)
        return client

    def ready_router(self, generation: int = 1) -> Router:
        """A router that takes connections; no earlier one has left any."""
        router = Router(self, generation)
        assert router.state() == []
        router.say(Kind.READY)
        self.settle()
        return router

    def close(self) -> None:
        """Close everything."""
        for sock in self.sockets.values():
            sock.close()
        for close in self.closing:
            close()
        self.keeper.close()


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """A keeper that has waited for routers of an earlier one."""
    monkeypatch.setattr(module, "FEED_SECONDS", 0.0)
    stage = Stage(str(tmp_path / "keeper"))
    yield stage
    stage.close()


def is_reset(client: socket.socket) -> bool:
    """Whether the client's connection was reset, and not closed."""
    try:
        client.recv(1)
    except ConnectionResetError:
        return True
    return False


# Connections ----------------------------------------------------------------------------------------------------------


def test_a_connection_goes_to_the_router_with_the_number_of_its_listener(stage: Stage) -> None:
    router = stage.ready_router()
    for listener in (1, 0):
        client = stage.client(listener)
        packet = router.next()
        assert (packet.kind, packet.number) == (Kind.CONNECTION, listener)
        accepted = stage.sockets[packet.fds[0]]
        assert accepted.getpeername() == client.getsockname()
        assert not os.get_blocking(accepted.fileno())
        client.sendall(b"asked")
        stage.until(lambda accepted=accepted: _received(accepted) == b"asked")
        accepted.sendall(b"answered")
        assert client.recv(100) == b"answered"


def _received(sock: socket.socket) -> bytes:
    with suppress(BlockingIOError):
        return sock.recv(100)
    return b""


def test_connections_wait_in_the_backlog_until_a_router_is_ready(stage: Stage) -> None:
    router = Router(stage, 1)
    assert router.state() == []
    client = stage.client()
    client.sendall(b"early")
    assert router.is_told_nothing()
    router.say(Kind.READY)
    _, accepted = router.connection()
    assert accepted.recv(100) == b"early"


def test_release_sends_the_end_once_the_router_has_closed_its_own(stage: Stage) -> None:
    router = stage.ready_router()
    client = stage.client()
    number, accepted = router.connection()
    accepted.sendall(b"all")
    accepted.close()
    client.settimeout(0.05)
    assert client.recv(100) == b"all"
    with pytest.raises(TimeoutError):
        client.recv(1)
    router.say(Kind.RELEASE, number)
    stage.settle()
    client.settimeout(PATIENCE_SECONDS)
    assert client.recv(1) == b""


def test_a_shutdown_reaches_the_client_without_a_release(stage: Stage) -> None:
    router = stage.ready_router()
    client = stage.client()
    _, accepted = router.connection()
    accepted.shutdown(socket.SHUT_WR)
    assert client.recv(1) == b""


def test_no_connection_is_accepted_while_the_router_has_packets_to_receive(stage: Stage) -> None:
    router = stage.ready_router()
    client = stage.client()
    number, _ = router.connection()
    router.say(Kind.REQUEST, number, 1, b"x" * MAX_RAW_BYTES)
    for _ in range(1000):
        router.say(Kind.FACTS, number, 1, b"y" * MAX_RAW_BYTES)
        stage.settle()
    router.end()
    after = Router(stage, 1)
    stage.settle()  # more than the buffer of the channel holds
    after.say(Kind.READY)
    stage.settle()
    late = stage.client()
    stage.settle()
    assert len(stage.keeper._connections) == 1
    kinds = [after.next().kind for _ in range(1003)]
    assert kinds == [Kind.CONNECTION, Kind.REQUEST, *[Kind.FACTS] * 1000, Kind.END]
    assert stage.sockets[max(stage.sockets)].getpeername() == client.getsockname()
    _, accepted = after.connection()
    assert accepted.getpeername() == late.getsockname()


# The journal ----------------------------------------------------------------------------------------------------------


def test_the_next_router_gets_all_that_was_said_of_a_connection(stage: Stage) -> None:
    router = stage.ready_router()
    client = stage.client(1)
    number, _ = router.connection()
    router.say(Kind.REQUEST, number, 1, b"first")
    router.say(Kind.FACTS, number, 1, b'{"key": 1}')
    router.say(Kind.DONE, number, 1, b"settled")
    router.say(Kind.REQUEST, number, 2, b"second" * 10_000)
    router.say(Kind.FACTS, number, 2, b'{"key": 2}')
    router.say(Kind.REQUEST, number, 3, b"third")
    router.say(Kind.FACTS, number, 2, b'{"start": 5}')
    router.say(Kind.PARTIAL, number, raw=b"fou")
    router.end()
    after = Router(stage, 1)
    assert after.state() == [
        Packet(Kind.CONNECTION, number, 1, b"settled"),
        Packet(Kind.REQUEST, number, 2, b"second" * 10_000),
        Packet(Kind.FACTS, number, 2, b'{"key": 2}'),
        Packet(Kind.FACTS, number, 2, b'{"start": 5}'),
        Packet(Kind.REQUEST, number, 3, b"third"),
        Packet(Kind.PARTIAL, number, 0, b"fou"),
    ]
    (accepted,) = stage.sockets.values()
    accepted.sendall(b"on")
    assert client.recv(100) == b"on"


def test_a_whole_request_has_no_partial_input(stage: Stage) -> None:
    router = stage.ready_router()
    stage.client()
    number, _ = router.connection()
    router.say(Kind.PARTIAL, number, raw=b"fir")
    router.say(Kind.REQUEST, number, 1, b"first")
    router.end()
    kinds = [packet.kind for packet in Router(stage, 1).state()]
    assert kinds == [Kind.CONNECTION, Kind.REQUEST]


def test_what_is_said_of_a_connection_that_has_ended_is_ignored(stage: Stage) -> None:
    router = stage.ready_router()
    stage.client()
    number, _ = router.connection()
    router.say(Kind.RELEASE, number)
    for kind in (Kind.REQUEST, Kind.FACTS, Kind.DONE, Kind.PARTIAL, Kind.RELEASE):
        router.say(kind, number, 1, b"{}")
    router.say(Kind.FACTS, 12345, 1, b"{}")
    router.end()
    assert Router(stage, 1).state() == []


def test_packets_of_a_router_that_left_some_unread_are_in_the_journal(stage: Stage) -> None:
    router = stage.ready_router()
    stage.client()
    number, _ = router.connection()
    stage.client()
    stage.settle()  # the router has a connection to receive, and is killed before
    router.say(Kind.REQUEST, number, 1, b"asked")
    router.say(Kind.FACTS, number, 1, b"{}")
    router.end()
    kinds = [packet.kind for packet in Router(stage, 1).state()]
    assert kinds == [Kind.CONNECTION, Kind.REQUEST, Kind.FACTS, Kind.CONNECTION]


def test_packets_of_a_router_with_more_to_receive_are_in_the_journal(stage: Stage) -> None:
    router = stage.ready_router()
    stage.client()
    number, _ = router.connection()
    router.say(Kind.REQUEST, number, 1, b"x")
    for _ in range(1000):
        router.say(Kind.FACTS, number, 1, b"y" * MAX_RAW_BYTES)
        stage.settle()
    router.end()
    second = Router(stage, 1)
    stage.settle()  # the keeper waits for it to receive
    second.say(Kind.REQUEST, number, 2, b"last words")
    second.end()
    requests = [packet for packet in Router(stage, 1).state() if packet.kind is Kind.REQUEST]
    assert [packet.raw for packet in requests] == [b"x", b"last words"]


def test_a_connection_belongs_to_its_router(stage: Stage) -> None:
    first = stage.ready_router(1)
    client = stage.client()
    number, _ = first.connection()
    second = stage.ready_router(2)
    second.say(Kind.REQUEST, number, 1, b"not mine")
    second.say(Kind.RELEASE, number)
    stage.settle()
    first.end()
    assert [packet.kind for packet in Router(stage, 1).state()] == [Kind.CONNECTION]
    assert client.getpeername()[1] == stage.ports[0]


# Routers --------------------------------------------------------------------------------------------------------------


def test_the_newest_generation_that_is_ready_gets_connections(stage: Stage) -> None:
    first = stage.ready_router(1)
    second = Router(stage, 2)
    assert second.state() == []
    old = stage.client()
    assert first.connection()[1].getpeername() == old.getsockname()
    second.say(Kind.READY)
    stage.settle()
    new = stage.client()
    assert second.connection()[1].getpeername() == new.getsockname()
    assert first.is_told_nothing()
    second.channel.close()
    stage.settle()
    last = stage.client()
    assert first.connection()[1].getpeername() == last.getsockname()


def test_a_router_takes_over_those_of_its_generation_only(stage: Stage) -> None:
    first = stage.ready_router(1)
    stage.client()
    one, _ = first.connection()
    second = stage.ready_router(2)
    stage.client()
    two, _ = second.connection()
    first.channel.close()
    assert [packet.connection for packet in Router(stage, 1).state()] == [one]
    second.channel.close()
    assert [packet.connection for packet in Router(stage, 2).state()] == [two]


def test_another_router_of_the_generation_takes_over_once_the_first_has_handed_over(stage: Stage) -> None:
    first = stage.ready_router()
    stage.client()
    number, _ = first.connection()
    second = Router(stage, 1)
    assert first.next().kind is Kind.YIELD
    stage.client()
    assert second.is_told_nothing()
    first.say(Kind.READY)  # it was on its way
    assert first.is_told_nothing()
    first.say(Kind.PARTIAL, number, raw=b"GET")
    first.end()
    assert second.state() == [Packet(Kind.CONNECTION, number), Packet(Kind.PARTIAL, number, 0, b"GET")]
    second.say(Kind.READY)
    assert second.connection()[0] == number + 1


def test_the_latest_of_several_routers_takes_over(stage: Stage) -> None:
    first = stage.ready_router()
    stage.client()
    number, _ = first.connection()
    second = Router(stage, 1)
    stage.settle()
    third = Router(stage, 1)
    stage.settle()
    first.end()
    assert [packet.connection for packet in third.state()] == [number]
    assert second.next() == Packet(Kind.REFUSED, raw=b"a later router has come")
    assert third.is_told_nothing()


def test_a_router_that_does_not_yield_is_killed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "YIELD_SECONDS", 0.05)
    monkeypatch.setattr(module, "TICK_SECONDS", 0.02)
    script = (
        "import sys, time; from funitel.proto.keeper.channel import Channel;"
        "from funitel.proto.keeper.messages import RouterHello, Kind, Packet; channel = Channel.to(sys.argv[1]);"
        "channel.send(Packet(Kind.HELLO, raw=RouterHello(1).encode()), 1.0); channel.receive_within(9.0);"
        "time.sleep(60)"
    )
    hanging = subprocess.Popen([sys.executable, "-c", script, stage.path])
    try:
        stage.until(lambda: any(router.generation == 1 for router in stage.keeper._routers))
        after = Router(stage, 1)
        assert after.state() == []
        assert hanging.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    finally:
        hanging.kill()
        hanging.wait()
    assert f"router {hanging.pid} has not handed over" in caplog.text


def test_a_router_of_another_version_is_refused_and_the_first_serves_on(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    first = stage.ready_router()
    other = Router(stage, 1, version=VERSION + 1)
    refused = other.next()
    assert refused.kind is Kind.REFUSED
    assert refused.raw.decode() == f"it speaks version {VERSION}, not {VERSION + 1}"
    other.say(Kind.READY)
    assert first.is_told_nothing()
    assert caplog.text.count("another version") == 1
    other.channel.close()
    stage.client()
    first.connection()


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b'{"a": 1}'])
def test_a_greeting_that_cannot_be_read_is_refused(stage: Stage, data: bytes) -> None:
    channel = Channel.to(stage.path)
    stage.closing.append(channel.close)
    channel.send(Packet(Kind.HELLO, raw=data), 1.0)
    stage.settle()
    assert channel.receive_within(1.0).kind is Kind.REFUSED


def test_what_is_no_packet_ends_the_channel_alone(stage: Stage) -> None:
    router = stage.ready_router()
    stray = Channel.to(stage.path)
    stray.sock.send(b"GET / HTTP/1.1")
    stage.settle()
    with pytest.raises(ChannelLost):
        stray.receive_within(1.0)
    stray.close()
    stage.client()
    router.connection()


def test_a_router_that_is_not_greeted_gets_nothing(stage: Stage) -> None:
    channel = Channel.to(stage.path)
    stage.closing.append(channel.close)
    channel.send(Packet(Kind.READY), 1.0)
    stage.settle()
    stage.client()
    stage.settle()
    assert channel.receive() is None


def test_processes_of_other_users_are_turned_away(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Channel, "peer", property(lambda _: (77, os.getuid() + 1)))
    channel = Channel.to(stage.path)
    stage.settle()
    with pytest.raises(ChannelLost):
        channel.receive_within(1.0)
    channel.close()
    assert "process 77 of user" in caplog.text


# Deadlines ------------------------------------------------------------------------------------------------------------


def test_a_connection_that_no_router_takes_is_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FEED_SECONDS", 0.0)
    monkeypatch.setattr(module, "TICK_SECONDS", 0.02)
    stage = Stage(str(tmp_path / "keeper"), adopt_seconds=0.1)
    router = stage.ready_router()
    client = stage.client()
    router.connection()
    since = time.monotonic()
    router.end()
    stage.until(lambda: not stage.keeper._connections)
    assert time.monotonic() - since >= 0.1
    assert is_reset(client)
    assert "no router came within 0.1 s: connections=1 were reset" in caplog.text
    stage.close()


def test_a_connection_with_a_router_has_no_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEED_SECONDS", 0.0)
    monkeypatch.setattr(module, "TICK_SECONDS", 0.01)
    stage = Stage(str(tmp_path / "keeper"), adopt_seconds=0.05)
    first = stage.ready_router(1)
    stage.client()
    first.connection()
    other = stage.ready_router(2)
    stage.client()
    number, _ = other.connection()
    first.channel.close()
    end = time.monotonic() + 0.2
    stage.until(lambda: time.monotonic() > end)
    assert list(stage.keeper._connections) == [number]
    stage.close()


def test_a_client_that_leaves_while_no_router_is_there_is_dropped(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TICK_SECONDS", 0.01)
    router = stage.ready_router()
    leaving, staying = stage.client(), stage.client()
    router.connection()
    number, _ = router.connection()
    staying.shutdown(socket.SHUT_WR)  # it may read on
    router.end()
    reset_on_close(leaving)
    leaving.close()
    stage.until(lambda: list(stage.keeper._connections) == [number])


# Descriptors ----------------------------------------------------------------------------------------------------------


def test_a_full_table_of_descriptors_stops_accepting_until_a_connection_ends(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FULL_SECONDS", 0.01)
    stage.keeper._max_connections = 2
    router = stage.ready_router()
    clients = [stage.client() for _ in range(4)]
    (first, accepted), _ = router.connection(), router.connection()
    assert router.is_told_nothing()
    time.sleep(0.02)
    assert router.is_told_nothing()
    assert caplog.text.count("no connection can be accepted beside 2 that are open: Too many open files") == 1
    # A router can connect all the same.
    assert Router(stage, 2).state() == []
    accepted.close()
    router.say(Kind.RELEASE, first)
    assert router.connection()[1].getpeername() == clients[2].getsockname()


def test_a_kernel_without_descriptors_does_not_end_the_keeper(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    router = stage.ready_router()
    turns = iter([errno.ENFILE, errno.ECONNABORTED])
    accept = socket.socket.accept

    def fail(listener: socket.socket) -> tuple[socket.socket, object]:
        number = next(turns, None)
        if number is not None:
            raise OSError(number, os.strerror(number))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail)
    client = stage.client()
    assert router.connection()[1].getpeername() == client.getsockname()
    assert caplog.text.count("no connection can be accepted") == 1


def test_descriptors_are_closed(stage: Stage) -> None:
    before = len(os.listdir("/proc/self/fd"))
    router = stage.ready_router()
    for _ in range(20):
        client = stage.client()
        number, accepted = router.connection()
        router.say(Kind.REQUEST, number, 1, b"x" * (MAX_RAW_BYTES + 1))
        accepted.close()
        router.say(Kind.RELEASE, number)
        stage.settle()
        assert client.recv(1) == b""
        client.close()
    router.end()
    stage.settle()
    assert len(os.listdir("/proc/self/fd")) == before


# Another keeper -------------------------------------------------------------------------------------------------------


def feed(stage: Stage, router: Router, number: int, sock: socket.socket) -> None:
    """Bring a connection with a request under way."""
    assert router.state() == []
    router.say(Kind.ADOPT, number, 1, b"settled", sock.fileno())
    router.say(Kind.REQUEST, number, 4, b"asked")
    router.say(Kind.FACTS, number, 4, json.dumps({"key": 1}).encode())
    router.say(Kind.FED)
    router.say(Kind.READY)
    stage.settle()


@pytest.fixture
def served() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection that an earlier keeper has accepted, and its client."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), timeout=PATIENCE_SECONDS)
        accepted, _ = listener.accept()
    with client, accepted:
        yield accepted, client


def test_a_router_brings_its_connections(stage: Stage, served: tuple[socket.socket, socket.socket]) -> None:
    router = Router(stage, 1, feeds=True)
    feed(stage, router, 99, served[0])
    stage.client()
    number, _ = router.connection()
    assert number > 99
    served[0].close()
    router.end()
    state = Router(stage, 1).state()
    assert state[:3] == [
        Packet(Kind.CONNECTION, 99, 1, b"settled"),
        Packet(Kind.REQUEST, 99, 4, b"asked"),
        Packet(Kind.FACTS, 99, 4, b'{"key": 1}'),
    ]
    next(iter(stage.sockets.values())).sendall(b"on")
    assert served[1].recv(100) == b"on"


def test_numbers_of_connections_differ_between_keepers(stage: Stage, tmp_path: Path) -> None:
    other = Stage(str(tmp_path / "other"))
    ranges = [range(each.keeper._next_id, each.keeper._next_id + (1 << 32)) for each in (stage, other)]
    assert ranges[0].start not in ranges[1]
    assert ranges[1].start not in ranges[0]
    other.close()


def test_a_router_that_serves_comes_before_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: tuple[socket.socket, socket.socket]
) -> None:
    monkeypatch.setattr(module, "FEED_SECONDS", 0.3)
    stage = Stage(str(tmp_path / "keeper"))
    after = Router(stage, 1)
    assert after.is_told_nothing()
    router = Router(stage, 1, feeds=True)
    feed(stage, router, 99, served[0])
    assert after.is_told_nothing()
    assert router.next().kind is Kind.YIELD
    router.end()
    assert [packet.connection for packet in after.state()] == [99, 99, 99]
    stage.close()


def test_a_first_router_does_not_wait_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEED_SECONDS", 0.05)
    stage = Stage(str(tmp_path / "keeper"))
    since = time.monotonic()
    router = Router(stage, 1)
    assert router.is_told_nothing()
    found: list[Packet] = []
    while not found:
        stage.keeper.turn(PATIENCE_SECONDS)
        found.extend([] if (packet := router.channel.receive()) is None else [packet])
    assert found == [Packet(Kind.END)]
    assert time.monotonic() - since < PATIENCE_SECONDS / 2
    stage.close()


def test_a_router_that_lost_its_channel_alone_loses_nothing(stage: Stage) -> None:
    router = stage.ready_router()
    clients = [stage.client() for _ in range(3)]
    (one, accepted), (two, closed) = router.connection(), router.connection()
    stage.settle()  # the third is on its way
    router.say(Kind.REQUEST, one, 1, b"first")
    router.say(Kind.REQUEST, two, 1, b"over")
    router.channel.close()
    closed.close()
    # The keeper has not received all this when the router comes again.
    again = Router(stage, 1, feeds=True)
    assert again.state() == []
    again.say(Kind.RELEASE, two)
    again.say(Kind.ADOPT, one, 0, b"", accepted.fileno())
    again.say(Kind.REQUEST, one, 2, b"second")
    again.say(Kind.FED)
    three, unseen = again.connection()
    assert unseen.getpeername() == clients[2].getsockname()
    assert clients[1].recv(1) == b""
    assert again.is_told_nothing()
    again.end()
    assert Router(stage, 1).state() == [
        Packet(Kind.CONNECTION, one),
        Packet(Kind.REQUEST, one, 2, b"second"),
        Packet(Kind.CONNECTION, three),
    ]


def test_a_connection_without_a_descriptor_is_not_taken(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    router = Router(stage, 1, feeds=True)
    assert router.state() == []
    router.say(Kind.ADOPT, 99, 1)
    router.say(Kind.FED)
    router.say(Kind.READY)
    stage.client()
    router.connection()
    assert "no descriptor is left for a connection" in caplog.text


# Another version ------------------------------------------------------------------------------------------------------


def test_another_router_waits_for_one_of_another_version_that_finishes(stage: Stage) -> None:
    old = Router(stage, 1, feeds=True, version=VERSION + 1)
    refusal = old.next()
    assert (refusal.kind, refusal.number) == (Kind.REFUSED, VERSION)
    early = Router(stage, 1)
    assert early.next() == Packet(Kind.REFUSED, raw=b"a router of another version finishes its connections first")
    stage.ready_router(2)  # with shards of its own
    old.end()
    stage.settle()
    stage.ready_router(1)


def test_a_router_that_starts_holds_up_no_other_one_when_it_is_refused(stage: Stage) -> None:
    refused = Router(stage, 1, version=VERSION + 1)
    assert refused.next().number == VERSION
    stage.ready_router(1)


def test_listening_sockets_are_given_to_a_launcher(stage: Stage) -> None:
    channel = Channel.to(stage.path)
    stage.closing.append(channel.close)
    channel.send(Packet(Kind.LISTENERS), 1.0)
    stage.settle()
    packet = channel.receive()
    assert packet is not None
    for descriptor, port in zip(packet.fds, stage.ports, strict=True):
        stage.keep(descriptor)
        assert stage.sockets[descriptor].getsockname()[1] == port


def test_at_its_end_connections_without_a_router_are_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FEED_SECONDS", 0.0)
    stage = Stage(str(tmp_path / "keeper"))
    dead = stage.ready_router(1)
    lost = stage.client()
    number, accepted = dead.connection()
    dead.say(Kind.REQUEST, number, 1, b"asked")
    accepted.sendall(b"half of it")
    assert lost.recv(100) == b"half of it"
    dead.end()
    alive = stage.ready_router(2)
    kept = stage.client()
    _, serving = alive.connection()
    stage.keeper.close()
    assert "connections=1 requests=1 that no router has were reset" in caplog.text
    assert is_reset(lost)
    serving.sendall(b"all of it")
    assert kept.recv(100) == b"all of it"
    stage.close()
