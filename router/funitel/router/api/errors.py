"""What failures look like: TGI's `{error, error_type}` on native routes, OpenAI's object under `/v1`."""

import logging

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from funitel.proto.errors import FunitelError, InvalidRequest
from funitel.router.schema import ErrorResponse
from funitel.router.schema_openai import OpenAIError, OpenAIErrorResponse

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1
_OPENAI_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_HTTP_TYPES = {404: "not_found", 405: "method_not_allowed"}


def native_error(error: FunitelError) -> ErrorResponse:
    """The shape of TGI's routes."""
    return ErrorResponse(error=error.public_message, error_type=error.error_type)


def openai_error(error: FunitelError) -> OpenAIErrorResponse:
    """The shape of OpenAI's routes."""
    param = error.param if isinstance(error, InvalidRequest) else None
    return _openai_error(error.public_message, error.http_status, error.error_type, param)


def _openai_error(message: str, status: int, error_type: str, param: str | None = None) -> OpenAIErrorResponse:
    is_ours = status >= 500 or status == 424
    kind = _OPENAI_TYPES.get(status, "server_error" if is_ours else "invalid_request_error")
    error = OpenAIError(message=message, type=kind, param=param, code=error_type)
    return OpenAIErrorResponse(error=error, error_type=error_type)


def answer_error(request: Request, error: Exception) -> Response:
    """Answer a FunitelError; registered with the application."""
    assert isinstance(error, FunitelError)
    is_openai = _is_openai(request.scope)
    headers = {"retry-after": str(RETRY_AFTER_SECONDS)} if error.retry_after else {}
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
        if not is_openai:  # TGI's answer has no body
            return Response(status_code=401, headers=headers)
    return _json(openai_error(error) if is_openai else native_error(error), error.http_status, headers)


def answer_http_exception(request: Request, error: Exception) -> Response:
    """Answer what the router of routes refuses: an unknown path, a method a path does not have."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    error_type = _HTTP_TYPES.get(error.status_code, "http")
    body: BaseModel = ErrorResponse(error=message, error_type=error_type)
    if _is_openai(request.scope):
        body = _openai_error(message, error.status_code, error_type)
    return _json(body, error.status_code, dict(error.headers or {}))


def _is_openai(scope: Scope) -> bool:
    path: str = scope["path"]
    return path.startswith("/v1/")


def _json(body: BaseModel, status: int, headers: dict[str, str]) -> Response:
    return Response(body.model_dump_json(), status, headers, "application/json")


class ErrorBoundary:
    """The rim: an exception nobody expected is logged once, with its traceback, and answered with 500."""

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
            logger.debug("a client left while sending its request")
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if not started:
                await answer_error(Request(scope), FunitelError("internal error"))(scope, receive, send)
