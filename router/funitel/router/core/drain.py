"""The drain at the end of a router's service: requests in flight may finish, incoming requests are refused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from funitel.proto.errors import ShuttingDown

SHUTTING_DOWN = "it lets running requests finish and takes no others"


class Drain:
    """Requests in flight, and whether more are admitted. `has_begun` says that the router will end: it is not ready.

    What `on_end` was given is called when it begins, or hands over: clients cannot reach the requests in flight any
    more.
    """

    def __init__(self, *on_end: Callable[[], None]) -> None:
        self.has_begun = False
        self.ends_connections = False  # each with its next answer
        self.refuses = False
        self.num_running = 0
        self._on_end = list(on_end)

    def on_end(self, call: Callable[[], None]) -> None:
        """Call a function too when it begins, or hands over."""
        self._on_end.append(call)

    def announce(self) -> None:
        """Admit requests for a while yet, and end connections with their next answer: clients find another server."""
        self.has_begun = self.ends_connections = True

    def begin(self) -> None:
        """Admit no request from now on."""
        self.announce()
        self.refuses = True
        self._tell()

    def hand_over(self) -> None:
        """End connections with their next answer: clients reconnect to another router on the same port."""
        self.ends_connections = True
        self._tell()

    def _tell(self) -> None:
        for call in self._on_end:
            call()

    @contextmanager
    def admitted(self, *, was_admitted: bool = False) -> Iterator[None]:
        """Count a request while the block runs.

        Raises ShuttingDown once requests are refused; not for one that another router has admitted.
        """
        if self.refuses and not was_admitted:
            raise ShuttingDown(SHUTTING_DOWN)
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
