"""The answer of a request in the journal: what it begins with is noted before it is written, a whole one altogether."""

import logging
from base64 import b64decode, b64encode
from typing import Any, Protocol, cast

from starlette.types import Message, Scope, Send

from funitel.router.core.journal import UNKEPT, RequestJournal
from funitel.router.transport.kept_connection import ANSWER, HEAD, AnswerJournal
from funitel.router.transport.memory_budget import CLIENT

logger = logging.getLogger(__name__)

JOURNAL = "funitel.journal"  # in a scope: the journal of the request
WHOLE = "funitel.whole"  # in a scope: the bytes of the request, once it is whole

MAX_ANSWER_BYTES = 16 << 20  # of a whole answer in the journal; a longer one is rendered again


class KeepingClient(Protocol):
    """A client with a connection that outlives this router."""

    @property
    def is_kept(self) -> bool:
        """Whether it does."""

    def keep(self, scope: Scope) -> RequestJournal:
        """Put the request of a scope into the journal."""

    def begin_unkept(self, scope: Scope) -> None:
        """Note that the answer of a request begins that is not in the journal."""

    def facts_of(self, scope: Scope) -> dict[str, Any]:
        """The facts that an earlier router has left of the request of a scope."""

    def disconnect(self, reason: str) -> None:
        """End the connection at once."""


def keep(scope: Scope) -> RequestJournal:
    """Put a request into the journal, where there is one; to be called once its body was read."""
    client = client_of(scope)
    if client is None or WHOLE not in scope:
        return UNKEPT
    journal = scope[JOURNAL] = client.keep(scope)
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


def kept_send(scope: Scope, client: KeepingClient, send: Send) -> Send:
    """Return a `send` that notes what an answer begins with before it is written."""
    held: list[Message] = []  # the start of a whole answer, until its body comes

    async def send_kept(message: Message) -> None:
        journal = cast(AnswerJournal | None, scope.get(JOURNAL))
        if message["type"] == "http.response.start":
            if journal is None:
                client.begin_unkept(scope)
            elif any(name.lower() == b"content-length" for name, _ in message["headers"]):
                held.append(message)
                return
            else:
                message = _head(journal, client, message)
                journal.begin_answer()
        elif held:
            start = held.pop()
            assert journal is not None, "starts are held of requests in the journal"
            if not message.get("more_body", False) and len(message.get("body", b"")) <= MAX_ANSWER_BYTES:
                body = b64encode(message.get("body", b"")).decode()
                journal.draw(ANSWER, lambda: [start["status"], _shown(start["headers"]), body])
            else:
                start = _head(journal, client, start)
            journal.begin_answer()
            await send(start)
        await send(message)

    return send_kept


def _head(journal: AnswerJournal, client: KeepingClient, start: Message) -> Message:
    """The start of an answer with the headers that were noted first."""
    status, headers = journal.draw(HEAD, lambda: [start["status"], _shown(start["headers"])])
    if status != start["status"]:
        logger.error("an answer that was taken over has status %d now: its connection is ended", start["status"])
        client.disconnect("takeover")
    return {**start, "status": status, "headers": _raw(headers)}


def _shown(headers: Any) -> list[list[str]]:
    return [[name.decode("latin-1"), value.decode("latin-1")] for name, value in headers]


def _raw(headers: list[list[str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
