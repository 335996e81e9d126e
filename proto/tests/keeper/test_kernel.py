"""The kernel's counts of a connection, beside a process that knows the truth."""

import multiprocessing
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection

import pytest

from funitel.proto.keeper.kernel import bytes_read, bytes_written, counts_bytes, is_over

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """An accepted connection, and the client's end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        with client, accepted:
            yield accepted, client


def test_this_kernel_counts() -> None:
    assert counts_bytes()


def test_nothing_was_written_or_read(pair: Pair) -> None:
    assert (bytes_written(pair[0]), bytes_read(pair[0])) == (0, 0)


def test_the_sum_is_right_while_the_client_reads(pair: Pair) -> None:
    accepted, client = pair
    accepted.setblocking(False)
    written, is_over = 0, threading.Event()

    def read() -> None:
        while not is_over.is_set():
            with suppress(TimeoutError):
                client.recv(1 << 12)

    client.settimeout(0.1)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(1000):
            try:
                written += accepted.send(b"x" * 5000)
            except BlockingIOError:
                pass
            assert bytes_written(accepted) == written
    finally:
        is_over.set()
        reader.join()


def test_what_was_read_is_what_came_without_what_waits(pair: Pair) -> None:
    accepted, client = pair
    client.sendall(b"x" * 1000)
    assert accepted.recv(300, socket.MSG_WAITALL) == b"x" * 300
    assert bytes_read(accepted) == 300
    client.shutdown(socket.SHUT_WR)
    deadline = time.monotonic() + 5
    while len(accepted.recv(1 << 12, socket.MSG_PEEK)) < 700:
        assert time.monotonic() < deadline
    assert bytes_read(accepted) == 300
    assert len(accepted.recv(700, socket.MSG_WAITALL)) == 700
    assert accepted.recv(1) == b""
    assert bytes_read(accepted) == 1000


def _write_until_full(connection: socket.socket, told: Connection) -> None:
    connection.setblocking(False)
    written = 0
    for _ in range(10_000):
        try:
            written += connection.send(b"y" * 1001)
        except BlockingIOError:
            break
    told.send(written)
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_death_of_the_writer_loses_no_byte(pair: Pair) -> None:
    accepted, client = pair
    here, there = multiprocessing.Pipe()
    writer = multiprocessing.get_context("fork").Process(target=_write_until_full, args=(accepted, there))
    writer.start()
    written = here.recv()
    writer.join()
    assert bytes_written(accepted) == written > 0
    got = bytearray(client.recv(written, socket.MSG_WAITALL))
    accepted.send(b"z")
    accepted.shutdown(socket.SHUT_WR)
    while data := client.recv(1 << 16):
        got += data
    assert got == b"y" * written + b"z"
    assert bytes_written(accepted) >= written + 1


def test_an_end_is_no_byte_of_those_written(pair: Pair) -> None:
    accepted, client = pair
    accepted.sendall(b"x" * 700)
    accepted.shutdown(socket.SHUT_WR)
    assert bytes_written(accepted) == 700
    while client.recv(1 << 12):
        pass
    assert bytes_written(accepted) == 700  # the end was acknowledged, too
    assert bytes_read(accepted) == 0


def test_a_reader_does_not_change_what_was_written(pair: Pair) -> None:
    accepted, client = pair
    accepted.setblocking(False)
    written = 0
    try:
        while True:
            written += accepted.send(b"x" * (1 << 16))
    except BlockingIOError:
        pass

    def read() -> None:
        got = 0
        while got < written:
            got += len(client.recv(1 << 9))

    reader = threading.Thread(target=read)
    reader.start()
    counts = {bytes_written(accepted) for _ in range(1000)}
    reader.join()
    assert counts | {bytes_written(accepted)} == {written}


def test_a_connection_is_over_once_both_ends_are(pair: Pair) -> None:
    accepted, client = pair
    assert not is_over(accepted)
    client.shutdown(socket.SHUT_WR)
    assert accepted.recv(1) == b""
    assert not is_over(accepted)  # the client may read on
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    deadline = time.monotonic() + 5
    while not is_over(accepted):
        assert time.monotonic() < deadline


def test_what_is_no_tcp_connection_is_not_counted() -> None:
    here, there = socket.socketpair()
    with here, there:
        for count in (bytes_written, bytes_read, is_over):
            with pytest.raises(OSError, match="supported"):
                count(here)
