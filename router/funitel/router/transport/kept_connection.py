"""A connection that outlives its router: the journal of its requests, and a transport that says no byte twice.

`written` counts the bytes of all answers on the connection, also those that an earlier router has written. A request
that is taken over is answered anew, and the first bytes of its answer, as many as the kernel has got, are dropped.
"""

import asyncio
import logging
import secrets
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from funitel.router.core.journal import KEY, KeptJournal

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 0.05  # between two looks whether the bytes of an answer were given to the kernel
START, INPUT_END, ANSWER, HEAD, UNKEPT_ANSWER = "start", "input_end", "answer", "head", "unkept"


class Keeping(Protocol):
    """What holds connections and journals beyond the life of this process."""

    def put_request(self, connection: int, number: int, raw: bytes) -> None:
        """Hand over the bytes of a request that is whole."""

    def put_facts(self, connection: int, number: int, facts: dict[str, Any]) -> None:
        """Hand over facts of a request."""

    def done(self, connection: int, number: int, settled: "Settled") -> None:
        """Say that the answer of a request was given to the kernel."""

    def release(self, connection: int) -> None:
        """Say that a connection has ended."""

    def put_partial(self, connection: int, raw: bytes) -> None:
        """Hand over the bytes of a request that is not whole."""


class Settled(NamedTuple):
    """How far a connection is: the last request that was answered, and bytes up to it and to the end of its answer."""

    number: int = 0
    input_end: int = 0
    written: int = 0

    def encode(self) -> bytes:
        """Make the bytes that the keeper keeps."""
        return _SETTLED.pack(*self)

    @classmethod
    def decode(cls, raw: bytes) -> "Settled":
        """Read them; nothing is settled on a connection without any."""
        return cls(*_SETTLED.unpack(raw)) if raw else cls()


NOTHING = Settled()
_SETTLED = struct.Struct("<3Q")


class KeptTransport:
    """A transport that counts what is written, and drops its first `skip` bytes: the client has got them."""

    def __init__(self, inner: asyncio.Transport, written: int, skip: int) -> None:
        self.written = written
        self.skip = skip
        self._inner = inner

    def write(self, data: bytes) -> None:
        """Write what the client has not got."""
        self.written += len(data)
        if self.skip:
            dropped = min(self.skip, len(data))
            self.skip -= dropped
            data = data[dropped:]
            if not data:
                return
        self._inner.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class AnswerJournal(KeptJournal):
    """The journal of one request on a connection, and the beginning of its answer."""

    def __init__(
        self,
        key: str,
        known: dict[str, Any],
        put: Callable[[dict[str, Any]], None],
        written: Callable[[], int],
        *,
        is_replayed: bool,
    ) -> None:
        super().__init__(key, known, put, is_replayed=is_replayed)
        self._written = written

    def begin_answer(self) -> None:
        """Note where the answer begins; to be called before its first byte is written."""
        self.draw(START, self._written)
        self.flush()


class KeptConnection:
    """The requests of one connection in the journal.

    Args:
        keeper: gets what is noted.
        id: of the connection.
        known: facts of requests that an earlier router has left, by their numbers.
        settled: how far the connection is.
        start: bytes of all answers up to the first of these.
        skip: bytes of theirs that the client has got.
    """

    def __init__(
        self,
        keeper: Keeping,
        id: int,
        known: dict[int, dict[str, Any]] | None = None,
        settled: Settled = NOTHING,
        start: int = 0,
        skip: int = 0,
    ) -> None:
        self.id = id
        self.num_before = settled.number  # requests
        self.num_input = settled.input_end  # bytes of requests that were parsed
        self._keeper = keeper
        self._known = known or {}
        self._begin = start, skip
        self._transport: KeptTransport | None = None
        self._input_ends: dict[int, int] = {}  # of requests in the journal, by their numbers
        self._undone: list[tuple[Settled, AnswerJournal | None]] = []  # of answers that were written to the transport

    def around(self, inner: asyncio.Transport) -> KeptTransport:
        """The transport to write to."""
        self._transport = KeptTransport(inner, *self._begin)
        return self._transport

    def facts_of(self, number: int) -> dict[str, Any]:
        """The facts that an earlier router has left of a request."""
        return self._known.get(number, {})

    def keep(self, number: int, raw: bytes, input_end: int) -> AnswerJournal:
        """Put a request into the journal; or find it there."""
        self._input_ends[number] = input_end
        known = self._known.pop(number, None)
        if known is not None and KEY in known:
            return AnswerJournal(known[KEY], known, self._putting(number), self._written, is_replayed=True)
        key = secrets.token_hex(12)
        facts: dict[str, Any] = {KEY: key, INPUT_END: input_end}
        self._keeper.put_request(self.id, number, raw)
        self._keeper.put_facts(self.id, number, facts)
        return AnswerJournal(key, facts, self._putting(number), self._written, is_replayed=False)

    def begin_unkept(self, number: int, input_end: int) -> None:
        """Note that the answer of a request begins that is not in the journal."""
        self._input_ends[number] = input_end
        self._keeper.put_request(self.id, number, b"")
        self._keeper.put_facts(self.id, number, {UNKEPT_ANSWER: True, START: self._written(), INPUT_END: input_end})

    def _putting(self, number: int) -> Callable[[dict[str, Any]], None]:
        return lambda facts: self._keeper.put_facts(self.id, number, facts)

    def _written(self) -> int:
        assert self._transport is not None, "there is a transport while a request is answered"
        return self._transport.written

    def complete(self, number: int, journal: AnswerJournal | None) -> None:
        """Note that the whole answer of a request was written to the transport."""
        if self._transport is not None and self._transport.skip and not self._known:
            logger.error("an answer that was taken over is shorter than what its client has: the connection is ended")
            self._transport.abort()
            return
        input_end = self._input_ends.pop(number, self.num_input)
        self._undone.append((Settled(number, input_end, self._written()), journal))
        self._settle()

    def _settle(self) -> None:
        """Forget requests with answers that the kernel has got."""
        transport = self._transport
        if transport is None:
            return
        given = transport.written - transport.get_write_buffer_size()
        while self._undone and self._undone[0][0].written <= given:
            settled, journal = self._undone.pop(0)
            self._keeper.done(self.id, settled.number, settled)
            if journal is not None:
                journal.done()
        if self._undone:
            asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._settle)

    def hand_over(self, partial: bytes) -> None:
        """Hand over the input of a request that is not whole, before this router ends."""
        if partial:
            self._keeper.put_partial(self.id, partial)

    def release(self) -> None:
        """The connection has ended."""
        self._transport = None
        for _, journal in self._undone:
            if journal is not None:
                journal.done()
        self._undone.clear()
        self._keeper.release(self.id)
