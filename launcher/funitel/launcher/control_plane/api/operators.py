"""Routes of registrations, engines, the cache and workers."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from funitel.launcher.control_plane.api.registration_body import check_type, registration_of
from funitel.launcher.control_plane.api.requests import flag_of, fleet_of, json_of, part_of, tools_of
from funitel.launcher.control_plane.records import ModelType, Registration, WorkerEntry, as_json
from funitel.proto.errors import InvalidRequest, NotFound

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_REGISTRATIONS = "/v1/model_registrations/{type}"


async def register(request: Request) -> Response:
    """Register a custom model."""
    registration = registration_of(part_of(request, "type"), await json_of(request))
    if registration.spec is not None:
        await tools_of(request).check_spec(registration.spec, "spec")
    await fleet_of(request).register(registration)
    return JSONResponse(_summary(registration))


async def registrations(request: Request) -> Response:
    """The custom models of a type."""
    found = fleet_of(request).registrations(check_type(part_of(request, "type")))
    return JSONResponse([_summary(each) for each in found])


async def registration(request: Request) -> Response:
    """The definition of a custom model, as it was given, with its name and type."""
    type, name = check_type(part_of(request, "type")), part_of(request, "name")
    for each in fleet_of(request).registrations(type):
        if each.name == name:
            named = {"model_name": each.name, "model_type": each.type, "is_builtin": False}
            return JSONResponse(dict(each.definition) | named)
    raise NotFound(f"no model {name} of type {type} is registered")


async def unregister(request: Request) -> Response:
    """Remove a registration."""
    type, name = check_type(part_of(request, "type")), part_of(request, "name")
    await fleet_of(request).unregister(type, name)
    return JSONResponse({"model_name": name})


def _summary(each: Registration) -> dict[str, Any]:
    return {
        "model_name": each.name,
        "model_type": each.type,
        "is_builtin": False,
        "persist": each.persist,
        "model": each.model,
        "model_description": each.description,
    }


async def engines(request: Request) -> Response:
    """Options of a model with reasons; a type of models may stand before its name."""
    model = part_of(request, "model")
    first, slash, rest = model.partition("/")
    if slash and first in tuple(ModelType):
        model = rest
    if not model:
        raise NotFound("the path names no model")
    return JSONResponse(dict(await fleet_of(request).engines(model)))


async def cached(request: Request) -> Response:
    """The models on the disk, or those of a name."""
    name = request.query_params.get("model_name")
    found = [each for each in await fleet_of(request).cached() if name in (None, each.model_name)]
    return JSONResponse({"list": as_json(found)})


async def remove_cached(request: Request) -> Response:
    """Delete a model from the disk; with `check=true` only say what would go."""
    name = request.query_params.get("model_name")
    if not name:
        raise InvalidRequest("`model_name` must be given", "model_name")
    check = flag_of(request, "check", default=False)
    found = await fleet_of(request).remove_cached(name, check=check)
    return JSONResponse({"list": as_json(found), "deleted": not check})


async def workers(request: Request) -> Response:
    """The machines on which replicas run."""
    return JSONResponse({"workers": as_json(fleet_of(request).workers())})


async def cluster(request: Request) -> Response:
    """The same in Xinference's shape: the supervisor, then the workers."""
    found = fleet_of(request).workers()
    supervisor = {"node_type": "Supervisor", "ip_address": "", "gpu_count": 0, "gpu_vram_total": 0}
    return JSONResponse([supervisor, *map(_node, found)])


def _node(worker: WorkerEntry) -> Mapping[str, Any]:
    total, free = worker.memory_bytes or 0, worker.free_memory_bytes or 0
    return {
        "node_type": "Worker",
        "ip_address": worker.address or worker.name,
        "gpu_count": len(worker.gpus),
        "gpu_vram_total": sum(gpu.get("memory_bytes") or 0 for gpu in worker.gpus),
        "cpu_count": worker.cores,
        "mem_total": total,
        "mem_available": free,
        "mem_used": max(0, total - free),
    }


async def metrics(request: Request) -> Response:
    """What the control plane counts."""
    return Response(fleet_of(request).metrics(), media_type=PROMETHEUS)


ROUTES = (
    Route(_REGISTRATIONS, register, methods=["POST"]),
    Route(_REGISTRATIONS, registrations, methods=["GET"]),
    Route(f"{_REGISTRATIONS}/{{name:name}}", registration, methods=["GET"]),
    Route(f"{_REGISTRATIONS}/{{name:name}}", unregister, methods=["DELETE"]),
    Route("/v1/engines/{model:name}", engines, methods=["GET"]),
    Route("/v1/cache/models", cached, methods=["GET"]),
    Route("/v1/cache/models", remove_cached, methods=["DELETE"]),
    Route("/v1/workers", workers, methods=["GET"]),
    Route("/v1/cluster/info", cluster, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
)
