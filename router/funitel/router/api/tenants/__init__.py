"""Routes of users, keys, usage and sessions; the control plane answers them."""

from functools import partial

from funitel.router.api.common.error_schemas import OpenAIErrorResponse
from funitel.router.api.tenants.handlers import forward, forward_body, session
from funitel.router.api.tenants.schema import (
    ApiKey,
    ApiKeys,
    ApiKeyWithText,
    AuditList,
    AuditQuery,
    ImportedKeys,
    KeyChange,
    KeysQuery,
    Login,
    ModelPrice,
    ModelPrices,
    NewKey,
    NewPassword,
    NewUser,
    SessionState,
    TenantUser,
    TenantUsers,
    UsageList,
    UsageQuery,
    UserChange,
)
from funitel.router.auth.access import Access
from funitel.router.middleware.operation import Operation

FAILURES = (400, 404, 503)
BODY_FAILURES = (400, 404, 409, 413, 415, 503)
USER, KEY = "/v1/users/{user}", "/v1/keys/{id}"

_row = partial(Operation, error=OpenAIErrorResponse)
_own = partial(_row, access=Access.OWN)
_admin = partial(_row, access=Access.ADMIN)
_login = partial(_row, access=Access.LOGIN)
_read = {"method": "GET", "failures": FAILURES}
_post = {"method": "POST", "failures": BODY_FAILURES}
_patch = {"method": "PATCH", "failures": BODY_FAILURES}
_delete = {"method": "DELETE", "failures": (*FAILURES, 409)}

ROUTES = (
    _login(
        "/v1/auth/session",
        session,
        "Whether there are users, and the session of this browser",
        answer=SessionState,
        **_read,
    ),
    _login(
        "/v1/auth/login",
        forward_body,
        "Log in by name and password",
        Login,
        SessionState,
        method="POST",
        failures=(*BODY_FAILURES, 401, 429),
    ),
    _own("/v1/auth/logout", forward, "End the session of this browser", **_post),
    _login("/v1/auth/oidc/login", forward, "Go to the provider of OpenID Connect", method="GET", failures=FAILURES),
    _login("/v1/auth/oidc/callback", forward, "Come back from it", method="GET", failures=(*FAILURES, 401, 403, 409)),
    _own("/v1/users", forward, "The users that one may see", answer=TenantUsers, **_read),
    _admin("/v1/users", forward_body, "Add a user", NewUser, TenantUser, **_post),
    _own(USER, forward, "One user", answer=TenantUser, **_read),
    _admin(USER, forward_body, "Change role or limits, or disable a user", UserChange, TenantUser, **_patch),
    _admin(USER, forward, "Delete a user and revoke the keys", **_delete),
    _own(
        f"{USER}/password",
        forward_body,
        "Set a password, which ends all sessions",
        NewPassword,
        method="POST",
        failures=(*BODY_FAILURES, 429),
    ),
    _own("/v1/keys", forward, "The keys that one may see", query=KeysQuery, answer=ApiKeys, **_read),
    _own("/v1/keys", forward_body, "Make a key", NewKey, ApiKeyWithText, **_post),
    _admin("/v1/keys/import", forward_body, "Take over the keys of a file", ImportedKeys, ApiKeys, **_post),
    _own(KEY, forward, "One key", answer=ApiKey, **_read),
    _own(KEY, forward_body, "Change name, scopes, limits, expiry or ban", KeyChange, ApiKey, **_patch),
    _own(KEY, forward, "Revoke a key", answer=ApiKey, **_delete),
    _own(f"{KEY}/rotate", forward, "Give a key another text", answer=ApiKeyWithText, **_post),
    _own("/v1/prices", forward, "The prices of models", answer=ModelPrices, **_read),
    _admin("/v1/prices", forward_body, "Set the price of a model", ModelPrice, ModelPrice, **_post),
    _own("/v1/usage", forward, "Usage by day, user, key and model", query=UsageQuery, answer=UsageList, **_read),
    _admin("/v1/audit", forward, "Changes of state, newest first", query=AuditQuery, answer=AuditList, **_read),
)
