"""The socket between router and keeper: packets with descriptors, in order.

A packet that was sent survives its sender.
"""

import errno
import os
import select
import socket
import struct
import time
from array import array
from contextlib import suppress
from dataclasses import replace

from funitel.proto.keeper.messages import MAX_RAW_BYTES, Packet, decode, encode

PACKET_BYTES = MAX_RAW_BYTES + 64
BUFFER_BYTES = 4 << 20  # of packets that were sent and not received yet; the kernel may allow less
_PAUSE_SECONDS = 0.001  # between two attempts to send; descriptors on their way have a limit that no poll waits for
_MAX_FDS = 2  # of a connection, and of a file with the bytes
_BUSY = (errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS)  # there will be room, of descriptors too, once it receives
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user and group


class ChannelLost(Exception):
    """The other end is gone, or takes nothing any more."""


class Channel:
    """One end of a connection between router and keeper."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self.sock = sock

    @classmethod
    def to(cls, path: str) -> "Channel":
        """Connect to the keeper at a path, without waiting for one that accepts nothing; raises OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.setblocking(False)
            sock.connect(path)
        except OSError:
            sock.close()
            raise
        return cls(sock)

    @property
    def peer(self) -> tuple[int, int]:
        """Process id and user id of the other end when it connected."""
        pid, uid, _ = _CREDENTIALS.unpack(
            self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        return pid, uid

    def try_send(self, packet: Packet) -> bool:
        """Send a packet; False if the other end must receive first.

        Raises:
            ChannelLost: it is gone.
        """
        file = None
        try:
            if len(packet.raw) > MAX_RAW_BYTES:
                file = _file_of(packet.raw)
            fds = [*packet.fds, *([] if file is None else [file])]
            data = encode(packet, is_in_file=file is not None)
            if fds:
                socket.send_fds(self.sock, [data], fds)
            else:
                self.sock.send(data)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _BUSY:
                return False
            raise ChannelLost(str(error)) from error
        finally:
            if file is not None:
                os.close(file)
        return True

    def send(self, packet: Packet, seconds: float) -> None:
        """Send a packet, and wait for room so many seconds.

        Raises:
            ChannelLost: the other end is gone, or there is no room for longer.
        """
        end = time.monotonic() + seconds
        while not self.try_send(packet):
            if not self._wait(select.POLLOUT, end):
                raise ChannelLost(f"it has received nothing for {seconds:g} s")
            time.sleep(_PAUSE_SECONDS)

    def receive(self) -> Packet | None:
        """Take the next packet; None if there is none yet. Its descriptors are missing where this process has no room.

        Raises:
            ChannelLost: there will be none: the other end is gone, or it sends what is no packet.
        """
        try:
            try:
                data, fds, flags = self._receive()
            except ConnectionResetError:  # the other end has ended with packets unread; what it sent comes behind this
                data, fds, flags = self._receive()
        except BlockingIOError:
            return None
        except OSError as error:
            raise ChannelLost(str(error)) from error
        if not data:
            _close(fds)
            raise ChannelLost("the other end has closed it")
        if flags & socket.MSG_CTRUNC:
            _close(fds)
            fds = []
        try:
            packet, is_in_file = decode(data)
            if is_in_file and not fds:
                raise ValueError("no descriptor is left for its bytes")
            raw = _content_of(fds.pop()) if is_in_file else packet.raw
        except (ValueError, OSError) as error:
            _close(fds)
            raise ChannelLost(f"{type(error).__name__}: {error}") from error
        return replace(packet, raw=raw, fds=tuple(fds))

    def _receive(self) -> tuple[bytes, list[int], int]:
        # `socket.recv_fds` of Python 3.11 drops the flags: children would inherit the descriptors.
        fds = array("i")
        space = socket.CMSG_SPACE(_MAX_FDS * fds.itemsize)
        data, ancillary, flags, _ = self.sock.recvmsg(PACKET_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        return data, list(fds), flags

    def receive_within(self, seconds: float) -> Packet:
        """Wait for the next packet.

        Raises:
            ChannelLost: none comes in time, or any more.
        """
        end = time.monotonic() + seconds
        while (packet := self.receive()) is None:
            if not self._wait(select.POLLIN, end):
                raise ChannelLost(f"it has sent nothing for {seconds:g} s")
        return packet

    def _wait(self, events: int, end: float) -> bool:
        """Wait for an event of the socket until an instant of the monotonic clock; False if that has passed."""
        left = end - time.monotonic()
        if left <= 0:
            return False
        poller = select.poll()
        poller.register(self.sock, events)
        poller.poll(1000 * left)
        return True

    def close(self) -> None:
        """Close this end."""
        self.sock.close()


def listen(path: str) -> socket.socket:
    """Listen for routers of this user at a path; the file of a keeper that has ended is replaced.

    Raises:
        OSError: another keeper listens there, or the path cannot be used.
    """
    if _is_in_use(path):
        raise OSError(errno.EADDRINUSE, "another keeper listens there")
    with suppress(FileNotFoundError):
        os.unlink(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        before = os.umask(0o177)
        try:
            sock.bind(path)
        finally:
            os.umask(before)
        sock.listen()
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _is_in_use(path: str) -> bool:
    try:
        Channel.to(path).close()
    except BlockingIOError:
        return True  # it listens, and is busy
    except OSError:
        return False
    return True


def _file_of(raw: bytes) -> int:
    """A file in memory with these bytes."""
    file = os.memfd_create("funitel-journal", os.MFD_CLOEXEC)
    try:
        view = memoryview(raw)
        while view:
            view = view[os.write(file, view) :]
    except OSError:
        os.close(file)
        raise
    return file


def _content_of(file: int) -> bytes:
    try:
        size = os.fstat(file).st_size
        pieces, place = [], 0
        while place < size and (piece := os.pread(file, size - place, place)):
            pieces.append(piece)
            place += len(piece)
        return b"".join(pieces)
    finally:
        os.close(file)


def _close(fds: list[int]) -> None:
    for descriptor in fds:
        os.close(descriptor)
