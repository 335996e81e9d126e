"""Forward the routes of users to the control plane, where the server has users."""

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from funitel.proto.errors import NotFound
from funitel.router.api.common.body import json_answer
from funitel.router.api.common.handler import models_of
from funitel.router.api.fleet import handlers
from funitel.router.api.tenants.schema import SessionState

NO_USERS = "this server has no users: start it with --users"


async def session(http: HttpRequest) -> Response:
    """`/v1/auth/session`: whether this server has users, and the session of this browser."""
    if models_of(http).own.settings.users:
        return await handlers.forward(http)
    return json_answer(SessionState(has_users=False))


async def forward(http: HttpRequest) -> Response:
    """Forward a request without a body; raises NotFound where there are no users."""
    _check(http)
    return await handlers.forward(http)


async def forward_body(http: HttpRequest) -> Response:
    """Forward a request with a body; raises NotFound where there are no users."""
    _check(http)
    return await handlers.forward_body(http)


def _check(http: HttpRequest) -> None:
    if not models_of(http).own.settings.users:
        raise NotFound(NO_USERS)
