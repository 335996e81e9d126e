"""Paused requests: they compute nothing until they are resumed, behind the tokens they have. Event loop only.

A paused sequence leaves queue and batch as a preempted one does: its blocks are free, though the prefix cache may keep
their content. Its deadline counts, and so does the request in the bounds on requests in flight. It comes back under a
new id, so nothing on the way to or from the shards can be mistaken for it. Noise depends on seed and position only, so
its text is the one it would have been.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from funitel.proto.errors import DeadlineExceeded, FunitelError, InvalidRequest, NotReady
from funitel.router.core.request import Sequence
from funitel.router.core.stream import TokenStream
from funitel.router.engine.request_table import RequestTable
from funitel.router.scheduler.admission import InFlight
from funitel.router.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class HeldSequence:
    """A paused sequence, as it will go on."""

    sequence: Sequence
    timer: asyncio.TimerHandle | None  # of its deadline


class PausedRequests:
    """The paused requests of one `Inference`.

    Args:
        tables: those in which its requests are while they are not paused.
        resume: lets a sequence go on, under a new id, and its stream with it.
        can_resume: whether the shards can resume a sequence behind tokens.
        metrics: count expiries and cancels.
    """

    def __init__(
        self,
        tables: Callable[[], Iterable[RequestTable]],
        resume: Callable[[Sequence, TokenStream], None],
        can_resume: Callable[[], bool],
        metrics: Metrics,
    ) -> None:
        self._tables = tables
        self._resume = resume
        self._can_resume = can_resume
        self._metrics = metrics
        self._is_closed = False
        self.held: dict[TokenStream, HeldSequence] = {}
        self._num_of_key: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self.held)

    def __contains__(self, stream: TokenStream) -> bool:
        return stream in self.held

    def in_flight(self, key: bytes) -> InFlight:
        """Count the paused requests: all, and those of an API key."""
        return InFlight(len(self.held), self._num_of_key.get(key, 0))

    def pause(self, stream: TokenStream) -> bool:
        """Let a request compute nothing from its next step on; whether it did until now.

        Raises:
            InvalidRequest: the shards speak plain TGI and could not resume it.
            NotReady: the router is draining.
        """
        for table in self._tables():
            sequence = table.find(stream)
            if sequence is not None:
                if self._is_closed:
                    raise NotReady("the server is shutting down: no request can be paused")
                if not self._can_resume():
                    raise InvalidRequest("these shards cannot resume a request, so none can be paused")
                table.withdraw(sequence)
                self._hold(sequence, stream)
                return True
        return False

    def resume(self, stream: TokenStream) -> bool:
        """Let a paused request go on; whether it was paused."""
        held = self._take(stream)
        if held is None:
            return False
        self._resume(held.sequence, stream)
        return True

    def close(self) -> None:
        """Let every paused request go on, and pause none from now on."""
        self._is_closed = True
        for stream in tuple(self.held):
            self.resume(stream)

    def fail_all(self, error: FunitelError) -> None:
        """End every paused request; clients get the error."""
        for stream in tuple(self.held):
            self._take(stream)
            stream.deliver(error)

    def _hold(self, sequence: Sequence, stream: TokenStream) -> None:
        held = sequence.afresh()
        held.estimated_seconds = 0.0  # its wait would say nothing about the estimate
        deadline, timer = held.request.deadline, None
        if deadline is not None:
            timer = asyncio.get_running_loop().call_later(deadline - time.monotonic(), self._expire, stream)
        self.held[stream] = HeldSequence(held, timer)
        self._num_of_key[stream.request.key] += 1
        stream.move(partial(self._cancel, stream), "paused")

    def _take(self, stream: TokenStream) -> HeldSequence | None:
        held = self.held.pop(stream, None)
        if held is None:
            return None
        if held.timer is not None:
            held.timer.cancel()
        key = stream.request.key
        self._num_of_key[key] -= 1
        if not self._num_of_key[key]:
            del self._num_of_key[key]
        return held

    def _cancel(self, stream: TokenStream) -> None:
        if self._take(stream) is not None:
            self._metrics.count_cancelled()

    def _expire(self, stream: TokenStream) -> None:
        if self._take(stream) is not None:
            self._metrics.count_expired("waiting")
            stream.deliver(DeadlineExceeded(f"the deadline passed after {stream.num_tokens} tokens, while paused"))
