"""The rim of every request: its id and its note are made there, and its line of the log is written at its end."""

import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from funitel.proto.errors import Cancelled
from funitel.proto.process import logs
from funitel.proto.process.logs import Field
from funitel.router.core import request_context
from funitel.router.core.request_context import RequestContext
from funitel.router.middleware.operation import Operation
from funitel.router.middleware.route_context import ROUTE, UNKNOWN_ROUTE

logger = logging.getLogger(__name__)

REQUEST_ID = b"x-request-id"
_SANE = re.compile(rb"[\w.:/=+@-]{1,128}", re.ASCII)
# Asked every few seconds by machines: told only where there is something wrong.
QUIET = frozenset({"/health", "/health/live", "/health/ready", "/ping", "/metrics", "/v2/health/live"})


class AccessLog:
    """Give each request a note and an id, which is the client's where it sends a sane one; log how it ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0
        request_id = _request_id(scope)
        named = REQUEST_ID, request_id.encode()

        async def naming(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), named]}
            await send(message)

        with logs.log_context(request_id=request_id), request_context.noting(request_id) as note:
            try:
                await self._app(scope, receive, naming)
            finally:
                _tell(scope, status, note, time.monotonic() - began)


def _request_id(scope: Scope) -> str:
    """The id the client gives, in one header of a form that can stand anywhere; else a new one."""
    given = [value for name, value in scope["headers"] if name == REQUEST_ID]
    if len(given) == 1 and _SANE.fullmatch(given[0]):
        return str(given[0].decode("ascii"))
    return uuid.uuid4().hex


def _tell(scope: Scope, status: int, note: RequestContext, seconds: float) -> None:
    operation: Operation | None = scope.get(ROUTE)
    route = operation.path if operation is not None else UNKNOWN_ROUTE
    is_quiet = route in QUIET and status < 400
    logs.log_fields(
        logger,
        "answered" if status else "left",
        logging.DEBUG if is_quiet else logging.INFO,
        method=scope["method"],
        route=route,
        status=status or Cancelled.http_status,
        total_seconds=round(seconds, 6),
        **_facts(note),
    )


def _facts(note: RequestContext) -> dict[str, Field | None]:
    """What came of work that a model was asked for."""
    timings = note.timings
    was_cancelled = isinstance(note.error, Cancelled)
    return {
        "trace_id": note.trace_id,
        "key": note.key_name,
        "error": None if note.error is None or was_cancelled else type(note.error).__name__,
        "cancelled": was_cancelled if was_cancelled or note.prompt_tokens is not None else None,
        "prompt_tokens": note.prompt_tokens,
        "cached_tokens": note.cached_tokens or None,
        "tokens": None if note.prompt_tokens is None else note.tokens,
        "finish": ",".join(note.finish_reasons) or None,
        "queue_seconds": None if timings is None else round(timings.queue_seconds, 6),
        "first_token_seconds": None if note.first_token_seconds is None else round(note.first_token_seconds, 6),
    }
