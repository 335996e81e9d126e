"""Routes of the router: the stream of snapshots, and what it says of models and replicas."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from funitel.launcher.control_plane.api.requests import fleet_of, json_of
from funitel.launcher.control_plane.checks import Fields, wrong
from funitel.launcher.control_plane.interface import Fleet
from funitel.launcher.control_plane.records import Activity, Snapshot

BLANK_LINE_SECONDS = 10.0
ACCEPTED = 202


async def watch(request: Request) -> Response:
    """Snapshots, one a line, from the present one on; a blank line where nothing changes for a time."""
    lines = _lines(fleet_of(request), request.app.state.closing)
    return StreamingResponse(lines, media_type="application/x-ndjson")


async def _lines(fleet: Fleet, closing: asyncio.Event) -> AsyncIterator[bytes]:
    snapshots = fleet.watch()
    coming, ending = asyncio.ensure_future(_next(snapshots)), asyncio.ensure_future(closing.wait())
    try:
        while True:
            done, _ = await asyncio.wait(
                {coming, ending}, timeout=BLANK_LINE_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if ending in done:
                return
            if not done:
                yield b"\n"
                continue
            snapshot = coming.result()
            if snapshot is None:
                return
            yield json.dumps(snapshot.to_json(), separators=(",", ":")).encode() + b"\n"
            coming = asyncio.ensure_future(_next(snapshots))
    finally:
        for task in (coming, ending):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if close := getattr(snapshots, "aclose", None):
            await close()


async def _next(snapshots: AsyncIterator[Snapshot]) -> Snapshot | None:
    """The next snapshot; None after the last one."""
    return await anext(snapshots, None)


async def activity(request: Request) -> Response:
    """Note running and waiting requests of models."""
    given = Fields(await json_of(request))
    models = given.mapping("models") or {}
    given.finish()
    noted = {}
    for name, body in models.items():
        of_model = Fields(body, f"models.{name}")
        noted[name] = Activity(
            running=of_model.whole("running", 0) or 0,
            waiting=of_model.whole("waiting", 0) or 0,
            idle_s=of_model.number("idle_s", least=0) or 0.0,
            requests=of_model.whole("requests", 0, 2**63) or 0,
        )
        of_model.finish()
    fleet_of(request).activity(noted)
    return JSONResponse({})


async def released(request: Request) -> Response:
    """Note that the router no longer uses a replica."""
    given = Fields(await json_of(request))
    name, replica = given.required("model"), _replica(given)
    given.finish()
    fleet_of(request).released(name, replica)
    return JSONResponse({})


async def attached(request: Request) -> Response:
    """Note that the router uses a replica, or cannot."""
    given = Fields(await json_of(request))
    name, replica = given.required("model"), _replica(given)
    seconds, error = given.number("seconds", least=0), given.text_of_lines("error")
    given.finish()
    fleet_of(request).attached(name, replica, seconds=seconds, error=None if error is None else " ".join(error.split()))
    return JSONResponse({})


async def load(request: Request) -> Response:
    """Load a model that a request names."""
    given = Fields(await json_of(request))
    name = given.required("model")
    given.finish()
    await fleet_of(request).load_on_demand(name)
    return JSONResponse({"model": name}, ACCEPTED)


def _replica(given: Fields) -> int:
    replica = given.whole("replica", 0)
    if replica is None:
        raise wrong("replica", "must be given", None)
    return replica


ROUTES = (
    Route("/v1/fleet/watch", watch, methods=["GET"]),
    Route("/v1/fleet/activity", activity, methods=["POST"]),
    Route("/v1/fleet/released", released, methods=["POST"]),
    Route("/v1/fleet/attached", attached, methods=["POST"]),
    Route("/v1/fleet/load", load, methods=["POST"]),
)
