"""The audit of operators: a line of JSON for each request that was to change something, appended to a file.

A line has the instant, the name of the API key (`socket` for programs of this user that ask the control socket), the
address of the client, method and path, the names of the fields of the body, and the status of the answer. Values of
fields are left out, since some are secrets.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from funitel.proto.security.asker import ACTOR, CLIENT

logger = logging.getLogger(__name__)

AUDIT = "audit.jsonl"
BY_SOCKET = "socket"
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_OF_THE_ROUTER = "/v1/fleet/"  # reports of routers, not changes by operators
_MOST_BYTES = 1 << 20  # of a body that are parsed


class Audit:
    """Appends to a file that only this user may read; a line that cannot be written is an error of the log."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock

    def note(self, actor: str, address: str, method: str, path: str, fields: Sequence[str], status: int | None) -> None:
        """Append one line; `status` is None where no answer was given."""
        at = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
        row = {"at": at, "actor": actor, "address": address, "method": method, "path": path}
        line = json.dumps(row | {"fields": list(fields), "status": status}) + "\n"
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            logger.error("the audit %s lacks a line: %s: %s", self._path, error.strerror, line.rstrip())


class Audited:
    """Around the application of the control socket: notes each request that was to change something.

    Args:
        app: the application.
        audit: where lines go; None for nowhere.
    """

    def __init__(self, app: ASGIApp, audit: Audit | None) -> None:
        self._app = app
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        if self._audit is None or method in _READING or path.startswith(_OF_THE_ROUTER):
            await self._app(scope, receive, send)
            return
        body = bytearray()
        status: int | None = None

        async def heard() -> Message:
            message = await receive()
            if len(body) < _MOST_BYTES:
                body.extend(message.get("body", b""))
            return message

        async def answer(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, heard, answer)
        finally:
            headers = Headers(scope=scope)
            who = headers.get(ACTOR, BY_SOCKET), headers.get(CLIENT, "")
            self._audit.note(*who, method, path, _fields_of(bytes(body)), status)


def _fields_of(body: bytes) -> list[str]:
    """The names of the fields of a JSON object; none of anything else."""
    try:
        content = json.loads(body or b"{}")
    except ValueError:
        return []
    return sorted(content) if isinstance(content, dict) else []
