"""Numbered calls begin strictly in their order, whatever the order they come in. Event loop only."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from funitel.proto.errors import FunitelError, InvalidRequest

# A numbered call whose predecessor is not done after this long is refused: the longest step must fit.
ORDER_TIMEOUT_SECONDS = 300.0
MOST_WAITING = 64  # calls; a router has at most two steps under way, and a few calls that drop rows


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A call that waits for its turn."""

    begin: Callable[[], None]
    refuse: Callable[[FunitelError], None]
    timeout: asyncio.TimerHandle


class StepOrder:
    """Begins numbered calls strictly in order, from 1; any number may be waiting.

    A call is begun when the one before it has *begun*: what they are handed to keeps them in that order.
    """

    def __init__(self) -> None:
        self._next = 1
        self._waiting: dict[int, _Waiting] = {}

    def reset(self) -> None:
        """Start again from 1: a router has (re)connected. Calls still waiting are refused."""
        given_up, self._waiting = self._waiting, {}
        self._next = 1
        for step_seq, waiting in given_up.items():
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
        elif step_seq > self._next and len(self._waiting) >= MOST_WAITING:
            refuse(InvalidRequest(f"{MOST_WAITING} calls wait for step_seq {self._next}, and {step_seq} came"))
        elif step_seq > self._next:
            timeout = asyncio.get_running_loop().call_later(ORDER_TIMEOUT_SECONDS, self._give_up, step_seq)
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

    def _give_up(self, step_seq: int) -> None:
        waiting = self._waiting.pop(step_seq)
        waiting.refuse(InvalidRequest(f"step_seq {step_seq} came, {self._next} did not"))
