"""Bytes that are kept for clients, over all connections: bounded, and where there are too many the largest share goes.

It is the largest and not the newest that has to go: a few clients that make the most of their connections keep nobody
else from using one. Event loop only.
"""

from typing import Protocol

CLIENT = "funitel.client"  # in a request's scope: the Client at the other end, where it came by a socket


class Client(Protocol):
    """Whoever is at the other end of a connection."""

    def cut(self, reason: str) -> None:
        """End the connection at once."""
        ...

    def keep_unread(self, num_bytes: int) -> None:
        """Note that so many bytes more wait until it reads, or fewer; where they are too many, it is cut."""
        ...

    def keep_body(self, num_bytes: int) -> None:
        """Note that so many bytes more are kept of a body that is not whole, or fewer."""
        ...


class MemoryBudget:
    """How many bytes are kept for each client, `most` in all; `reason` is what the one with most of them is cut for."""

    def __init__(self, most: int, reason: str) -> None:
        self.num_bytes = 0  # for all
        self._most = most
        self._reason = reason
        self._kept: dict[Client, int] = {}

    def add(self, client: Client, num_bytes: int) -> None:
        """Note that so many bytes more are kept for a client, or fewer; what was forgotten is not taken off again."""
        before = self._kept.pop(client, 0)
        after = max(0, before + num_bytes)
        self.num_bytes += after - before
        if after:
            self._kept[client] = after
        while self.num_bytes > self._most:
            largest = max(self._kept, key=self._kept.__getitem__)
            self.forget(largest)
            largest.cut(self._reason)

    def forget(self, client: Client) -> None:
        """Note that nothing is kept for a client any more."""
        self.num_bytes -= self._kept.pop(client, 0)
