"""Who is let in, and how those inside leave before their time: bounds, deadlines, cancels. Event loop only.

The same for an engine, whose sequences run, and for the lobby, where they wait for a replica to run on.

Ends requests whose time has passed, at that instant. Event loop only.

Requests that have not ended, of one engine or of the lobby: where answers go, and by when. Event loop only.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Protocol

from funitel.proto.errors import DeadlineExceeded, FunitelError, Overloaded
from funitel.router.core.request import Sequence
from funitel.router.core.stream import TokenStream
from funitel.router.scheduler.admission import Admission, InFlight
from funitel.router.scheduler.cost.ttft_estimate import Forecaster
from funitel.router.scheduler.waiting_queue import FairShares, WaitingQueue
from funitel.router.telemetry.metrics import Metrics


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


class Holder(Protocol):
    """Whoever has the sequences: a scheduler, or the lobby where none runs."""

    waiting: WaitingQueue
    shares: FairShares

    @property
    def forecaster(self) -> Forecaster | None:
        """What foresees first tokens, where that can be done."""
        ...

    @property
    def running(self) -> Mapping[int, Sequence]:
        """Those that run, by id."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is."""
        ...


class Requests:
    """Streams by the ids of their sequences. `expire` is called at the deadline of one that has one."""

    def __init__(self, holder: Holder, expire: Callable[[Sequence], None]) -> None:
        self.streams: dict[int, TokenStream] = {}
        self._num_of_key: Counter[bytes] = Counter()
        self._holder = holder
        self._deadlines = Deadlines(expire)
        self._left = asyncio.Event()  # set whenever a request ends

    def __len__(self) -> int:
        return len(self.streams)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self.streams

    def in_flight(self, key: bytes) -> InFlight:
        """How many there are: all, and those of an API key."""
        return InFlight(len(self.streams), self._num_of_key[key])

    def add(self, sequence: Sequence, stream: TokenStream) -> None:
        """Keep the stream of a sequence until it has ended."""
        self.streams[sequence.id] = stream
        self._num_of_key[stream.request.key] += 1
        self._deadlines.watch(sequence)

    def forget(self, sequence: Sequence) -> TokenStream | None:
        """Let go of a sequence that has ended; its stream, if it is here."""
        return self._take_out(sequence.id)

    def fail(self, sequence: Sequence, error: FunitelError) -> None:
        """End a sequence, wherever it is; its client gets the error."""
        self._holder.remove(sequence)
        stream = self.forget(sequence)
        if stream is not None:
            stream.deliver(error)

    def fail_all(self, error: FunitelError, but: Container[int] = ()) -> None:
        """End every sequence, waiting ones too, but those of the ids in `but`."""
        for sequence in (*self._holder.running.values(), *self._holder.waiting):
            self.fail(sequence, error)
        for i in [i for i in self.streams if i not in but]:  # ended, and not told
            stream = self._take_out(i)
            assert stream is not None
            stream.deliver(error)

    def _take_out(self, sequence_id: int) -> TokenStream | None:
        self._left.set()
        self._deadlines.forget(sequence_id)
        stream = self.streams.pop(sequence_id, None)
        if stream is not None:
            key = stream.request.key
            self._num_of_key[key] -= 1
            if not self._num_of_key[key]:
                del self._num_of_key[key]
        return stream

    async def drained(self) -> None:
        """Return once no request is here."""
        while self.streams:
            self._left.clear()
            await self._left.wait()


class Reception:
    """The requests of one holder. `wake` is called when one has left early, so that it is in no later step."""

    def __init__(self, holder: Holder, metrics: Metrics, admission: Admission, wake: Callable[[], None]) -> None:
        self.requests = Requests(holder, self._expire)
        self._holder = holder
        self._metrics = metrics
        self._admission = admission
        self._wake = wake

    def accept(self, sequence: Sequence, in_flight: InFlight | None = None) -> TokenStream:
        """Find a place for a sequence whose id is new here; one of a key with more may lose its own.

        The bounds on requests hold for `in_flight`, when others than those here count too.

        Raises:
            Overloaded: there is no place for it, or it would wait longer than it may.
            DeadlineExceeded: its deadline has passed.
        """
        self._admit(sequence, in_flight or self.requests.in_flight(sequence.request.key))
        stream = TokenStream(sequence.request, cancel=partial(self._cancel, sequence))
        self.requests.add(sequence, stream)
        return stream

    def take_over(self, sequence: Sequence, stream: TokenStream) -> None:
        """Take in what was accepted elsewhere, without asking for a place."""
        stream.move(partial(self._cancel, sequence))
        self.requests.add(sequence, stream)

    def check_place(self, sequence: Sequence, in_flight: InFlight) -> Sequence | None:
        """Return who must leave the queue for a sequence, if somebody must; raises as `accept`."""
        if sequence.request.deadline is not None and sequence.request.deadline <= sequence.arrived:
            self._metrics.count_expired("arriving")
            raise DeadlineExceeded("the deadline passed before the request was queued")
        holder = self._holder
        try:
            return self._admission.check(
                sequence, in_flight, holder.waiting, holder.shares, holder.running.values(), holder.forecaster
            )
        except Overloaded as refused:
            self._metrics.count_refused(refused.reason)
            raise

    def _admit(self, sequence: Sequence, in_flight: InFlight) -> None:
        """Make sure that there is a place for a sequence."""
        leaving = self.check_place(sequence, in_flight)
        if leaving is not None:
            place = self._admission.place_of(leaving, self._holder.waiting, self._holder.running.values())
            self._metrics.count_refused("displaced")
            lost = ": its place went to an API key that has fewer"
            self.requests.fail(leaving, Overloaded(lost, place.position, place.wait_seconds, "displaced"))

    def _expire(self, sequence: Sequence) -> None:
        """End a sequence whose deadline has passed; it is in no later step."""
        is_running = sequence.id in self._holder.running
        self._metrics.count_expired("running" if is_running else "waiting")
        done = f"after {len(sequence.output_ids)} tokens" if sequence.output_ids else "before its first token"
        self.requests.fail(sequence, DeadlineExceeded(f"the deadline passed {done}"))
        self._wake()

    def _cancel(self, sequence: Sequence) -> None:
        """Take a sequence out of every later step."""
        self.requests.forget(sequence)
        self._holder.remove(sequence)
        self._metrics.count_cancelled()
        self._wake()
