"""A memory budget for bytes buffered for clients, over all connections; past it the largest user is disconnected.

The largest and not the newest, so that a few clients with large buffers do not keep others out. Event loop only.
"""

from typing import Protocol

CLIENT = "funitel.client"  # in a request's scope: the Client at the other end, where it came by a socket
TOO_LARGE = "funitel.body_too_large"  # in a scope: its body announced more than it may have, and ends early


class Client(Protocol):
    """The client at the other end of a connection."""

    def disconnect(self, reason: str) -> None:
        """End the connection at once."""

    def keep_unread(self, num_bytes: int) -> None:
        """Add bytes that wait for a slow reader, or subtract; past its limit it is disconnected."""

    def keep_body(self, num_bytes: int) -> None:
        """Add bytes of a body that is not complete, or subtract."""


class MemoryBudget:
    """Bytes buffered for each client, at most `limit` in all; the largest user is disconnected for `reason`."""

    def __init__(self, limit: int, reason: str) -> None:
        self.num_bytes = 0  # of all clients
        self._limit = limit
        self._reason = reason
        self._bytes_of: dict[Client, int] = {}

    def add(self, client: Client, num_bytes: int) -> None:
        """Add bytes of a client, or subtract; a forgotten client stays at 0."""
        before = self._bytes_of.pop(client, 0)
        after = max(0, before + num_bytes)
        self.num_bytes += after - before
        if after:
            self._bytes_of[client] = after
        while self.num_bytes > self._limit:
            largest = max(self._bytes_of, key=self._bytes_of.__getitem__)
            self.forget(largest)
            largest.disconnect(self._reason)

    def forget(self, client: Client) -> None:
        """Release all bytes of a client."""
        self.num_bytes -= self._bytes_of.pop(client, 0)
