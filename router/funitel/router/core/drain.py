"""The drain at the end of a router's service: requests in flight may finish, incoming requests are refused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from funitel.proto.errors import ShuttingDown

SHUTTING_DOWN = "it lets running requests finish and takes no others"


class Drain:
    """Requests in flight, and whether more are admitted.

    `on_end` is called when it begins, or hands over: clients cannot reach the requests in flight any more.
    """

    def __init__(self, on_end: Callable[[], None] = lambda: None) -> None:
        self.has_begun = False
        self.ends_connections = False  # each with its next answer
        self.num_running = 0
        self._on_end = on_end

    def begin(self) -> None:
        """Admit no request from now on."""
        self.has_begun = self.ends_connections = True
        self._on_end()

    def hand_over(self) -> None:
        """End connections with their next answer: clients reconnect to another router on the same port."""
        self.ends_connections = True
        self._on_end()

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request while the block runs. Raises ShuttingDown once the drain has begun."""
        if self.has_begun:
            raise ShuttingDown(SHUTTING_DOWN)
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
