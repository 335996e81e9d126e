"""Begin numbered calls strictly in the order of their numbers, not of arrival. Event loop only."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from funitel.proto.errors import FunitelError, InvalidRequest

# A numbered call is refused when its predecessor is not done after this long: the longest step must fit.
ORDER_TIMEOUT_SECONDS = 300.0
MAX_WAITING = 64  # calls; a router has at most two steps in flight, and a few calls that drop rows


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A call that waits for its turn."""

    begin: Callable[[], None]
    refuse: Callable[[FunitelError], None]
    timeout: asyncio.TimerHandle


class CallOrder:
    """Begins numbered calls strictly in order, from 1; any number may be waiting.

    A call is begun when the one before it has *begun*: what they are handed to keeps them in that order.
    """

    def __init__(self) -> None:
        self._next = 1
        self._waiting: dict[int, _Waiting] = {}

    def reset(self) -> None:
        """Start again from 1: a router has (re)connected. Calls still waiting are refused."""
        refused, self._waiting = self._waiting, {}
        self._next = 1
        for step_seq, waiting in refused.items():
            waiting.timeout.cancel()
            waiting.refuse(InvalidRequest(f"step_seq {step_seq} belongs to a numbering that was given up"))

    def begin(self, step_seq: int | None, begin: Callable[[], None], refuse: Callable[[FunitelError], None]) -> None:
        """Call `begin` in the turn of `step_seq`, at once for None.

        `refuse` is called instead, with InvalidRequest, when the number was used already, or its predecessors do not
        come in time.
        """
        if step_seq is None:
            begin()
        elif step_seq < self._next or step_seq in self._waiting:
            refuse(InvalidRequest(f"step_seq {step_seq} was executed already, {self._next} is next"))
        elif step_seq > self._next and len(self._waiting) >= MAX_WAITING:
            refuse(InvalidRequest(f"{MAX_WAITING} calls wait for step_seq {self._next}, and {step_seq} came"))
        elif step_seq > self._next:
            timeout = asyncio.get_running_loop().call_later(ORDER_TIMEOUT_SECONDS, self._refuse, step_seq)
            self._waiting[step_seq] = _Waiting(begin, refuse, timeout)
        else:
            self._next += 1
            begin()
            self._begin_due()

    def _begin_due(self) -> None:
        while (waiting := self._waiting.pop(self._next, None)) is not None:
            self._next += 1
            waiting.timeout.cancel()
            waiting.begin()

    def _refuse(self, step_seq: int) -> None:
        waiting = self._waiting.pop(step_seq)
        waiting.refuse(InvalidRequest(f"step_seq {step_seq} came, {self._next} did not"))
