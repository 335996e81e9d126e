"""API keys: who may ask for what, and whose share of the service a request takes.

A key is hashed here, and goes no further: nothing logs or shows it. Its name is logged.
"""

import time

from starlette.types import ASGIApp, Receive, Scope, Send

from funitel.proto.errors import Unauthorized
from funitel.router.auth.accounts import Account, Accounts, owner_of
from funitel.router.core import request_context
from funitel.router.core.request import DEFAULT_MODEL
from funitel.router.middleware.operation import Operation

_ACCOUNT = "funitel.account"  # in a request's scope: the account of the key that was checked


class KeyCheck:
    """Refuse a request without the right key as `Authorization: Bearer <key>` or `x-api-key: <key>`.

    It stands around one route, so what is checked is the route that was found, whatever was written to find it.

    Args:
        app: the route.
        operation: what the table says of it.
        accounts: those of all keys.
        model: the name of the model that is served.
    """

    def __init__(self, app: ASGIApp, operation: Operation, accounts: Accounts, model: str) -> None:
        self._app = app
        self._operation = operation
        self._accounts = accounts
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        account = self._accounts.find(_tokens(scope))
        if account is None:
            raise Unauthorized("missing or wrong API key")
        scope[_ACCOUNT] = account
        request_context.current().key_name = account.key.name
        account.check_route(self._operation.path)
        if self._operation.body is not None:
            account.check_model(self._model)  # whatever name the body gives it
        with account.entered(time.monotonic()):
            await self._app(scope, receive, send)


def account_of(scope: Scope) -> Account | None:
    """The account that a request is charged to; None where no key is asked for."""
    return scope.get(_ACCOUNT)


def owner_of_request(scope: Scope) -> bytes:
    """Whose it is, as a hash: the key's that was checked, else of the token it carries; empty without one."""
    account = account_of(scope)
    if account is not None:
        return account.owner
    token = next((token for token in _tokens(scope) if token), b"")
    return owner_of(token) if token else b""


def tenant_of(scope: Scope) -> bytes:
    """Whose the responses are that a request may see, as a hash; everybody's are one's where no key is asked for."""
    account = account_of(scope)
    return b"" if account is None else account.owner


def check_model(scope: Scope, asked: object) -> None:
    """Raise Forbidden where a body asks for a model that the key is not for; TGI's clients may name none."""
    account = account_of(scope)
    if account is not None and isinstance(asked, str) and asked not in ("", DEFAULT_MODEL):
        account.check_model(asked)


def _tokens(scope: Scope) -> tuple[bytes, bytes]:
    """What a request carries as a bearer token and as `x-api-key`; empty where it carries none."""
    scheme, _, token = _header(scope, b"authorization").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b"", _header(scope, b"x-api-key")


def _header(scope: Scope, name: bytes) -> bytes:
    """The value of a request's header, or nothing."""
    return next((value for key, value in scope["headers"] if key == name), b"")
