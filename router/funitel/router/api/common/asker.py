"""The client of a request, as the control plane is told it, and what the router itself changes, for its audit."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import Request as HttpRequest

from funitel.proto.errors import FunitelError, InvalidRequest, NotReady
from funitel.proto.security.asker import ACTOR, ANONYMOUS, CLIENT, ORIGIN, ROLE, USER
from funitel.router.api.common.handler import control_of, models_of
from funitel.router.middleware.auth import account_of
from funitel.router.middleware.operation import operation_of

SESSIONS = "/v1/auth/"  # routes that read the cookie of a browser
AUDIT = "/v1/fleet/audit"


def asker_of(http: HttpRequest) -> dict[str, str]:
    """The headers that name the client to the control plane."""
    account = account_of(http.scope)
    asker = {
        ACTOR: ANONYMOUS if account is None else account.key.name,
        CLIENT: "" if http.client is None else http.client.host,
    }
    if account is not None and account.tenant is not None:
        asker |= {USER: account.tenant.name, ROLE: str(account.tenant.role)}
    operation = operation_of(http.scope)
    if operation is not None and operation.path.startswith(SESSIONS):
        asker |= {ORIGIN: f"{http.url.scheme}://{http.url.netloc}"}
        asker |= {name: http.headers[name] for name in ("cookie",) if name in http.headers}
    return {name: value for name, value in asker.items() if value.isascii() and value.isprintable()}


@asynccontextmanager
async def audited(
    http: HttpRequest, object: str, *, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> AsyncIterator[None]:
    """Have the audit of a server with users say that a change begins, and how it ended.

    Args:
        http: the request of a client.
        object: its kind and its name.
        before: the object before the change; None where there was none.
        after: the object after the change; None where there is none.

    Raises:
        NotReady: the audit cannot be written; nothing was changed.
    """
    control = control_of(http)
    if control is None or not models_of(http).own.settings.users:
        yield
        return
    asker, row = asker_of(http), {"action": f"{http.method} {http.url.path}", "object": object, "before": before}

    async def note(**more: Any) -> None:
        answer = await control.tell(AUDIT, row | more, asker)
        if answer.status >= 300:
            raise NotReady(answer.error)

    await note(status=None)
    try:
        yield
    except FunitelError as error:
        await note(status=400 if isinstance(error, InvalidRequest) else error.http_status, after=before)
        raise
    await note(status=200, after=after)
