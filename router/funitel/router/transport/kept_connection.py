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

from funitel.router.core.journal import KEY, UNKEPT, KeptJournal, RequestJournal

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 0.05  # between two looks whether the bytes of an answer were given to the kernel
START, INPUT_END, ANSWER, HEAD, UNKEPT_ANSWER = "start", "input_end", "answer", "head", "unkept"
BEGUN = "begun"  # a fact of a request that was in the journal before it may have had an effect


class Keeping(Protocol):
    """What holds connections and journals beyond the life of this process."""

    def put_request(self, connection: int, number: int, raw: bytes, facts: dict[str, Any]) -> None:
        """Hand over the bytes of a request that is whole, and facts of it."""

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


class LeftInput(NamedTuple):
    """What an earlier router has read of a connection, and not answered to the end."""

    requests: bytes = b""  # those in the journal
    partial: bytes = b""  # the beginning of the next one, which was not whole
    has_lost: bool = False  # it had read more


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
        transport: KeptTransport,
        *,
        is_replayed: bool,
    ) -> None:
        super().__init__(key, known, put, is_replayed=is_replayed)
        self._transport = transport

    @property
    def is_behind(self) -> bool:
        """See RequestJournal."""
        return self._transport.skip > 0

    def begin_answer(self) -> bool:
        """Note where the answer begins; to be called before its first byte is written.

        False if it began elsewhere in an earlier router: the answer before it has become another one.
        """
        start = self.draw(START, lambda: self._transport.written)
        self.flush()
        return start == self._transport.written


class KeptConnection:
    """The requests of one connection in the journal.

    Args:
        keeper: gets what is noted.
        id: of the connection.
        known: facts of requests that an earlier router has left, by their numbers.
        settled: how far the connection is; behind the last request before these.
        start: bytes of all answers up to the first of these.
        skip: bytes of theirs that the client has got.
        left: the input to go on with.
    """

    def __init__(
        self,
        keeper: Keeping,
        id: int,
        known: dict[int, dict[str, Any]] | None = None,
        settled: Settled = NOTHING,
        start: int = 0,
        skip: int = 0,
        left: LeftInput | None = None,
    ) -> None:
        self.id = id
        self.left = left
        self.num_requests = settled.number  # so far
        self.num_input = settled.input_end  # bytes of requests that were parsed
        self._keeper = keeper
        self._known = known or {}
        self._begin = start, skip
        self._transport: KeptTransport | None = None
        self._waiting = set(self._known)  # requests in the journal that had no effect yet
        self._begun: set[int] = set()  # those that may have had one, and were not kept yet
        self._input_ends: dict[int, int] = {}  # of requests that are whole and not answered, by their numbers
        self._last = settled  # once all that is undone is done
        self._undone: list[tuple[Settled, AnswerJournal | None]] = []  # of answers that were written to the transport
        self._closing: AnswerJournal | None = None  # the journal of the answer that ends the connection
        self._newest: AnswerJournal | None = None  # of the request that is answered
        self._is_looking = False

    def around(self, inner: asyncio.Transport) -> KeptTransport:
        """The transport to write to."""
        self._transport = KeptTransport(inner, *self._begin)
        return self._transport

    def facts_of(self, number: int) -> dict[str, Any]:
        """The facts that an earlier router has left of a request."""
        return self._known.get(number, {})

    # Requests --------------------------------------------------------------------------------------------------------

    def end_input(self, number: int) -> None:
        """Note that the input up to now ends with this request."""
        if number <= self._last.number:  # answered before it was whole
            self._settle_later(self._last._replace(input_end=self.num_input))
        else:
            self._input_ends[number] = self.num_input

    def wait(self, number: int, raw: bytes) -> None:
        """Put a request into the journal that is whole: nothing depends on it yet."""
        if number not in self._known:
            self._waiting.add(number)
            self._keeper.put_request(self.id, number, raw, {INPUT_END: self._input_ends[number]})

    def begin(self, number: int) -> None:
        """Note that a request may have an effect from now on, and may not be run twice, unless it is kept."""
        if number in self._waiting and KEY not in self.facts_of(number):
            self._waiting.discard(number)
            self._begun.add(number)
            self._keeper.put_facts(self.id, number, {BEGUN: True})

    def is_waiting(self, number: int) -> bool:
        """Whether a request in the journal had no effect yet."""
        return number in self._waiting

    def keep(self, number: int, raw: bytes) -> RequestJournal:
        """Put a request into the journal; or find it there. Nothing is kept once the connection has ended."""
        if self._transport is None:
            return UNKEPT
        known = self._known.pop(number, {})
        is_in_journal = number in self._waiting or number in self._begun
        self._waiting.discard(number)
        self._begun.discard(number)
        if KEY in known:
            self._newest = AnswerJournal(known[KEY], known, self._putting(number), self._transport, is_replayed=True)
            return self._newest
        key = secrets.token_hex(12)
        facts = {KEY: key, INPUT_END: self._input_ends.get(number, self.num_input)}
        if is_in_journal:
            self._keeper.put_facts(self.id, number, facts)
        else:
            self._keeper.put_request(self.id, number, raw, facts)
        self._newest = AnswerJournal(key, facts, self._putting(number), self._transport, is_replayed=False)
        return self._newest

    def begin_unkept(self, number: int) -> bool:
        """Note that the answer of a request begins that is not in the journal.

        False if its client has bytes of another answer to it. Nothing of it is written once the client has left.
        """
        if self._transport is None:
            return True
        self._known.pop(number, None)
        self._waiting.discard(number)
        self._begun.discard(number)
        end = self._input_ends.get(number, self.num_input)
        facts = {UNKEPT_ANSWER: True, START: self._transport.written, INPUT_END: end}
        self._keeper.put_request(self.id, number, b"", facts)
        return self._transport.skip == 0

    def _putting(self, number: int) -> Callable[[dict[str, Any]], None]:
        return lambda facts: self._keeper.put_facts(self.id, number, facts)

    # Answers ---------------------------------------------------------------------------------------------------------

    def note_interim(self, num_bytes: int) -> None:
        """Note that so many bytes follow which belong to no answer: `100 Continue`."""
        if self._transport is not None:
            self._settle_later(self._last._replace(written=self._transport.written + num_bytes))

    def complete(self, number: int, journal: AnswerJournal | None, *, closes: bool) -> None:
        """Note that the whole answer of a request was written to the transport.

        One that ends the connection is done when the connection has ended: else another router would leave it open.
        """
        transport = self._transport
        if transport is None:
            return
        if transport.skip and not self._known:
            logger.error("an answer that was taken over is shorter than what its client has: the connection is ended")
            transport.abort()
        elif closes:
            self._closing = journal
        else:
            input_end = self._input_ends.pop(number, self.num_input)
            self._settle_later(Settled(number, input_end, transport.written), journal)

    @property
    def has_unkept_bytes(self) -> bool:
        """Whether bytes of an answer that is not in the journal wait for the kernel."""
        return any(journal is None for _, journal in self._undone)

    def _settle_later(self, settled: Settled, journal: AnswerJournal | None = None) -> None:
        self._last = settled
        self._undone.append((settled, journal))
        if not self._is_looking:
            self._is_looking = True
            asyncio.get_running_loop().call_soon(self._settle)

    def _settle(self) -> None:
        """Forget requests with answers that the kernel has got."""
        self._is_looking = False
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
            self._is_looking = True
            asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._settle)

    # The end ---------------------------------------------------------------------------------------------------------

    def hand_over(self, partial: bytes) -> None:
        """Hand over the input of a request that is not whole, before this router ends."""
        if partial:
            self._keeper.put_partial(self.id, partial)

    def release(self) -> None:
        """The connection has ended."""
        self._transport = None
        for journal in (*(journal for _, journal in self._undone), self._newest, self._closing):
            if journal is not None:
                journal.done()
        self._undone.clear()
        self._keeper.release(self.id)
