"""Which requests an API key may see."""

from starlette.requests import Request as HttpRequest

from funitel.router.auth.accounts import Account
from funitel.router.middleware.auth import account_of

REQUESTS_PATH = "/v1/requests"


def visible_owner(http: HttpRequest) -> bytes | None:
    """The owner of the requests that an API key sees: its own; None for the requests of all keys.

    A key with a scope that names these routes, such as `/v1/requests*`, sees those of all keys.
    """
    account = _bound(http)
    return None if account is None else account.owner


def visible_key(http: HttpRequest) -> str | None:
    """The same by the name of the key."""
    account = _bound(http)
    return None if account is None else account.key.name


def _bound(http: HttpRequest) -> Account | None:
    """The account of a key that sees its own requests alone."""
    account = account_of(http.scope)
    if account is None or any(route.startswith(REQUESTS_PATH) for route in account.key.routes):
        return None
    return account
