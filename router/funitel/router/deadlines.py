"""Ends requests whose time has passed, at that instant. Event loop only."""

import asyncio
import time
from collections.abc import Callable

from funitel.router.sequence import Sequence


class Deadlines:
    """A timer for each sequence that has a deadline; `expire` is called when it goes off."""

    def __init__(self, expire: Callable[[Sequence], None]) -> None:
        self._expire = expire
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def watch(self, sequence: Sequence) -> None:
        """Set the timer of a sequence, if it has a deadline."""
        deadline = sequence.request.deadline
        if deadline is not None:
            delay = deadline - time.monotonic()
            self._timers[sequence.id] = asyncio.get_running_loop().call_later(delay, self._expire, sequence)

    def forget(self, sequence_id: int) -> None:
        """Stop the timer of a sequence that has ended."""
        timer = self._timers.pop(sequence_id, None)
        if timer is not None:
            timer.cancel()
