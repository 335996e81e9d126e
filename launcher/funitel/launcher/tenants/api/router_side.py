"""Routes of the router: what it checks requests by, and what they have used."""

from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from funitel.launcher.control_plane.api.requests import json_of
from funitel.launcher.control_plane.api.router_side import stream_of
from funitel.launcher.tenants.api.requests import actor_of_headers, tenants_of
from funitel.proto.security.quota import QuotaReservation, Settlement


async def watch(request: Request) -> Response:
    """Users and keys, one state a line, from the present one on."""
    return stream_of(tenants_of(request).broadcast.watch(), request.app.state.closing)


async def taken(request: Request) -> Response:
    """Note that a router has taken a state."""
    body: dict[str, Any] = await json_of(request)
    await tenants_of(request).broadcast.taken(body["watcher"], body["version"])
    return Response(status_code=204)


async def charge(request: Request) -> Response:
    """Settle requests and reserve for others; the answer says of each reservation whether it was refused."""
    body: dict[str, Any] = await json_of(request)
    refusals = await tenants_of(request).charge(
        body["router"],
        body["number"],
        [QuotaReservation(**each) for each in body["reservations"]],
        [Settlement(**each) for each in body["settlements"]],
    )
    answers = [None if each is None else {"limit": each.limit, "message": each.message} for each in refusals]
    return JSONResponse({"refusals": answers})


async def note(request: Request) -> Response:
    """Append a row about what the router itself has changed for a client."""
    body: dict[str, Any] = await json_of(request)
    row = actor_of_headers(request.headers, body["action"]).row(body["object"], body["status"])
    await tenants_of(request).note(replace(row, before=body.get("before"), after=body.get("after")))
    return Response(status_code=204)


ROUTES = (
    Route("/v1/fleet/tenants", watch, methods=["GET"]),
    Route("/v1/fleet/tenants/taken", taken, methods=["POST"]),
    Route("/v1/fleet/audit", note, methods=["POST"]),
    Route("/v1/fleet/charges", charge, methods=["POST"]),
)
