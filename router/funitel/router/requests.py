"""Requests that have not ended, of one engine or of the lobby: where answers go, and by when. Event loop only."""

import asyncio
from collections import Counter
from collections.abc import Callable, Container, Mapping
from typing import Protocol

from funitel.proto.errors import FunitelError
from funitel.router.admission import InFlight
from funitel.router.deadlines import Deadlines
from funitel.router.forecast import Forecaster
from funitel.router.sequence import Sequence
from funitel.router.stream import TokenStream
from funitel.router.waiting import Shares, WaitingQueue


class Holder(Protocol):
    """Whoever has the sequences: a scheduler, or the lobby where none runs."""

    waiting: WaitingQueue
    shares: Shares

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
