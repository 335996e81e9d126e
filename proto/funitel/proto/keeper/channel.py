"""The socket between router and keeper: packets with descriptors, in order.

A packet that was sent survives its sender.
"""

import os
import select
import socket
import struct
import time
from contextlib import suppress
from dataclasses import replace

from funitel.proto.keeper.messages import MAX_RAW_BYTES, Packet, decode, encode

PACKET_BYTES = MAX_RAW_BYTES + 64
BUFFER_BYTES = 4 << 20  # of packets that were sent and not received yet; the kernel may allow less
_MAX_FDS = 2  # of a connection, and of a file with the bytes
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
        """Connect to the keeper at a path; raises OSError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
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
            left = end - time.monotonic()
            if left <= 0:
                raise ChannelLost(f"it has received nothing for {seconds:g} s")
            poller = select.poll()
            poller.register(self.sock, select.POLLOUT)
            poller.poll(1000 * left)

    def receive(self) -> Packet | None:
        """Take the next packet; None if there is none yet.

        Raises:
            ChannelLost: there will be none: the other end is gone, or it sends what is no packet.
        """
        try:
            data, fds, _, _ = socket.recv_fds(self.sock, PACKET_BYTES, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except OSError as error:
            raise ChannelLost(str(error)) from error
        if not data:
            _close(fds)
            raise ChannelLost("the other end has closed it")
        try:
            packet, is_in_file = decode(data)
            raw = _content_of(fds.pop()) if is_in_file else packet.raw
        except (ValueError, IndexError, OSError) as error:
            _close(fds)
            raise ChannelLost(f"{type(error).__name__}: {error}") from error
        return replace(packet, raw=raw, fds=tuple(fds))

    def receive_within(self, seconds: float) -> Packet:
        """Wait for the next packet.

        Raises:
            ChannelLost: none comes in time, or any more.
        """
        end = time.monotonic() + seconds
        while (packet := self.receive()) is None:
            left = end - time.monotonic()
            if left <= 0:
                raise ChannelLost(f"it has sent nothing for {seconds:g} s")
            poller = select.poll()
            poller.register(self.sock, select.POLLIN)
            poller.poll(1000 * left)
        return packet

    def close(self) -> None:
        """Close this end."""
        self.sock.close()


def listen(path: str) -> socket.socket:
    """Listen for routers of this user at a path; a file that is there is replaced. Raises OSError."""
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
