"""Which requests a request of a client may see and end."""

from collections.abc import Sequence

from starlette.requests import Request as HttpRequest

from funitel.proto.security.roles import Role
from funitel.router.auth.accounts import Account
from funitel.router.middleware.auth import account_of

REQUESTS_PATH = "/v1/requests"


def visible_owners(http: HttpRequest) -> frozenset[bytes] | None:
    """The owners of the requests that are visible; None for the requests of all keys.

    A key sees its own. A key with a scope that names these routes, such as `/v1/requests*`, sees those of all keys, if
    its user, where it has one, is an operator. A session sees those of its user, that of an operator those of all.
    """
    accounts = _visible(http)
    return None if accounts is None else frozenset(account.owner for account in accounts)


def visible_keys(http: HttpRequest) -> frozenset[str] | None:
    """The same by the names of the keys."""
    accounts = _visible(http)
    return None if accounts is None else frozenset(account.key.name for account in accounts)


def _visible(http: HttpRequest) -> Sequence[Account] | None:
    """The accounts of which the requests are visible; None for all."""
    account = account_of(http.scope)
    if account is None:
        return None
    tenant = account.tenant
    is_session = tenant is not None and tenant.is_session
    may_see_all = tenant is None or tenant.role.includes(Role.OPERATOR)
    if may_see_all and (is_session or any(route.startswith(REQUESTS_PATH) for route in account.key.routes)):
        return None
    return tenant.accounts() if tenant is not None and is_session else (account,)
