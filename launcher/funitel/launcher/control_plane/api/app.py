"""The application of the control socket: its routes, and an error as one line of JSON."""

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from funitel.launcher.control_plane.api import models, operators, router_side
from funitel.launcher.control_plane.interface import Fleet
from funitel.launcher.control_plane.model_tools import ModelTools
from funitel.proto.errors import (
    FunitelError,
    InvalidRequest,
    NotEnoughMemory,
    RateLimited,
    SettingsError,
    StartupError,
)

logger = logging.getLogger(__name__)

BAD_REQUEST, UNAVAILABLE, NO_ROOM = 400, 503, 507


def build_app(
    fleet: Fleet,
    tools: ModelTools,
    routes: Sequence[Route] = (),
    middleware: Sequence[Middleware] = (),
    state: Mapping[str, Any] = MappingProxyType({}),
) -> Starlette:
    """Make the application over a fleet; `app.state.closing` ends its streams.

    Args:
        fleet: what models, replicas and registrations are asked of.
        tools: of the model server.
        routes: further ones.
        middleware: around all routes.
        state: what further routes find in `app.state`.
    """
    app = Starlette(
        routes=[*router_side.ROUTES, *models.ROUTES, *operators.ROUTES, *routes],
        middleware=[Middleware(_EncodedPath), *middleware],
        exception_handlers={FunitelError: _answer, HTTPException: _answer_http, Exception: _answer_unexpected},
    )
    app.router.redirect_slashes = False
    app.state.fleet = fleet
    app.state.tools = tools
    app.state.closing = asyncio.Event()
    for name, value in state.items():
        setattr(app.state, name, value)
    return app


class _EncodedPath:
    """Routes by the path as it was sent: an encoded slash belongs to a name."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = scope.get("raw_path")
        if raw:
            scope = {**scope, "path": raw.decode("ascii", "replace")}
        await self._app(scope, receive, send)


def status_of(error: FunitelError) -> int:
    """The status of an error on this socket, where a wrong value is 400."""
    match error:
        case InvalidRequest() if error.http_status == InvalidRequest.http_status:
            return BAD_REQUEST
        case SettingsError():
            return BAD_REQUEST
        case NotEnoughMemory():
            return NO_ROOM
        case StartupError():
            return UNAVAILABLE
        case _:
            return error.http_status


async def _answer(request: Request, error: Exception) -> Response:
    assert isinstance(error, FunitelError)
    response = _error(status_of(error), error.message, error.error_type, getattr(error, "param", None))
    if isinstance(error, RateLimited) and error.wait_seconds is not None:
        response.headers["retry-after"] = str(math.ceil(error.wait_seconds))
    return response


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {404: "no such path", 405: f"{request.method} is not allowed on this path"}
    return _error(error.status_code, words.get(error.status_code, error.detail), "not_found")


async def _answer_unexpected(request: Request, error: Exception) -> Response:
    """The server logs the traceback."""
    return _error(500, f"{type(error).__name__}: {' '.join(str(error).split())}", "internal")


def _error(status: int, message: str, error_type: str, field: str | None = None) -> Response:
    return JSONResponse({"error": message, "error_type": error_type, "field": field}, status)
