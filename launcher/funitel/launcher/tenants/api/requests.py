"""What the routes of tenants read of a request: its actor, and the records of its body."""

import time
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request

from funitel.launcher.control_plane.checks import Fields, number_of, wrong
from funitel.launcher.tenants.records import TenantKey, User
from funitel.launcher.tenants.service import Actor, Tenants
from funitel.proto.errors import NotFound
from funitel.proto.security.asker import ACTOR, CLIENT, ROLE, USER
from funitel.proto.security.keys import MAX_LIMIT, check_name, check_pattern, parse_instant
from funitel.proto.security.quota import TenantLimits
from funitel.proto.security.roles import Role

BY_SOCKET = "socket"
MAX_MONTHLY = 10**15
MAX_MONEY = 1e12
MAX_INSTANT = 253_402_300_799.0  # Unix seconds: the end of the year 9999
MAX_PATTERNS = 32
NO_LIMITS = TenantLimits()
_PER_MINUTE = ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests")
_PER_MONTH = ("requests_per_month", "tokens_per_month")


def tenants_of(request: Request) -> Tenants:
    """The tenants behind the API; raises NotFound where the server has none."""
    found: Tenants | None = request.app.state.tenants
    if found is None:
        raise NotFound("this server has no users: start it with --users")
    return found


def actor_of(request: Request) -> Actor:
    """The author of a request: a user, a key of a file, or a program on the control socket."""
    return actor_of_headers(request.headers, f"{request.method} {request.url.path}")


def actor_of_headers(headers: Headers, action: str) -> Actor:
    """The author that headers name; one that is no user came by a key for the very route, or by the socket."""
    user, role, via = headers.get(USER), headers.get(ROLE), headers.get(ACTOR, BY_SOCKET)
    return Actor(
        name=user or via,
        role=Role.ADMIN if role is None else Role(role),
        address=headers.get(CLIENT, ""),
        action=action,
        user=user,
        via=via,
    )


def number_of_path(request: Request, name: str) -> int:
    """An id in the path; raises NotFound for what is none."""
    text = request.path_params[name]
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise NotFound(f"there is no key {text!r}")
    return int(text)


# Records


def name_of(given: Fields, field: str = "name") -> str:
    """A name that must be given."""
    return _checked(given, field, given.required(field))


def group_of(given: Fields) -> str | None:
    """The group of a key."""
    value = given.text("group")
    return None if value is None else _checked(given, "group", value)


def _checked(given: Fields, field: str, value: str) -> str:
    try:
        return check_name(value, given.path(field))
    except ValueError:
        rule = "must have 1 to 64 letters, digits or ._@- and begin with a letter or digit"
        raise wrong(given.path(field), rule, value) from None


def role_of(given: Fields) -> Role | None:
    """A role."""
    value = given.text("role", tuple(Role))
    return None if value is None else Role(value)


def limits_of(given: Fields, before: TenantLimits = NO_LIMITS) -> TenantLimits:
    """The limits of a body; those that it leaves out stay, and one that is null is lifted."""
    body = given.raw("limits")
    if body is None:
        return before
    limits = Fields(body, given.path("limits"))
    values = before.to_json()
    for names, most in ((_PER_MINUTE, MAX_LIMIT), (_PER_MONTH, MAX_MONTHLY)):
        for name in names:
            if name in body:
                values[name] = limits.whole(name, 1, most)
    if "budget_per_month" in body:
        budget = limits.number("budget_per_month", least=0)
        if budget is not None and budget > MAX_MONEY:
            raise wrong(limits.path("budget_per_month"), f"must be at most {MAX_MONEY:g}", budget)
        values["budget_per_month"] = budget
    for name in values:
        limits.raw(name)  # known, so that a misspelt name is told
    limits.finish()
    return TenantLimits(**values)


def scope_of(given: Fields, field: str) -> tuple[str, ...]:
    """The patterns of routes or models of a key."""
    values = given.texts(field) or []
    if len(values) > MAX_PATTERNS:
        raise wrong(given.path(field), f"must have at most {MAX_PATTERNS} patterns, it has {len(values)}", values)
    for value in values:
        try:
            check_pattern(value, field)
        except ValueError as error:
            message = str(error).removeprefix(f"`{field}` ").partition(". Given")[0]
            raise wrong(given.path(field), message, value) from None
    return tuple(values)


def expiry_of(given: Fields) -> float | None:
    """An instant in the future: Unix seconds, or a date and time."""
    value = given.raw("expires")
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = parse_instant(value, given.path("expires")).timestamp()
        except ValueError:
            raise wrong(given.path("expires"), "must be like 2027-01-31 or 2027-01-31T12:00:00Z", value) from None
    instant = number_of(value, given.path("expires"))
    if instant <= time.time():
        raise wrong(given.path("expires"), "must be in the future", value)
    if instant > MAX_INSTANT:
        raise wrong(given.path("expires"), "must be before the year 10000", value)
    return instant


def user_of_body(body: Any) -> tuple[User, str | None]:
    """A new user and the password, if one is given."""
    given = Fields(body)
    user = User(name=name_of(given), role=role_of(given) or Role.USER, limits=limits_of(given))
    password = given.secret("password")
    given.finish()
    return user, password


def changes_of_user(body: Any, before: User) -> dict[str, Any]:
    """What a body changes of a user."""
    given = Fields(body)
    changes: dict[str, Any] = {"limits": limits_of(given, before.limits)}
    if (role := role_of(given)) is not None:
        changes["role"] = role
    if (is_disabled := given.boolean("is_disabled")) is not None:
        changes["is_disabled"] = is_disabled
    given.finish()
    return changes


def key_of_body(body: Any, user: str | None) -> TenantKey:
    """A new key; of the actor where the body names no user."""
    given = Fields(body)
    owner = given.text("user") or user
    if owner is None:
        raise wrong("user", "must be given", None)
    key = TenantKey(
        name=name_of(given),
        user=owner,
        routes=scope_of(given, "routes"),
        models=scope_of(given, "models"),
        limits=limits_of(given),
        group=group_of(given),
        expires=expiry_of(given),
    )
    given.finish()
    return key


def changes_of_key(body: Any, before: TenantKey) -> dict[str, Any]:
    """What a body changes of a key; what is null is lifted."""
    given = Fields(body)
    changes: dict[str, Any] = {"limits": limits_of(given, before.limits)}
    readers: dict[str, Callable[[], Any]] = {
        "name": lambda: name_of(given),
        "routes": lambda: scope_of(given, "routes"),
        "models": lambda: scope_of(given, "models"),
        "group": lambda: group_of(given),
        "expires": lambda: expiry_of(given),
        "is_banned": lambda: bool(given.boolean("is_banned")),
    }
    for name, read in readers.items():
        if name in body:
            changes[name] = read()
        given.raw(name)
    given.finish()
    return changes
