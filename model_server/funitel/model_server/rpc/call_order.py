"""The order of numbered calls: each begins once, behind the one before it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from google.protobuf.message import Message

from funitel.proto.errors import FunitelError, InvalidRequest

# A numbered call is refused when its predecessor is not done after this long: the longest step must fit.
ORDER_TIMEOUT_SECONDS = 300.0
MAX_WAITING = 64  # calls; a router has at most two steps in flight, and a few calls that drop rows
MAX_LATEST = 64  # calls that are remembered; more than a router has in flight
# After a takeover numbers go on behind the next multiple of this, at least MAX_LATEST on: what an earlier router may
# have sent, and is read only then, has a smaller one.
NUMBERS_EACH = 1 << 20


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A call that waits for its turn."""

    call: Message
    begin: Callable[[], None]
    refuse: Callable[[FunitelError], None]
    timeout: asyncio.TimerHandle


class CallOrder:
    """Begins numbered calls strictly in order, from 1; any number may be waiting.

    A call is begun when the one before it has *begun*: what they are handed to keeps them in that order. Calls come on
    one thread, which alone changes anything, but for `look`.
    """

    def __init__(self) -> None:
        self._next = 1
        self._last = 0  # that was begun
        self._latest: list[tuple[int, Message] | None] = [None] * MAX_LATEST  # that were begun, by number modulo length
        self._waiting: dict[int, _Waiting] = {}
        self._is_closed = False  # no call is begun
        self._lock = Lock()  # held while a call becomes one that was begun

    def reset(self) -> None:
        """Start again from 1: a router has (re)connected. Calls still waiting are refused."""
        self.give_up()
        with self._lock:
            self._next, self._last, self._is_closed = 1, 0, False
            self._latest = [None] * MAX_LATEST

    def give_up(self) -> None:
        """Refuse the calls that are waiting."""
        refused, self._waiting = self._waiting, {}
        for step_seq, waiting in refused.items():
            waiting.timeout.cancel()
            waiting.refuse(InvalidRequest(f"step_seq {step_seq} belongs to a numbering that was given up"))

    def look(self) -> tuple[int, list[tuple[int, Message]]]:
        """The number of the newest call that was begun, 0 for none, and the newest calls. From any thread.

        Until `reset` or `open` no call is begun, so that ranks that are all asked know which of them lacks which call.
        """
        with self._lock:
            self._is_closed = True
            latest = [call for call in self._latest if call is not None]
        return self._last, sorted(latest, key=lambda call: call[0])

    def open(self) -> None:
        """Begin calls again after `look`."""
        with self._lock:
            self._is_closed = False

    def check_missing(self, step_seqs: list[int]) -> None:
        """Raise InvalidRequest for calls of these numbers that do not begin where this rank is, or are not in order."""
        left = [step_seq for step_seq in step_seqs if step_seq >= self._next]
        if left != list(range(self._next, self._next + len(left))):
            raise InvalidRequest(f"missing: calls {left} are not those from step_seq {self._next} on, in order")

    def skip_ahead(self) -> int:
        """Go on with numbers that no earlier router has used; returns the one behind which the next call comes.

        It is the same on all ranks that have begun the same calls, also where some of them skipped ahead before.
        """
        with self._lock:
            if self._next == self._last + 1:
                self._next = ((self._last + MAX_LATEST) // NUMBERS_EACH + 1) * NUMBERS_EACH + 1
            return self._next - 1

    @property
    def num_waiting(self) -> int:
        """Calls that wait for their predecessors."""
        return len(self._waiting)

    def begin(
        self,
        step_seq: int | None,
        call: Message,
        begin: Callable[[], None],
        refuse: Callable[[FunitelError], None],
    ) -> None:
        """Call `begin` in the turn of `step_seq`.

        `refuse` is called instead, with InvalidRequest, when the number was used already, its predecessors do not come
        in time, or another router has looked.
        """
        if step_seq is None:
            begin()
        elif step_seq < self._next or step_seq in self._waiting:
            refuse(InvalidRequest(f"step_seq {step_seq} was executed already, {self._next} is next"))
        elif step_seq > self._next and len(self._waiting) >= MAX_WAITING:
            refuse(InvalidRequest(f"{MAX_WAITING} calls wait for step_seq {self._next}, and {step_seq} came"))
        elif step_seq > self._next:
            timeout = asyncio.get_running_loop().call_later(ORDER_TIMEOUT_SECONDS, self._refuse, step_seq)
            self._waiting[step_seq] = _Waiting(call, begin, refuse, timeout)
        else:
            with self._lock:
                is_begun = not self._is_closed
                if is_begun:
                    self._next, self._last = step_seq + 1, step_seq
                    self._latest[step_seq % MAX_LATEST] = step_seq, call
            if is_begun:
                begin()
                if self._waiting:
                    self._begin_next()
            else:
                refuse(InvalidRequest(f"step_seq {step_seq} came after another router has looked: TakeOver comes next"))

    def _begin_next(self) -> None:
        waiting = self._waiting.pop(self._next, None)
        if waiting is not None:
            waiting.timeout.cancel()
            self.begin(self._next, waiting.call, waiting.begin, waiting.refuse)

    def _refuse(self, step_seq: int) -> None:
        waiting = self._waiting.pop(step_seq)
        waiting.refuse(InvalidRequest(f"step_seq {step_seq} came, {self._next} did not"))
