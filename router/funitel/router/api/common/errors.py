"""Answer errors as the protocol of a route does: its row of the table names the record, `_STYLES` the rest.

Requests outside TGI's routes with the header `anthropic-version` are answered in Anthropic's shape.
"""

import logging
import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from funitel.proto.errors import (
    MAX_PARAM_CHARACTERS,
    Cancelled,
    ContextTooLong,
    FunitelError,
    InvalidRequest,
    ModelNotFound,
    PayloadTooLarge,
    UnsupportedEncoding,
)
from funitel.proto.printable import shortened
from funitel.router.api.common.body import json_answer
from funitel.router.api.common.error_codes import INVALID_VALUE
from funitel.router.api.common.error_schemas import (
    AnthropicErrorDetail,
    AnthropicErrorResponse,
    ErrorResponse,
    InferflowError,
    OpenAIError,
    OpenAIErrorResponse,
    TgiOpenAIErrorResponse,
)
from funitel.router.core import request_context
from funitel.router.middleware.operation import is_native, operation_of

logger = logging.getLogger(__name__)

MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1, 3600
_OPENAI_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_OPENAI_STATUSES = {422: 400, 424: 500}  # where OpenAI's are not ours, which are TGI's
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
EMPTY_REQUEST, TOO_LONG = "empty_request", "too_long"  # codes of an InvalidRequest
_BUSY = (429, 503)
_NO_JSON = (400, 415)
_HTTP_TYPES = {404: "not_found", 405: "method_not_allowed"}


def native_error(error: FunitelError) -> ErrorResponse:
    """The shape of TGI's routes."""
    return ErrorResponse(error=error.public_message, error_type=error.error_type, **_place(error))


def tgi_openai_error(error: FunitelError) -> TgiOpenAIErrorResponse:
    """The shape of the OpenAI routes that TGI has."""
    described = _openai_error(error, error.openai_code or error.error_type)
    return TgiOpenAIErrorResponse(error=described, error_type=error.error_type, **_place(error))


def openai_error(error: FunitelError) -> OpenAIErrorResponse:
    """The shape of OpenAI's other routes."""
    code = error.code if isinstance(error, InvalidRequest) else ""
    if not code and type(error) is InvalidRequest:
        code = INVALID_VALUE
    described = _openai_error(error, code or error.openai_code or error.error_type)
    return OpenAIErrorResponse(error=described, **_place(error))


def _openai_error(error: FunitelError, code: str) -> OpenAIError:
    status = error.http_status
    param = error.param if isinstance(error, InvalidRequest | ModelNotFound) else None
    kind = _OPENAI_TYPES.get(status, "server_error" if error.is_ours else "invalid_request_error")
    return OpenAIError(message=error.public_message, type=kind, param=param, code=code)


def _place(error: FunitelError) -> dict[str, Any]:
    """The queue position a refused request would have had, and its estimated wait."""
    wait = None if error.wait_seconds is None else round(error.wait_seconds, 3)
    return {"queue_position": error.position, "estimated_wait_seconds": wait}


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


def inferflow_error(error: FunitelError) -> InferflowError:
    """The shape of Inferflow's route."""
    return InferflowError(ret_code=f"error.{_inferflow_code(error)}", error=error.public_message, **_place(error))


def _inferflow_code(error: FunitelError) -> str:
    code = error.code if isinstance(error, InvalidRequest) else ""
    if error.http_status in _BUSY:
        return "busy"
    if code == EMPTY_REQUEST:
        return code
    if isinstance(error, ContextTooLong | PayloadTooLarge) or code == TOO_LONG:
        return "too_long_request"
    is_format = isinstance(error, InvalidRequest) or error.http_status in _NO_JSON
    return "invalid_request_format" if is_format else error.error_type


def exchange_id() -> str:
    """The id of the exchange, sent as `request-id` on Anthropic's routes."""
    return request_context.drawn("exchange", lambda: f"req_{uuid.uuid4().hex}")


@dataclass(frozen=True, slots=True)
class _Style:
    """How errors are answered: the record, and its status for one of our errors."""

    record: Callable[[FunitelError], BaseModel]
    status: Callable[[FunitelError], int]


_STYLES: dict[type[BaseModel], _Style] = {
    ErrorResponse: _Style(native_error, lambda error: error.http_status),
    TgiOpenAIErrorResponse: _Style(tgi_openai_error, lambda error: error.http_status),
    InferflowError: _Style(inferflow_error, lambda error: error.http_status),
    OpenAIErrorResponse: _Style(openai_error, lambda error: _OPENAI_STATUSES.get(error.http_status, error.http_status)),
}


def error_record(scope: Scope) -> Callable[[FunitelError], BaseModel]:
    """Makes the record of an error, as the route of a request answers it; not for Anthropic's routes."""
    return _STYLES[_record_of(scope)].record


def _record_of(scope: Scope) -> type[BaseModel]:
    operation = operation_of(scope)
    if operation is not None:
        return operation.error
    return ErrorResponse if is_native(scope) else TgiOpenAIErrorResponse


async def answer_error(request: Request, error: Exception) -> Response:
    """Answer a FunitelError; registered with the application, which would call what is no coroutine in a thread."""
    assert isinstance(error, FunitelError)
    request_context.current().error = error
    headers = _retry_headers(error)
    if isinstance(error, UnsupportedEncoding):
        headers["accept-encoding"] = "identity"
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
        if is_native(request.scope):  # TGI's answer has no body
            return Response(status_code=401, headers=headers)
    return _answer(request, error, headers)


def _answer(request: Request, error: FunitelError, headers: dict[str, str]) -> Response:
    if _is_anthropic(request):
        request_id = exchange_id()
        status, _ = _anthropic_kind(error.http_status, error.anthropic_type)
        return json_answer(anthropic_error(error, request_id), headers | {"request-id": request_id}, status=status)
    style = _STYLES[_record_of(request.scope)]
    return json_answer(style.record(error), headers, status=style.status(error))


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


class _NoRoute(FunitelError):
    """No route takes the request: an unknown path, a method a path does not have."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.http_status = status  # type: ignore[misc]
        self.error_type = _HTTP_TYPES.get(status, "http")  # type: ignore[misc]


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Answer what the router of routes refuses."""
    assert isinstance(error, HTTPException)
    path = shortened(request.scope["path"], MAX_PARAM_CHARACTERS)
    refused = _NoRoute(f"{request.method} {path}: {error.detail}", error.status_code)
    return _answer(request, refused, dict(error.headers or {}))


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
