"""Handle the console: its files, and what its pages show."""

import time
from collections.abc import Container

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from funitel.proto.errors import NotFound
from funitel.proto.process.version import version
from funitel.router.api.common.body import json_answer, query_of
from funitel.router.api.common.handler import models_of
from funitel.router.api.common.visibility import visible_keys, visible_owners
from funitel.router.api.console.schema import (
    EndedRequestList,
    EndedRequestRecord,
    LiveModel,
    LiveQuery,
    LiveState,
    ModelNumbers,
    ModelSample,
    ReplicaNow,
)
from funitel.router.api.requests.handlers import running_of
from funitel.router.console.assets import HEADERS, INDEX, assets
from funitel.router.engine.snapshot import ReplicaState
from funitel.router.fleet.history import Sample
from funitel.router.fleet.models import ServedModel
from funitel.router.serving.service import Service
from funitel.router.telemetry.replica_metrics import ReplicaNumbers

NO_CACHE = {"cache-control": "no-cache"}  # a browser asks each time whether a file has changed


async def enter(http: HttpRequest) -> Response:
    """`/ui`: the pages are below it, so that their addresses are relative to it, behind a proxy's prefix too."""
    return Response(status_code=308, headers={"location": "ui/"})


async def asset(http: HttpRequest) -> Response:
    """`/ui/...`: a file of the console."""
    name = http.path_params.get("path") or INDEX
    found = assets().get(name)
    if found is None:
        raise NotFound(f"the console has no file {name!r}")
    headers = {**HEADERS, **NO_CACHE, "etag": found.etag, "vary": "accept-encoding"}
    if found.etag in http.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in http.headers.get("accept-encoding", ""):
        return Response(found.compressed, 200, {**headers, "content-encoding": "gzip"}, found.media_type)
    return Response(found.content, 200, headers, found.media_type)


async def live(http: HttpRequest) -> Response:
    """`/v1/console/live`: the numbers of every model that is loaded, now and in the last hour."""
    query, keys, models = query_of(http, LiveQuery), visible_keys(http), models_of(http)
    found = []
    for model in models:
        if model.service is not None:
            samples = models.history.since(model.name, query.since)
            states = _scheduler(model.service, keys) if query.scheduler else None
            found.append(_live(model, model.service, samples, states))
    requests = running_of(http) if query.requests else None
    return json_answer(LiveState(version=version(), time=time.time(), models=found, requests=requests), NO_CACHE)


def _scheduler(service: Service, keys: Container[str] | None) -> list[ReplicaState]:
    """The state of each replica; none for a model that does not generate."""
    now = time.monotonic()
    views = {} if service.is_encoder else service.engine.views
    return [view.state(index, now, keys) for index, view in sorted(views.items())]


def _live(
    model: ServedModel, service: Service, samples: list[Sample], scheduler: list[ReplicaState] | None
) -> LiveModel:
    numbers = service.metrics.live()
    return LiveModel(
        name=model.name,
        model_id=service.model_id,
        scheduler=scheduler,
        now=ModelNumbers.model_validate(numbers),
        samples=[_sample(each) for each in samples],
        replicas=[_replica(each) for each in numbers.replicas],
    )


def _sample(sample: Sample) -> ModelSample:
    return ModelSample(time=sample.time, **ModelNumbers.model_validate(sample.numbers).model_dump())


def _replica(numbers: ReplicaNumbers) -> ReplicaNow:
    return ReplicaNow(
        replica_id=numbers.replica_id,
        is_up=numbers.is_up,
        running=numbers.num_running,
        waiting=numbers.num_waiting,
        kv_utilisation=numbers.kv_utilisation,
        generated_tokens=numbers.generated_tokens,
        losses=numbers.num_losses,
    )


async def requests(http: HttpRequest) -> Response:
    """`/v1/console/requests`: the requests to a model that ended last; a key sees its own, as in `/v1/requests`."""
    ended = models_of(http).metrics.recent.of(visible_owners(http))
    found = [EndedRequestRecord.model_validate(each) for each in ended]
    return json_answer(EndedRequestList(requests=found), NO_CACHE)
