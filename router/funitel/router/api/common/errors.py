"""Answer errors: TGI's `{error, error_type}` on native routes, OpenAI's object under `/v1`, Anthropic's on its routes.

Anthropic's is also for requests under `/v1` with the header `anthropic-version`.
"""

import logging
import math
import uuid
from typing import Any

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from funitel.proto.errors import MAX_PARAM_CHARACTERS, Cancelled, FunitelError, InvalidRequest, ModelNotFound
from funitel.proto.printable import shortened
from funitel.router.api.common.body import json_answer
from funitel.router.api.common.error_schemas import (
    AnthropicErrorDetail,
    AnthropicErrorResponse,
    ErrorResponse,
    OpenAIError,
    OpenAIErrorResponse,
)
from funitel.router.core import request_context
from funitel.router.middleware.operation import is_native

logger = logging.getLogger(__name__)

MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1, 3600
_OPENAI_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
# Our statuses as Anthropic's status and type; what is not here is its own status and an invalid request, or 500.
_ANTHROPIC = {
    401: (401, "authentication_error"),
    403: (403, "permission_error"),
    404: (404, "not_found_error"),
    413: (413, "request_too_large"),
    422: (400, "invalid_request_error"),
    424: (500, "api_error"),
    429: (529, "overloaded_error"),  # its 429 blames the client's rate, ours says that the server is full
    503: (503, "api_error"),
    504: (504, "timeout_error"),
}
_HTTP_TYPES = {404: "not_found", 405: "method_not_allowed"}


def native_error(error: FunitelError) -> ErrorResponse:
    """The shape of TGI's routes."""
    return ErrorResponse(error=error.public_message, error_type=error.error_type, **_place(error))


def openai_error(error: FunitelError) -> OpenAIErrorResponse:
    """The shape of OpenAI's routes."""
    param = error.param if isinstance(error, InvalidRequest | ModelNotFound) else None
    answer = _openai_error(error.public_message, error.http_status, error.error_type, param, error.openai_code)
    return answer.model_copy(update=_place(error))


def _place(error: FunitelError) -> dict[str, Any]:
    """The queue position a refused request would have had, and its estimated wait."""
    wait = None if error.wait_seconds is None else round(error.wait_seconds, 3)
    return {"queue_position": error.position, "estimated_wait_seconds": wait}


def _openai_error(
    message: str, status: int, error_type: str, param: str | None = None, code: str = ""
) -> OpenAIErrorResponse:
    is_ours = status >= 500 or status == 424
    kind = _OPENAI_TYPES.get(status, "server_error" if is_ours else "invalid_request_error")
    error = OpenAIError(message=message, type=kind, param=param, code=code or error_type)
    return OpenAIErrorResponse(error=error, error_type=error_type)


def anthropic_error(error: FunitelError, request_id: str) -> AnthropicErrorResponse:
    """The shape of Anthropic's routes."""
    _, kind = _anthropic_kind(error.http_status, error.anthropic_type)
    detail = AnthropicErrorDetail(type=kind, message=error.public_message)
    return AnthropicErrorResponse(error=detail, request_id=request_id, **_place(error))


def _anthropic_kind(status: int, given: str = "") -> tuple[int, str]:
    """The status and the type of error for one of our statuses; an error that has a type of its own keeps both."""
    if given:
        return status, given
    return _ANTHROPIC.get(status, (status, "invalid_request_error") if status < 500 else (500, "api_error"))


def new_request_id() -> str:
    """An id of one exchange, sent as `request-id` on Anthropic's routes."""
    return f"req_{uuid.uuid4().hex}"


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer a FunitelError; registered with the application, which would call what is no coroutine in a thread."""
    assert isinstance(error, FunitelError)
    request_context.current().error = error
    headers = _retry_headers(error)
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
        if is_native(request.scope):  # TGI's answer has no body
            return Response(status_code=401, headers=headers)
    if _is_anthropic(request):
        request_id = new_request_id()
        status, _ = _anthropic_kind(error.http_status, error.anthropic_type)
        return json_answer(anthropic_error(error, request_id), headers | {"request-id": request_id}, status=status)
    return json_answer(
        native_error(error) if is_native(request.scope) else openai_error(error), headers, status=error.http_status
    )


def _retry_headers(error: FunitelError) -> dict[str, str]:
    """When to retry, and the state of the queue."""
    headers = {}
    if error.retry_after:
        seconds = min(max(math.ceil(error.wait_seconds or 0.0), MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
        headers["retry-after"] = str(seconds)
    if error.position is not None:
        headers["x-queue-position"] = str(error.position)
    if error.wait_seconds is not None:
        headers["x-estimated-wait"] = f"{error.wait_seconds:.3f}"
    return headers


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Answer what the router of routes refuses: an unknown path, a method a path does not have."""
    assert isinstance(error, HTTPException)
    path = shortened(request.scope["path"], MAX_PARAM_CHARACTERS)
    message = f"{request.method} {path}: {error.detail}"
    error_type = _HTTP_TYPES.get(error.status_code, "http")
    headers = dict(error.headers or {})
    body: BaseModel = ErrorResponse(error=message, error_type=error_type)
    if _is_anthropic(request):
        headers["request-id"] = new_request_id()
        detail = AnthropicErrorDetail(type=_anthropic_kind(error.status_code)[1], message=message)
        body = AnthropicErrorResponse(error=detail, request_id=headers["request-id"])
    elif not is_native(request.scope):
        body = _openai_error(message, error.status_code, error_type)
    return json_answer(body, headers, status=error.status_code)


def _is_anthropic(request: Request) -> bool:
    path: str = request.scope["path"]
    is_own = path == "/v1/messages" or path.startswith("/v1/messages/")
    return is_own or (not is_native(request.scope) and "anthropic-version" in request.headers)


class ErrorBoundary:
    """Log an unexpected exception once, with its traceback, and answer it with 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_and_note(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except ClientDisconnect:
            request_context.current().error = Cancelled("the client left")
            logger.debug("a client left while sending its request")
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if not started:
                answer = await answer_error(Request(scope), FunitelError("internal error"))
                await answer(scope, receive, send)
