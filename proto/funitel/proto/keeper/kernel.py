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
_FIN_WAIT_1, _FIN_WAIT_2, _TIME_WAIT, _CLOSE, _CLOSE_WAIT, _LAST_ACK, _CLOSING = 4, 5, 6, 7, 8, 9, 11
# A FIN counts as a byte.
_SENT_FIN = (_FIN_WAIT_1, _FIN_WAIT_2, _CLOSING, _LAST_ACK, _TIME_WAIT)
_GOT_FIN = (_CLOSE_WAIT, _LAST_ACK, _CLOSING, _TIME_WAIT)
_SIOCINQ, _SIOCOUTQ = 0x541B, 0x5411
_MAX_READS = 1000
_NO_LINGER = struct.pack("ii", 1, 0)  # struct linger: on, for no time


def _counter(info: bytes, offset: int) -> int:
    value: int = struct.unpack_from("<Q", info, offset)[0]
    return value


def _info(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)


def _queue(sock: socket.socket, request: int) -> int:
    value: int = struct.unpack("i", fcntl.ioctl(sock.fileno(), request, b"\0" * 4))[0]
    return value


def _counts(sock: socket.socket, counter: int, queue: int) -> tuple[int, int, int]:
    """A counter, the queue that belongs to it, and the state, of one moment: read until nothing has come between."""
    for _ in range(_MAX_READS):
        info = _info(sock)
        count = _counter(info, counter)
        waiting = _queue(sock, queue)
        if _counter(_info(sock), counter) == count:
            return count, waiting, info[_STATE_OFFSET]
    raise OSError("bytes come and go faster than they can be counted")


def bytes_written(sock: socket.socket) -> int:
    """The bytes that were ever written to an accepted connection, by any process.

    Those that the peer has acknowledged, and those that wait for it; the end that `shutdown` sends is none of them.

    Raises:
        OSError: it is no TCP connection, or the kernel does not count.
    """
    acked, waiting, state = _counts(sock, _BYTES_ACKED, _SIOCOUTQ)
    return acked + waiting - (state in _SENT_FIN)


def bytes_read(sock: socket.socket) -> int:
    """The bytes that any process has ever read from an accepted connection.

    Raises:
        OSError: it is no TCP connection, or the kernel does not count.
    """
    received, unread, state = _counts(sock, _BYTES_RECEIVED, _SIOCINQ)
    return received - unread - (state in _GOT_FIN)


def reset_on_close(sock: socket.socket) -> None:
    """Have the peer get a reset, in place of an end, once the last duplicate of a connection is closed."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)


def is_over(sock: socket.socket) -> bool:
    """Whether a connection has ended for good, both ways: its peer has reset it, or both ends have closed it."""
    return _info(sock)[_STATE_OFFSET] == _CLOSE


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
