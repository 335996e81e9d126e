"""The request table: admission, cancellation, deadlines and draining of requests in flight. Event loop only."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial

from funitel.proto.errors import DeadlineExceeded, FunitelError, Overloaded
from funitel.router.core.request import Request, Sequence
from funitel.router.core.stream import TokenStream
from funitel.router.scheduler.admission import Admission, InFlight, SequenceHolder
from funitel.router.telemetry.metrics import Metrics

MAX_MEDIA_BYTES = 4 << 30  # of processed images; a large one has some megabytes


class RequestTable:
    """The streams of the sequences of one holder, by id, each with the timer of its deadline.

    Args:
        holder: has the sequences.
        metrics: counts refusals, expiries and cancels.
        admission: bounds and estimates.
        enqueue: queues a sequence that was admitted or adopted.
        wake: called when sequences have left early, so that they are in no later step.
        release: called with the id of a sequence that has left, if it was to have an adapter or media items.
    """

    def __init__(
        self,
        holder: SequenceHolder,
        metrics: Metrics,
        admission: Admission,
        enqueue: Callable[[Sequence], None],
        wake: Callable[[], None],
        release: Callable[[int], None] = lambda sequence_id: None,
    ) -> None:
        self.streams: dict[int, TokenStream] = {}
        self._sequences: dict[int, Sequence] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._num_of_key: Counter[bytes] = Counter()
        self._num_of_media: Counter[bytes] = Counter()  # requests with an item, by its key
        self._media_bytes = 0  # of all items of requests that are here
        self._left = asyncio.Event()  # set whenever a request ends
        self._holder = holder
        self._metrics = metrics
        self._admission = admission
        self._enqueue = enqueue
        self._wake = wake
        self._release = release

    def __len__(self) -> int:
        return len(self.streams)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self.streams

    def in_flight(self, key: bytes) -> InFlight:
        """Count the requests: all, and those of an API key."""
        return InFlight.of(self._num_of_key, key)

    def admit(self, sequence: Sequence, in_flight: InFlight) -> TokenStream:
        """Queue a sequence of a new id; a waiting one of a key with more may be refused in its place.

        Raises: as `check`.
        """
        displaced = self.check(sequence, in_flight)
        if displaced is not None:
            position = self._admission.position_of(displaced, self._holder)
            self._metrics.count_refused("displaced")
            lost = ": its place went to an API key that has fewer"
            self.fail(displaced, Overloaded(lost, position.position, position.wait_seconds, "displaced"))
        stream = TokenStream(sequence.request, cancel=partial(self._cancel, sequence))
        self._add(sequence, stream)
        return stream

    def adopt(self, sequence: Sequence, stream: TokenStream) -> None:
        """Go on with a sequence that was admitted elsewhere."""
        stream.move(partial(self._cancel, sequence))
        self._add(sequence, stream)

    def check(self, sequence: Sequence, in_flight: InFlight) -> Sequence | None:
        """Ask admission for a place; return the waiting sequence that must leave for it, if one must.

        Args:
            sequence: it is not counted yet.
            in_flight: requests that the bounds count, here and elsewhere.

        Raises:
            Overloaded: there is no place for it, or it would wait longer than it may.
            DeadlineExceeded: its deadline has passed.
        """
        if sequence.request.deadline is not None and sequence.request.deadline <= sequence.arrived:
            self._metrics.count_expired("arriving")
            raise DeadlineExceeded("the deadline passed before the request was queued")
        with self._counting_refusals():
            self._check_media(sequence.request)
            return self._admission.check(sequence, in_flight, self._holder)

    def _check_media(self, request: Request) -> None:
        """Raise Overloaded where the media of all requests would take too much memory: each is kept to its end."""
        fresh = {each.input.key: len(each.input.values) for each in request.media}
        needed = sum(size for key, size in fresh.items() if key not in self._num_of_media)
        if needed and self._media_bytes + needed > MAX_MEDIA_BYTES and self._media_bytes:
            raise Overloaded(f": images of requests take at most {MAX_MEDIA_BYTES} bytes at once", reason="media")

    def _count_media(self, request: Request, by: int) -> None:
        """Add the media of a request that comes, or subtract those of one that has left."""
        for each in {each.input.key: each.input for each in request.media}.values():
            before = self._num_of_media.pop(each.key, 0)
            if before + by:
                self._num_of_media[each.key] = before + by
            if not before or not before + by:
                self._media_bytes += by * len(each.values)

    def check_count(self, sequence: Sequence, in_flight: InFlight) -> None:
        """Check the bounds on requests alone, before the prompt is known; raises Overloaded."""
        with self._counting_refusals():
            self._admission.check_count(sequence, in_flight, self._holder)

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except Overloaded as refused:
            self._metrics.count_refused(refused.reason)
            raise

    def _add(self, sequence: Sequence, stream: TokenStream) -> None:
        self.streams[sequence.id] = stream
        self._sequences[sequence.id] = sequence
        stream.sequence_id = sequence.id
        self._num_of_key[stream.request.key] += 1
        self._count_media(stream.request, 1)
        self._metrics.count_given()
        deadline = sequence.request.deadline
        if deadline is not None:
            delay = deadline - time.monotonic()
            self._timers[sequence.id] = asyncio.get_running_loop().call_later(delay, self._expire, sequence)
        self._enqueue(sequence)

    def remove(self, sequence: Sequence) -> TokenStream | None:
        """Forget a sequence that has ended; return its stream, if it is here."""
        return self._remove(sequence.id)

    def _remove(self, sequence_id: int) -> TokenStream | None:
        self._left.set()
        timer = self._timers.pop(sequence_id, None)
        if timer is not None:
            timer.cancel()
        stream = self.streams.pop(sequence_id, None)
        if stream is not None:
            del self._sequences[sequence_id]
            key = stream.request.key
            self._count_media(stream.request, -1)
            self._num_of_key[key] -= 1
            if not self._num_of_key[key]:
                del self._num_of_key[key]
            if stream.request.adapter is not None or stream.request.media:
                self._release(sequence_id)
        return stream

    def find(self, stream: TokenStream) -> Sequence | None:
        """Return the sequence of a stream, if it is here."""
        return self._sequences[stream.sequence_id] if self.streams.get(stream.sequence_id) is stream else None

    def withdraw(self, sequence: Sequence) -> None:
        """Take a sequence that is here out of every later step; its stream goes on elsewhere."""
        self.remove(sequence)
        self._holder.remove(sequence)
        self._wake()

    def fail(self, sequence: Sequence, error: FunitelError) -> None:
        """End a sequence, wherever it is; its client gets the error."""
        self._holder.remove(sequence)
        stream = self.remove(sequence)
        if stream is not None:
            stream.deliver(error)

    def fail_all(self, error: FunitelError, but: Container[int] = ()) -> None:
        """End every sequence, waiting ones too, except those of the ids in `but`."""
        for sequence in (*self._holder.running.values(), *self._holder.waiting):
            self.fail(sequence, error)
        for i in [i for i in self.streams if i not in but]:  # ended, and not delivered
            stream = self._remove(i)
            assert stream is not None
            stream.deliver(error)
        self._wake()

    def _expire(self, sequence: Sequence) -> None:
        """End a sequence at its deadline; it is in no later step."""
        is_running = sequence.id in self._holder.running
        self._metrics.count_expired("running" if is_running else "waiting")
        done = f"after {len(sequence.output_ids)} tokens" if sequence.output_ids else "before its first token"
        self.fail(sequence, DeadlineExceeded(f"the deadline passed {done}"))
        self._wake()

    def _cancel(self, sequence: Sequence) -> None:
        """Take a sequence out of every later step."""
        self.withdraw(sequence)
        self._metrics.count_cancelled()

    async def drained(self) -> None:
        """Return once no request is here."""
        while self.streams:
            self._left.clear()
            await self._left.wait()
