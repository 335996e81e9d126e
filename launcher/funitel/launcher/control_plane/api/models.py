"""Routes of models and their replicas."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from funitel.launcher.control_plane.api.launch_body import change_of, launch_of, replicas_of
from funitel.launcher.control_plane.api.requests import flag_of, fleet_of, json_of, name_of, replica_of
from funitel.launcher.control_plane.records import ModelEntry, as_json

T = TypeVar("T")
ACCEPTED = 202
_MODEL = "/v1/models/{name:name}"  # a name may have slashes, percent-encoded or not

_going_on: set["asyncio.Future[Any]"] = set()  # what goes on when its client has left


async def _uncancelled(call: Awaitable[T]) -> T:
    """The result of a call that goes on where this one is cancelled."""
    task = asyncio.ensure_future(call)
    _going_on.add(task)
    task.add_done_callback(_forget)
    return await asyncio.shield(task)


def _forget(task: "asyncio.Future[Any]") -> None:
    _going_on.discard(task)
    if not task.cancelled():
        task.exception()  # its client has it, or has left


async def launch(request: Request) -> Response:
    """Launch a model; wait until it is ready unless `wait_ready=false`."""
    waits = flag_of(request, "wait_ready", default=True)
    asked = launch_of(await json_of(request))
    entry = await _uncancelled(fleet_of(request).launch(asked, wait_ready=waits))
    return JSONResponse({"model_uid": entry.name} | entry.to_json(), 200 if waits else ACCEPTED)


async def listed(request: Request) -> Response:
    """All models."""
    return JSONResponse({"object": "list", "data": as_json(fleet_of(request).models())})


async def described(request: Request) -> Response:
    """One model."""
    return _entry(fleet_of(request).model(name_of(request)))


async def terminate(request: Request) -> Response:
    """Drain, stop and forget a model."""
    name = name_of(request)
    await _uncancelled(fleet_of(request).terminate(name))
    return JSONResponse({"name": name})


async def change(request: Request) -> Response:
    """Change weights, ttl, pinned, priority or the default."""
    changed = change_of(await json_of(request))
    return _entry(await fleet_of(request).change(name_of(request), changed))


async def progress(request: Request) -> Response:
    """How far a launch is."""
    return JSONResponse(fleet_of(request).progress(name_of(request)).to_json())


async def cancel(request: Request) -> Response:
    """Cancel a launch."""
    name = name_of(request)
    await _uncancelled(fleet_of(request).cancel(name))
    return JSONResponse({"name": name})


async def events(request: Request) -> Response:
    """The history of a model."""
    return JSONResponse({"events": as_json(fleet_of(request).events(name_of(request)))})


async def load(request: Request) -> Response:
    """Load a known model."""
    waits = flag_of(request, "wait_ready", default=True)
    entry = await _uncancelled(fleet_of(request).load(name_of(request), wait_ready=waits))
    return _entry(entry, 200 if waits else ACCEPTED)


async def unload(request: Request) -> Response:
    """Drain a model and free its memory."""
    return _entry(await _uncancelled(fleet_of(request).unload(name_of(request))))


async def sleep(request: Request) -> Response:
    """Free the KV memory of a model."""
    return _entry(await _uncancelled(fleet_of(request).sleep(name_of(request))))


async def wake(request: Request) -> Response:
    """Wake a model."""
    waits = flag_of(request, "wait_ready", default=True)
    entry = await _uncancelled(fleet_of(request).wake(name_of(request), wait_ready=waits))
    return _entry(entry, 200 if waits else ACCEPTED)


async def replicas(request: Request) -> Response:
    """The replicas of a model."""
    return JSONResponse({"replicas": as_json(fleet_of(request).replicas(name_of(request)))})


async def add_replica(request: Request) -> Response:
    """Start further replicas."""
    count, weight = replicas_of(await json_of(request, is_required=False))
    added = await _uncancelled(fleet_of(request).add_replica(name_of(request), count=count, weight=weight))
    return JSONResponse({"replicas": as_json(added)}, ACCEPTED)


async def remove_replica(request: Request) -> Response:
    """Drain and stop a replica."""
    name, replica = name_of(request), replica_of(request)
    await _uncancelled(fleet_of(request).remove_replica(name, replica))
    return JSONResponse({"name": name, "replica": replica})


async def instances(request: Request) -> Response:
    """The replicas of all models."""
    return JSONResponse({"instances": [dict(each) for each in fleet_of(request).instances()]})


def _entry(entry: ModelEntry, status: int = 200) -> Response:
    return JSONResponse(entry.to_json(), status)


ROUTES = (
    Route("/v1/models", launch, methods=["POST"]),
    Route("/v1/models", listed, methods=["GET"]),
    Route("/v1/models/instances", instances, methods=["GET"]),
    Route(f"{_MODEL}/progress", progress, methods=["GET"]),
    Route(f"{_MODEL}/events", events, methods=["GET"]),
    Route(f"{_MODEL}/cancel", cancel, methods=["POST"]),
    Route(f"{_MODEL}/load", load, methods=["POST"]),
    Route(f"{_MODEL}/unload", unload, methods=["POST"]),
    Route(f"{_MODEL}/sleep", sleep, methods=["POST"]),
    Route(f"{_MODEL}/wake", wake, methods=["POST"]),
    Route(f"{_MODEL}/replicas", replicas, methods=["GET"]),
    Route(f"{_MODEL}/replicas", add_replica, methods=["POST"]),
    Route(f"{_MODEL}/replicas/{{replica}}", remove_replica, methods=["DELETE"]),
    Route(_MODEL, described, methods=["GET"]),
    Route(_MODEL, terminate, methods=["DELETE"]),
    Route(_MODEL, change, methods=["PATCH"]),
)
