"""Routes of users, keys, prices, usage and the audit."""

from datetime import UTC, date, datetime, timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from funitel.launcher.control_plane.api.requests import json_of, part_of
from funitel.launcher.control_plane.checks import Fields, check_name
from funitel.launcher.tenants.api.requests import (
    MAX_MONEY,
    actor_of,
    changes_of_key,
    changes_of_user,
    key_of_body,
    number_of_path,
    tenants_of,
    user_of_body,
)
from funitel.launcher.tenants.imported import keys_of_lines
from funitel.launcher.tenants.records import Price, TenantKey
from funitel.proto.errors import InvalidRequest

CREATED, NO_CONTENT = 201, 204
DEFAULT_DAYS, MAX_DAYS = 30, 3660
DEFAULT_ROWS, MAX_ROWS = 100, 1000

# Users


async def users(request: Request) -> Response:
    """The users that the actor may see."""
    return JSONResponse({"users": [user.to_json() for user in tenants_of(request).users(actor_of(request))]})


async def add_user(request: Request) -> Response:
    """Add a user."""
    user, password = user_of_body(await json_of(request))
    added = await tenants_of(request).add_user(actor_of(request), user, password)
    return JSONResponse(added.to_json(), CREATED)


async def user(request: Request) -> Response:
    """One user."""
    return JSONResponse(tenants_of(request).user(actor_of(request), part_of(request, "name")).to_json())


async def change_user(request: Request) -> Response:
    """Change role, limits, or whether the user is disabled."""
    tenants, actor, name = tenants_of(request), actor_of(request), part_of(request, "name")
    changes = changes_of_user(await json_of(request), tenants.user(actor, name))
    return JSONResponse((await tenants.change_user(actor, name, changes)).to_json())


async def delete_user(request: Request) -> Response:
    """Delete a user, and revoke the keys."""
    await tenants_of(request).delete_user(actor_of(request), part_of(request, "name"))
    return Response(status_code=NO_CONTENT)


async def set_password(request: Request) -> Response:
    """Set a password."""
    given = Fields(await json_of(request))
    password, current = given.required_secret("password"), given.secret("current_password")
    given.finish()
    await tenants_of(request).set_password(actor_of(request), part_of(request, "name"), password, current)
    return Response(status_code=NO_CONTENT)


# Keys


async def keys(request: Request) -> Response:
    """The keys that the actor may see."""
    found = tenants_of(request).keys(actor_of(request), request.query_params.get("user"))
    return JSONResponse({"keys": [key.to_json() for key in found]})


async def add_key(request: Request) -> Response:
    """Make a key; the answer has its text, which is stored nowhere."""
    actor = actor_of(request)
    key, text = await tenants_of(request).add_key(actor, key_of_body(await json_of(request), actor.user))
    return _with_text(key, text, CREATED)


async def key(request: Request) -> Response:
    """One key."""
    return JSONResponse(tenants_of(request).key(actor_of(request), number_of_path(request, "id")).to_json())


async def change_key(request: Request) -> Response:
    """Change name, scopes, limits, group, expiry or ban of a key."""
    tenants, actor, number = tenants_of(request), actor_of(request), number_of_path(request, "id")
    body = await json_of(request)
    changes = changes_of_key(body, tenants.key(actor, number))
    return JSONResponse((await tenants.change_key(actor, number, changes)).to_json())


async def revoke_key(request: Request) -> Response:
    """Revoke a key."""
    found = await tenants_of(request).revoke_key(actor_of(request), number_of_path(request, "id"))
    return JSONResponse(found.to_json())


async def rotate_key(request: Request) -> Response:
    """Give a key another text."""
    return _with_text(*await tenants_of(request).rotate_key(actor_of(request), number_of_path(request, "id")))


def _with_text(key: TenantKey, text: str, status: int = 200) -> Response:
    return JSONResponse(key.to_json() | {"key": text}, status, {"cache-control": "no-store"})


async def import_keys(request: Request) -> Response:
    """Take over the keys of a file for a user."""
    given = Fields(await json_of(request))
    user, lines = given.required("user"), given.texts("lines")
    given.finish()
    if not lines:
        raise InvalidRequest("`lines` must be given: those of a file of keys", "lines")
    added = await tenants_of(request).import_keys(actor_of(request), keys_of_lines(lines, user))
    return JSONResponse({"keys": [key.to_json() for key in added]}, CREATED)


# Prices, usage, audit


async def prices(request: Request) -> Response:
    """The prices of models."""
    return JSONResponse({"prices": [price.to_json() for price in tenants_of(request).prices()]})


async def set_price(request: Request) -> Response:
    """Set the price of a model."""
    given = Fields(await json_of(request))
    model = check_name(given.required("model"), "model")
    found = {name: given.number(name, least=0) for name in ("prompt", "completion")}
    given.finish()
    price = Price(model=model, **{name: _amount(name, value) for name, value in found.items()})
    await tenants_of(request).set_price(actor_of(request), price)
    return JSONResponse(price.to_json())


def _amount(name: str, value: float | None) -> float:
    if value is None:
        raise InvalidRequest(f"`{name}` must be given: the price of a million tokens", name)
    if value > MAX_MONEY:
        raise InvalidRequest(f"`{name}` must be at most {MAX_MONEY:g}. Given: {value:g}", name)
    return value


async def usage(request: Request) -> Response:
    """Usage by day, user, key and model."""
    query = request.query_params
    last = _day(query.get("last"), "last") or datetime.now(UTC).date()
    first = _day(query.get("first"), "first") or last - timedelta(days=DEFAULT_DAYS - 1)
    if not 0 <= (last - first).days < MAX_DAYS:
        raise InvalidRequest(f"`first` must be at most {MAX_DAYS} days before `last`. Given: {first}, {last}", "first")
    span: dict[str, Any] = {"first": first.isoformat(), "last": last.isoformat()}
    rows = await tenants_of(request).usage(actor_of(request), **span, user=query.get("user"))
    return JSONResponse(span | {"usage": rows})


def _day(text: str | None, name: str) -> date | None:
    try:
        return None if text is None else date.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"`{name}` must be a day such as 2027-01-31. Given: {text!r}", name) from None


async def audit(request: Request) -> Response:
    """Rows of the audit, newest first."""
    query = request.query_params
    rows = await tenants_of(request).audit(
        actor_of(request),
        limit=_whole(query.get("limit"), "limit", MAX_ROWS) or DEFAULT_ROWS,
        before=_whole(query.get("before"), "before", 2**62),
        actor=query.get("actor"),
        object=query.get("object"),
    )
    return JSONResponse({"audit": [row.to_json() | {"place": place} for place, row in rows]})


def _whole(text: str | None, name: str, most: int) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 19 or not 1 <= int(text) <= most:
        raise InvalidRequest(f"`{name}` must be a whole number within 1..{most}. Given: {text!r}", name)
    return int(text)


ROUTES = (
    Route("/v1/users", users, methods=["GET"]),
    Route("/v1/users", add_user, methods=["POST"]),
    Route("/v1/users/{name}", user, methods=["GET"]),
    Route("/v1/users/{name}", change_user, methods=["PATCH"]),
    Route("/v1/users/{name}", delete_user, methods=["DELETE"]),
    Route("/v1/users/{name}/password", set_password, methods=["POST"]),
    Route("/v1/keys", keys, methods=["GET"]),
    Route("/v1/keys", add_key, methods=["POST"]),
    Route("/v1/keys/import", import_keys, methods=["POST"]),
    Route("/v1/keys/{id}", key, methods=["GET"]),
    Route("/v1/keys/{id}", change_key, methods=["PATCH"]),
    Route("/v1/keys/{id}", revoke_key, methods=["DELETE"]),
    Route("/v1/keys/{id}/rotate", rotate_key, methods=["POST"]),
    Route("/v1/prices", prices, methods=["GET"]),
    Route("/v1/prices", set_price, methods=["POST"]),
    Route("/v1/usage", usage, methods=["GET"]),
    Route("/v1/audit", audit, methods=["GET"]),
)
