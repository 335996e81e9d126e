"""What the kernel knows of a TCP connection: how many bytes were ever written to it, and read from it. Linux only.

A connection outlives the process that wrote to it as long as another one holds its descriptor. Source: tcp(7),
include/uapi/linux/tcp.h.
"""

import fcntl
import socket
import struct

_INFO_BYTES = 512
_BYTES_ACKED, _BYTES_RECEIVED = 120, 128  # offsets in struct tcp_info, each of a u64
_STATE_OFFSET = 0
_CLOSE_WAIT, _LAST_ACK, _CLOSING, _TIME_WAIT = 8, 9, 11, 6  # states behind the peer's FIN, which counts as a byte
_SIOCINQ, _SIOCOUTQ = 0x541B, 0x5411
_MAX_READS = 1000


def _counter(info: bytes, offset: int) -> int:
    value: int = struct.unpack_from("<Q", info, offset)[0]
    return value


def _info(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)


def _queue(sock: socket.socket, request: int) -> int:
    value: int = struct.unpack("i", fcntl.ioctl(sock.fileno(), request, b"\0" * 4))[0]
    return value


def bytes_written(sock: socket.socket) -> int:
    """The bytes that were ever written to an accepted connection, by any process.

    Those that the peer has acknowledged, and those that wait for it. An acknowledgement between the two readings would
    count bytes twice or never, so that they are read until nothing has come between.

    Raises:
        OSError: it is no TCP connection, or the kernel does not count.
    """
    for _ in range(_MAX_READS):
        acked = _counter(_info(sock), _BYTES_ACKED)
        waiting = _queue(sock, _SIOCOUTQ)
        if _counter(_info(sock), _BYTES_ACKED) == acked:
            return acked + waiting
    raise OSError("the peer acknowledges bytes faster than they can be counted")


def bytes_read(sock: socket.socket) -> int:
    """The bytes that any process has ever read from an accepted connection.

    Raises:
        OSError: it is no TCP connection, or the kernel does not count.
    """
    for _ in range(_MAX_READS):
        info = _info(sock)
        received = _counter(info, _BYTES_RECEIVED)
        unread = _queue(sock, _SIOCINQ)
        if _counter(_info(sock), _BYTES_RECEIVED) == received:
            has_ended = info[_STATE_OFFSET] in (_CLOSE_WAIT, _LAST_ACK, _CLOSING, _TIME_WAIT)
            return received - unread - has_ended
    raise OSError("bytes come in faster than they can be counted")


def counts_bytes() -> bool:
    """Whether this kernel counts bytes of connections, tried on one of its own."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname()) as near,
        ):
            accepted, _ = listener.accept()
            with accepted:
                near.sendall(b"12345")
                accepted.sendall(b"123")
                return accepted.recv(2) == b"12" and bytes_written(accepted) == 3 and bytes_read(accepted) == 2
    except (OSError, struct.error):
        return False
