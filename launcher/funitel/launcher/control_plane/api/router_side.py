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
from funitel.launcher.control_plane.records import Activity, JSONObject

BLANK_LINE_SECONDS = 10.0
ACCEPTED = 202


async def watch(request: Request) -> Response:
    """Snapshots, one a line, from the present one on; a blank line where nothing changes for a time."""
    states = (snapshot.to_json() async for snapshot in fleet_of(request).watch())
    return stream_of(states, request.app.state.closing)


def stream_of(states: AsyncIterator[JSONObject], closing: asyncio.Event) -> Response:
    """An answer of states, one a line, which ends when the server closes; a blank line where none comes for a time."""
    return StreamingResponse(_lines(states, closing), media_type="application/x-ndjson")


async def _lines(states: AsyncIterator[JSONObject], closing: asyncio.Event) -> AsyncIterator[bytes]:
    coming, ending = asyncio.ensure_future(_next(states)), asyncio.ensure_future(closing.wait())
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
            state = coming.result()
            if state is None:
                return
            yield json.dumps(state, separators=(",", ":")).encode() + b"\n"
            coming = asyncio.ensure_future(_next(states))
    finally:
        for task in (coming, ending):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if close := getattr(states, "aclose", None):
            await close()


async def _next(states: AsyncIterator[JSONObject]) -> JSONObject | None:
    """The next state; None after the last one."""
    return await anext(states, None)


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
