"""Packets between router and keeper, over real sockets."""

import errno
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from funitel.proto.keeper.channel import BUFFER_BYTES, Channel, ChannelLost, listen
from funitel.proto.keeper.messages import MAX_RAW_BYTES, Kind, Packet, RouterHello, decode, encode

Ends = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Two ends of a channel."""
    a, b = (Channel(sock) for sock in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    yield a, b
    a.close()
    b.close()


def num_files() -> int:
    """How many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def full_table() -> Iterator[None]:
    """Leave this process no descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(int(name) for name in os.listdir("/proc/self/fd")), hard))
    fillers = []
    try:
        while True:
            try:
                fillers.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        yield
    finally:
        for descriptor in fillers:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("num_bytes", [0, 1, MAX_RAW_BYTES, MAX_RAW_BYTES + 1, 20 << 20])
def test_a_packet_arrives_as_it_was_sent(ends: Ends, num_bytes: int) -> None:
    before = num_files()
    packet = Packet(Kind.REQUEST, (1 << 63) + 5, 1 << 31, os.urandom(num_bytes))
    ends[0].send(packet, 1.0)
    assert ends[1].receive() == packet
    assert ends[1].receive() is None
    assert num_files() == before


def test_a_connection_and_many_bytes_travel_together(ends: Ends) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends[0].send(Packet(Kind.ADOPT, 1, 2, b"s" * (MAX_RAW_BYTES + 1), (listener.fileno(),)), 1.0)
        packet = ends[1].receive()
        assert packet is not None
        assert packet.raw == b"s" * (MAX_RAW_BYTES + 1)
        with socket.socket(fileno=packet.fds[0]) as received:
            assert received.getsockname() == listener.getsockname()
            assert not os.get_inheritable(received.fileno())


def test_packets_keep_their_order(ends: Ends) -> None:
    for number in range(100):
        ends[0].send(Packet(Kind.FACTS, 1, number, b"x" * (number % 2 * (MAX_RAW_BYTES + 1))), 1.0)
    numbers = [packet.number for _ in range(100) if (packet := ends[1].receive()) is not None]
    assert numbers == list(range(100))


def test_what_was_sent_survives_its_sender(ends: Ends) -> None:
    script = (
        "import os, signal, socket, sys; from funitel.proto.keeper.channel import Channel;"
        "from funitel.proto.keeper.messages import Kind, Packet;"
        "channel = Channel(socket.socket(fileno=int(sys.argv[1])));"
        "[channel.send(Packet(Kind.FACTS, 1, number, bytes(number)), 1.0) for number in (1, 2, 100_000)];"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    descriptor = ends[1].sock.fileno()
    ended = subprocess.run([sys.executable, "-c", script, str(descriptor)], pass_fds=[descriptor], check=False)
    ends[1].close()
    assert ended.returncode == -signal.SIGKILL
    assert [ends[0].receive_within(1.0).raw for _ in range(3)] == [bytes(1), bytes(2), bytes(100_000)]
    with pytest.raises(ChannelLost, match="closed"):
        ends[0].receive()


def test_what_was_sent_survives_a_sender_that_left_packets_unread(ends: Ends) -> None:
    # The kernel reports a reset first, then gives the packets.
    here, there = ends
    here.send(Packet(Kind.CONNECTION, 1), 1.0)
    there.send(Packet(Kind.REQUEST, 1, 1, b"one"), 1.0)
    there.send(Packet(Kind.FACTS, 1, 1, b"{}"), 1.0)
    there.close()
    assert [here.receive_within(1.0).kind for _ in range(2)] == [Kind.REQUEST, Kind.FACTS]
    with pytest.raises(ChannelLost, match="closed"):
        here.receive()


def test_sending_waits_for_room_and_no_longer(ends: Ends) -> None:
    big = Packet(Kind.FACTS, 1, 1, b"x" * MAX_RAW_BYTES)
    sent = 0
    while ends[0].try_send(big):
        sent += 1
    assert 0 < sent <= 2 * BUFFER_BYTES // MAX_RAW_BYTES
    with pytest.raises(ChannelLost, match="received nothing for 0.05 s"):
        ends[0].send(big, 0.05)
    for _ in range(sent):
        assert ends[1].receive() == big
    ends[0].send(big, 0.05)
    assert ends[1].receive() == big


def test_an_end_that_is_gone_is_lost(ends: Ends) -> None:
    ends[1].close()
    with pytest.raises(ChannelLost):
        ends[0].try_send(Packet(Kind.READY))
    with pytest.raises(ChannelLost):
        ends[0].receive()


def test_nothing_comes_in_time(ends: Ends) -> None:
    with pytest.raises(ChannelLost, match="sent nothing for 0.05 s"):
        ends[0].receive_within(0.05)


@pytest.mark.parametrize("data", [b"\x01", b"\xfe" + bytes(13), b"\x03" + bytes(12) + b"\x01"])
def test_what_is_no_packet_ends_the_channel(ends: Ends, data: bytes) -> None:
    before = num_files()
    ends[0].sock.send(data)
    with pytest.raises(ChannelLost):
        ends[1].receive()
    socket.send_fds(ends[0].sock, [b"\x01"], [ends[0].sock.fileno()])
    with pytest.raises(ChannelLost, match="too short"):
        ends[1].receive()
    assert num_files() == before


def test_a_packet_without_room_for_its_descriptor_has_none(ends: Ends) -> None:
    ends[0].send(Packet(Kind.CONNECTION, 7, 1, b"", (ends[0].sock.fileno(),)), 1.0)
    with full_table():
        packet = ends[1].receive()
    assert packet == Packet(Kind.CONNECTION, 7, 1)


def test_bytes_without_room_for_their_file_end_the_channel(ends: Ends) -> None:
    ends[0].send(Packet(Kind.REQUEST, 7, 1, b"x" * (MAX_RAW_BYTES + 1)), 1.0)
    with full_table(), pytest.raises(ChannelLost, match="no descriptor is left"):
        ends[1].receive()


def test_too_many_descriptors_on_their_way_have_to_wait(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ETOOMANYREFS, "too many references")

    packet = Packet(Kind.CONNECTION, 1, 1, b"", (ends[0].sock.fileno(),))
    with monkeypatch.context() as patched:
        patched.setattr(socket, "send_fds", refuse)
        assert not ends[0].try_send(packet)
    assert ends[0].try_send(packet)
    received = ends[1].receive()
    assert received is not None
    os.close(received.fds[0])


def test_the_socket_is_for_its_user_only(tmp_path: Path) -> None:
    path = str(tmp_path / "keeper")
    before = os.umask(0)
    try:
        with listen(path) as control:
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
            near = Channel.to(path)
            far = Channel(control.accept()[0])
            assert far.peer == near.peer == (os.getpid(), os.getuid())
            near.close()
            far.close()
        assert os.umask(0) == 0
    finally:
        os.umask(before)


def test_the_file_of_a_keeper_that_has_ended_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "keeper")
    listen(path).close()
    with pytest.raises(ConnectionRefusedError):
        Channel.to(path)
    with listen(path):
        Channel.to(path).close()


def test_two_keepers_do_not_share_a_path(tmp_path: Path) -> None:
    path = str(tmp_path / "keeper")
    with listen(path):
        with pytest.raises(OSError, match="another keeper") as error:
            listen(path)
        assert error.value.errno == errno.EADDRINUSE
        Channel.to(path).close()


def test_a_keeper_that_accepts_nothing_holds_no_router_up(tmp_path: Path) -> None:
    path = str(tmp_path / "keeper")
    channels = []
    with listen(path):
        with suppress(BlockingIOError):
            while len(channels) < 10_000:
                channels.append(Channel.to(path))
        with pytest.raises(BlockingIOError):
            Channel.to(path)
    for channel in channels:
        channel.close()


def test_greetings() -> None:
    assert RouterHello.decode(RouterHello(3, feeds=True).encode()) == RouterHello(3, feeds=True)
    assert RouterHello.decode(RouterHello(3, version=9).encode()).version == 9
    for wrong in (b"", b"{", b"7", b"[1]", b"[1, 2, 3, 4]", b"[null, 1, true]", b'["x", 1, true]', b"\xff"):
        with pytest.raises(ValueError):  # noqa: PT011 - of several messages
            RouterHello.decode(wrong)


def test_a_packet_says_whether_its_bytes_are_in_a_file() -> None:
    packet = Packet(Kind.DONE, 3, 4, b"five")
    assert decode(encode(packet)) == (packet, False)
    assert decode(encode(packet, is_in_file=True)) == (Packet(Kind.DONE, 3, 4), True)
