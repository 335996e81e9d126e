"""The keeper as a process: `python -m funitel.launcher.keeper`."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from funitel.proto.keeper.channel import Channel, ChannelLost
from funitel.proto.keeper.messages import Kind, Packet, RouterHello

PATIENCE_SECONDS = 30.0
MAX_RESIDENT_BYTES = 30 << 20

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A listening socket, which keepers inherit."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def start(tmp_path: Path, listener: socket.socket) -> Iterator[Start]:
    """Start a keeper at `keeper` in the test's folder."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, path: str | None = None) -> subprocess.Popen[str]:
        descriptor = listener.fileno()
        command = [sys.executable, "-m", "funitel.launcher.keeper", "--socket", path or str(tmp_path / "keeper")]
        started.append(
            subprocess.Popen(
                [*command, "--listen-fd", str(descriptor), *arguments],
                pass_fds=[descriptor],
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def connected(path: Path) -> Channel:
    """Connect once the keeper listens."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return Channel.to(str(path))
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def greeted(path: Path) -> Channel:
    """Connect as a router that is ready."""
    channel = connected(path)
    channel.send(Packet(Kind.HELLO, raw=RouterHello(1).encode()), 1.0)
    assert channel.receive_within(PATIENCE_SECONDS) == Packet(Kind.END)
    channel.send(Packet(Kind.READY), 1.0)
    return channel


def test_a_stream_goes_on_after_the_death_of_a_router_and_of_a_keeper(
    start: Start, tmp_path: Path, listener: socket.socket
) -> None:
    keeper = start()
    channel = greeted(tmp_path / "keeper")
    with socket.create_connection(listener.getsockname(), timeout=PATIENCE_SECONDS) as client:
        packet = channel.receive_within(PATIENCE_SECONDS)
        with socket.socket(fileno=packet.fds[0]) as accepted:
            accepted.sendall(b"one ")
        channel.close()
        channel = connected(tmp_path / "keeper")
        channel.send(Packet(Kind.HELLO, raw=RouterHello(1).encode()), 1.0)
        packet = channel.receive_within(PATIENCE_SECONDS)
        assert channel.receive_within(PATIENCE_SECONDS) == Packet(Kind.END)
        with socket.socket(fileno=packet.fds[0]) as accepted:
            accepted.sendall(b"two ")
            keeper.kill()
            with pytest.raises(ChannelLost):
                channel.receive_within(PATIENCE_SECONDS)
            channel.close()
            accepted.sendall(b"three")
        got = b""
        while data := client.recv(100):
            got += data
        assert got == b"one two three"


def test_the_next_keeper_takes_what_waits_in_the_backlog(start: Start, tmp_path: Path, listener: socket.socket) -> None:
    keeper = start()
    greeted(tmp_path / "keeper").close()
    keeper.kill()
    keeper.wait()
    with socket.create_connection(listener.getsockname(), timeout=PATIENCE_SECONDS) as client:
        start()
        channel = greeted(tmp_path / "keeper")
        packet = channel.receive_within(PATIENCE_SECONDS)
        with socket.socket(fileno=packet.fds[0]) as accepted:
            assert accepted.getpeername() == client.getsockname()
        channel.close()


def test_it_is_small(start: Start, tmp_path: Path) -> None:
    keeper = start()
    connected(tmp_path / "keeper").close()
    status = Path(f"/proc/{keeper.pid}/status").read_text()
    resident = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert resident is not None
    assert int(resident[1]) << 10 < MAX_RESIDENT_BYTES


def test_it_imports_nothing_heavy() -> None:
    script = "import sys, funitel.launcher.keeper.__main__; print(*sys.modules)"
    names = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert {"asyncio", "numpy", "torch", "grpc", "google", "uvloop"}.isdisjoint(names)
    ours = {name for name in names if name.startswith("funitel.")}
    assert "funitel.launcher.keeper.keeper" in ours
    assert len(ours) < 20, ours


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_removes_its_socket(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    keeper = start()
    channel = greeted(tmp_path / "keeper")
    keeper.send_signal(number)
    assert keeper.wait(PATIENCE_SECONDS) == 0
    assert not (tmp_path / "keeper").exists()
    channel.close()


def test_the_socket_of_another_keeper_is_not_removed(start: Start, tmp_path: Path) -> None:
    keeper = start()
    connected(tmp_path / "keeper").close()
    (tmp_path / "keeper").unlink()
    other = start()
    connected(tmp_path / "keeper").close()
    keeper.terminate()
    assert keeper.wait(PATIENCE_SECONDS) == 0
    connected(tmp_path / "keeper").close()
    assert other.poll() is None


def test_a_second_keeper_says_why_it_cannot_start(start: Start, tmp_path: Path) -> None:
    start()
    channel = greeted(tmp_path / "keeper")
    second = start()
    _, said = second.communicate(timeout=PATIENCE_SECONDS)
    assert second.returncode == 1
    assert said == f"error: the keeper cannot listen on {tmp_path / 'keeper'}: another keeper listens there\n"
    assert channel.receive() is None  # the first one serves on
    channel.close()


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/nowhere/keeper", "No such file or directory"), ("/tmp/" + "k" * 120, "AF_UNIX path too long")],
)
def test_a_path_that_cannot_be_used_is_named(start: Start, path: str, reason: str) -> None:
    keeper = start(path=path)
    _, said = keeper.communicate(timeout=PATIENCE_SECONDS)
    assert keeper.returncode == 1
    assert said == f"error: the keeper cannot listen on {path}: {reason}\n"


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import os, subprocess, sys, time, socket; listener = socket.create_server(('127.0.0.1', 0));"
        "subprocess.Popen([sys.executable, '-m', 'funitel.launcher.keeper', '--socket', sys.argv[1],"
        " '--listen-fd', str(listener.fileno()), '--exit-with-parent', str(os.getpid())],"
        " pass_fds=[listener.fileno()]); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "keeper")], stderr=subprocess.DEVNULL)
    channel = connected(tmp_path / "keeper")
    pid, _ = channel.peer
    parent.kill()
    parent.wait()
    with pytest.raises(ChannelLost, match="closed"):
        channel.receive_within(PATIENCE_SECONDS)
    channel.close()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (tmp_path / "keeper").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert pid != os.getpid()
