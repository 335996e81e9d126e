"""API keys and sessions over HTTP: check those of a request, and find the account and the tenant it belongs to.

A key is hashed here and passed no further: no log line or metric shows it. Its name is logged. A session is that of a
cookie, which a browser sends by itself; so a request that changes something must have the session's token too.
"""

import time

from starlette.requests import cookie_parser
from starlette.types import Scope

from funitel.proto.errors import Forbidden, Unauthorized
from funitel.proto.security.sessions import COOKIE, CSRF_HEADER, SECURE_COOKIE
from funitel.router.auth.accounts import Account, Accounts, owner_of
from funitel.router.core import request_context
from funitel.router.core.request import DEFAULT_MODEL, background_key
from funitel.router.middleware.operation import Operation

_ACCOUNT = "funitel.account"  # in a request's scope: the account of the key that was checked
_READING = ("GET", "HEAD", "OPTIONS")  # methods that change nothing
_BACKGROUND = "funitel.background"  # in a scope: the request is one of a batch


def check_key(scope: Scope, accounts: Accounts, operation: Operation, model: str | None) -> Account:
    """Return the account of the key given as `Authorization: Bearer <key>` or `x-api-key: <key>`, or of a session.

    Args:
        scope: of the request.
        accounts: those of all keys.
        operation: the route.
        model: name of the only model, for which the key must be; None where a request chooses one of several.

    Raises:
        Unauthorized: no key is given, or a wrong one.
        Forbidden: the key is not for this route, or not for this model; a session's change lacks the token.
        NotReady: the keys of users are not known yet.
        RateLimited: the client is banned for wrong keys.
    """
    account = account_of(scope) if is_background_request(scope) else _found(scope, accounts)
    if account is None:
        raise Unauthorized("missing or wrong API key")
    scope[_ACCOUNT] = account
    request_context.current().key_name = account.key.name
    account.check_route(operation.path, operation.access)
    if operation.body is not None and model is not None:
        account.check_model(model)  # whatever name the body gives it
    return account


def _found(scope: Scope, accounts: Accounts) -> Account | None:
    """The account of a request's key; a wrong key is counted for the client's address."""
    tokens, wrong_keys = _tokens(scope), accounts.wrong_keys
    client = scope.get("client")  # None: on a Unix socket
    if client is not None and wrong_keys.tries:
        wrong_keys.check(client[0], time.monotonic())
    if not any(tokens) and (account := _of_session(scope, accounts)) is not None:
        return account
    account = accounts.find(tokens)
    if account is None and client is not None and any(tokens):
        wrong_keys.count(client[0], time.monotonic())
    return account


def _of_session(scope: Scope, accounts: Accounts) -> Account | None:
    """The account of the session of a request's cookie.

    Raises:
        Forbidden: the request may change something and has not the session's token.
    """
    tenants = accounts.tenants
    cookies = None if tenants is None else _header(scope, b"cookie")
    if tenants is None or not cookies:
        return None
    found = tenants.session(_cookie(cookies, SECURE_COOKIE if scope["scheme"] == "https" else COOKIE))
    if found is None:
        return None
    session, account = found
    token = _header(scope, CSRF_HEADER.encode()).decode("latin-1")
    if scope["method"] not in _READING and not tenants.is_token_of(session, token):
        raise Forbidden(f"a request of a session that changes something needs its token in the header {CSRF_HEADER}")
    return account


def _cookie(header: bytes, name: str) -> str:
    """The value of a cookie, or nothing."""
    return cookie_parser(header.decode("latin-1")).get(name, "")


def act_in_background(scope: Scope, account: Account | None) -> None:
    """Make a request that is made in this process one of a batch, charged to an account that is known to be valid."""
    scope[_BACKGROUND] = True
    scope[_ACCOUNT] = account


def is_background_request(scope: Scope) -> bool:
    """Whether a request is one of a batch, which runs in what others leave free."""
    return _BACKGROUND in scope


def account_of(scope: Scope) -> Account | None:
    """Return the account that a request is charged to; None where no key is required."""
    return scope.get(_ACCOUNT)


def owner_of_request(scope: Scope) -> bytes:
    """Return the owner of a request as a hash: of its key, else of the token it carries; empty without one."""
    account = account_of(scope)
    if is_background_request(scope):
        return background_key(b"" if account is None else account.owner)
    if account is not None:
        return account.owner
    token = next((token for token in _tokens(scope) if token), b"")
    return owner_of(token) if token else b""


def tenant_of(scope: Scope) -> bytes:
    """Return the owner of the responses that a request may see, as a hash; empty, for all, without keys."""
    account = account_of(scope)
    return b"" if account is None else account.owner


def check_model(scope: Scope, asked: object) -> None:
    """Raise Forbidden where a body names a model that the key is not for; TGI's clients may name none."""
    account = account_of(scope)
    if account is not None and isinstance(asked, str) and asked not in ("", DEFAULT_MODEL):
        account.check_model(asked)


def _tokens(scope: Scope) -> tuple[bytes, bytes]:
    """Return the bearer token and the `x-api-key` of a request; empty where there is none."""
    scheme, _, token = _header(scope, b"authorization").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b"", _header(scope, b"x-api-key")


def _header(scope: Scope, name: bytes) -> bytes:
    """The value of a request's header, or nothing."""
    return next((value for key, value in scope["headers"] if key == name), b"")
