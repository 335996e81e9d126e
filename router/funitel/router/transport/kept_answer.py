"""The answer of a request in the journal: what it begins with is noted before it is written, a whole one altogether."""

import logging
from base64 import b64decode, b64encode
from typing import Any, Protocol, cast

from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from funitel.router.core.journal import UNKEPT, RequestJournal
from funitel.router.transport.kept_connection import ANSWER, HEAD, AnswerJournal
from funitel.router.transport.memory_budget import CLIENT

logger = logging.getLogger(__name__)

JOURNAL = "funitel.journal"  # in a scope: the journal of the request
WHOLE = "funitel.whole"  # in a scope: the bytes of the request, once it is whole

INTERIM_BYTES = len(b"HTTP/1.1 100 Continue\r\n\r\n")  # as uvicorn writes it
MAX_ANSWER_BYTES = 16 << 20  # of a whole answer in the journal; a longer one is rendered again


class KeepingClient(Protocol):
    """A client with a connection that outlives this router."""

    @property
    def is_kept(self) -> bool:
        """Whether it does."""

    def keep(self, scope: Scope) -> RequestJournal:
        """Put the request of a scope into the journal; UNKEPT once the client has left."""

    def begin_unkept(self, scope: Scope) -> bool:
        """Note that the answer of a request begins that is not in the journal; False if it may not."""

    def note_interim(self, num_bytes: int) -> None:
        """Note that so many bytes follow which belong to no answer."""

    def facts_of(self, scope: Scope) -> dict[str, Any]:
        """The facts that an earlier router has left of the request of a scope."""

    def disconnect(self, reason: str) -> None:
        """End the connection at once."""


def keep(scope: Scope) -> RequestJournal:
    """Put a request into the journal, where there is one; to be called once its body was read."""
    client = client_of(scope)
    if client is None or WHOLE not in scope:
        return UNKEPT
    journal = client.keep(scope)
    if journal is not UNKEPT:
        scope[JOURNAL] = journal
    return journal


def client_of(scope: Scope) -> KeepingClient | None:
    """The client of a request, if its connection is kept."""
    client = cast(KeepingClient | None, scope.get(CLIENT))
    return client if client is not None and getattr(client, "is_kept", False) else None


def stored_answer(scope: Scope) -> list[Message]:
    """The messages of a whole answer that an earlier router has noted; none where there is none."""
    client = client_of(scope)
    answer = None if client is None else client.facts_of(scope).get(ANSWER)
    if client is None or answer is None:
        return []
    scope[JOURNAL] = client.keep(scope)
    status, headers, body = answer
    start = {"type": "http.response.start", "status": status, "headers": _raw(headers)}
    return [start, {"type": "http.response.body", "body": b64decode(body), "more_body": False}]


def kept_receive(client: KeepingClient, receive: Receive) -> Receive:
    """Return a `receive` that notes the bytes of `100 Continue`; where a body is whole already there are none."""
    cycle = getattr(receive, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle) or not cycle.waiting_for_100_continue:
        return receive
    if not cycle.more_body:
        cycle.waiting_for_100_continue = False
        return receive

    async def receive_noted() -> Message:
        if cycle.waiting_for_100_continue and not cycle.transport.is_closing():
            client.note_interim(INTERIM_BYTES)
        return await receive()

    return receive_noted


def kept_send(scope: Scope, client: KeepingClient, send: Send) -> Send:
    """Return a `send` that notes what an answer begins with before it is written."""
    held: list[Message] = []  # the start of a whole answer, until its body comes

    async def send_kept(message: Message) -> None:
        journal = cast(AnswerJournal | None, scope.get(JOURNAL))
        if message["type"] == "http.response.start":
            if journal is None:
                _check(client, client.begin_unkept(scope))
            elif any(name.lower() == b"content-length" for name, _ in message["headers"]):
                held.append(message)
                return
            else:
                message = _head(journal, client, message)
                _check(client, journal.begin_answer())
        elif held:
            start = held.pop()
            assert journal is not None, "starts are held of requests in the journal"
            is_small = len(message.get("body", b"")) <= MAX_ANSWER_BYTES
            if not message.get("more_body", False) and is_small and not journal.knows(HEAD):
                body = b64encode(message.get("body", b"")).decode()
                journal.draw(ANSWER, lambda: [start["status"], _shown(start["headers"]), body])
            else:
                start = _head(journal, client, start)
            _check(client, journal.begin_answer())
            await send(start)
        await send(message)

    return send_kept


def _head(journal: AnswerJournal, client: KeepingClient, start: Message) -> Message:
    """The start of an answer with the headers that were noted first."""
    given = _shown(start["headers"])
    status, headers = journal.draw(HEAD, lambda: [start["status"], given])
    _check(client, status == start["status"] and _length(headers) == _length(given))
    return {**start, "status": status, "headers": _raw(headers)}


def _check(client: KeepingClient, is_same: bool) -> None:
    """End a connection on which an answer goes on otherwise than it began."""
    if not is_same:
        logger.error("an answer that was taken over has become another one: its connection is ended")
        client.disconnect("takeover")


def _length(headers: list[list[str]]) -> str | None:
    return next((value for name, value in headers if name.lower() == "content-length"), None)


def _shown(headers: Any) -> list[list[str]]:
    return [[name.decode("latin-1"), value.decode("latin-1")] for name, value in headers]


def _raw(headers: list[list[str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
