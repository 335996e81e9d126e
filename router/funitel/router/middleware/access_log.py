"""The access log: give every request an id and a context, count its answer, and log one line at its end."""

import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from funitel.proto.errors import Cancelled
from funitel.proto.process import logs
from funitel.proto.process.logs import Field
from funitel.router.core import request_context
from funitel.router.core.drain import Drain
from funitel.router.core.journal import REQUEST_ID_FACT, earlier_facts
from funitel.router.core.request_context import RequestContext
from funitel.router.middleware.operation import ModelUse, operation_of, route_of
from funitel.router.telemetry.metrics import Metrics
from funitel.router.telemetry.recent_requests import EndedRequest

logger = logging.getLogger(__name__)

REQUEST_ID = b"x-request-id"
CLOSE = (b"connection", b"close")
_SANE = re.compile(rb"[\w.:/=+@-]{1,128}", re.ASCII)
# Polled every few seconds: logged at debug level unless they fail.
QUIET = frozenset(
    {
        *("/health", "/health/live", "/health/ready", "/ping", "/v2/health/live"),
        *("/metrics", "/v1/models/{name}/progress"),
        *("/ui/{path:path}", "/v1/console/live", "/v1/console/requests"),
    }
)


class AccessLog:
    """Give each request a context and an id, the client's where it is sane; count and log how it ended.

    With an answer that begins while the router drains or hands over, its connection ends. Requests to a model are added
    to the recent ones of the metrics when they end.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, drain: Drain) -> None:
        self._app = app
        self._metrics = metrics
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0
        request_id = _request_id(scope)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._metrics.count_response(route_of(scope), status)
                closing = [CLOSE] if self._drain.ends_connections else []
                headers = [*message.get("headers", ()), *closing, (REQUEST_ID, request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        with logs.log_context(request_id=request_id), request_context.request_context(request_id) as context:
            try:
                await self._app(scope, receive, send_with_id)
            finally:
                seconds = time.monotonic() - began
                _log(scope, status, context, seconds)
                operation = operation_of(scope)
                if operation is not None and operation.model is not ModelUse.NONE:
                    self._metrics.recent.add(EndedRequest.of(operation.path, status, context, seconds))


def _request_id(scope: Scope) -> str:
    """Return the id that the client gives in one header, if it is printable and short; else a new one."""
    given = [value for name, value in scope["headers"] if name == REQUEST_ID]
    if len(given) == 1 and _SANE.fullmatch(given[0]):
        return str(given[0].decode("ascii"))
    known: str | None = earlier_facts(scope).get(REQUEST_ID_FACT)
    return known or uuid.uuid4().hex


def _log(scope: Scope, status: int, context: RequestContext, seconds: float) -> None:
    route = route_of(scope)
    is_quiet = route in QUIET and status < 400
    logs.log_fields(
        logger,
        "answered" if status else "left",
        logging.DEBUG if is_quiet else logging.INFO,
        method=scope["method"],
        route=route,
        status=status or Cancelled.http_status,
        total_seconds=round(seconds, 6),
        **_facts(context),
    )


def _facts(context: RequestContext) -> dict[str, Field | None]:
    """Facts of a request to the model: tokens, times, and its error."""
    timings = context.timings
    was_cancelled = isinstance(context.error, Cancelled)
    return {
        "trace_id": context.trace_id,
        "key": context.key_name,
        "model": context.served_model,
        "error": None if context.error is None or was_cancelled else type(context.error).__name__,
        "cancelled": was_cancelled if was_cancelled or context.prompt_tokens is not None else None,
        "prompt_tokens": context.prompt_tokens,
        "cached_tokens": context.cached_tokens or None,
        **{f"cached_tokens_{tier}": count or None for tier, count in context.cached_by_tier.items()},
        "tokens": None if context.prompt_tokens is None else context.tokens,
        "finish": ",".join(context.finish_reasons) or None,
        "load_seconds": None if context.load_seconds is None else round(context.load_seconds, 6),
        "queue_seconds": None if timings is None else round(timings.queue_seconds, 6),
        "first_token_seconds": None if context.first_token_seconds is None else round(context.first_token_seconds, 6),
    }
