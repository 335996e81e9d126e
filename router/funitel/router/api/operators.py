"""Routes for operators: health, facts, metrics, documentation, and the scheduler's state for `funitel top`."""

import asyncio
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response

from funitel.proto.errors import FunitelError, ModelNotLoaded
from funitel.router.api import console, tenants
from funitel.router.api.common.body import json_answer, query_of
from funitel.router.api.common.handler import control_of, models_of, service_of
from funitel.router.api.common.route_kinds import native_fact, native_probe, native_state
from funitel.router.api.common.visibility import visible_keys
from funitel.router.api.native.schema import AnyObject, Info, InfoQuery
from funitel.router.auth.access import Access
from funitel.router.engine.snapshot import SchedulerState
from funitel.router.fleet.control import ControlSocket
from funitel.router.middleware.operation import ModelUse
from funitel.router.serving.service import Service
from funitel.router.telemetry import metrics
from funitel.router.telemetry.merge import merged_text

MEMORY_SECONDS = 0.25  # that a page of metrics waits for shards
ROUTER_NAME = "text-generation-router"  # what clients of TGI look for


async def health(http: HttpRequest) -> Response:
    """`/health` and `/health/ready`: 200 when every shard answers, else 503 with the reason."""
    await models_of(http).check_ready()
    return Response()


async def live(http: HttpRequest) -> Response:
    """`/health/live`: 200 as long as the router itself answers, whatever the shards do."""
    return Response()


async def info(http: HttpRequest) -> Response:
    """`/info`: what is served, and its limits; the default model, or the one that the query names."""
    model = models_of(http).choose(query_of(http, InfoQuery).model, ModelUse.ANY)
    if model.service is None:
        raise ModelNotLoaded(f"the model {model.name!r} is {model.entry.state}")
    service = model.service
    settings = service.settings
    limits = service.encoder.engine.limits if service.is_encoder else service.engine.limits
    body = Info(
        model_id=service.model_id,
        model_sha=service.facts.sha,
        model_pipeline_tag=service.facts.pipeline_tag,
        max_concurrent_requests=settings.max_concurrent_requests,
        max_best_of=settings.max_best_of,
        max_stop_sequences=settings.max_stop_sequences,
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        validation_workers=settings.validation_workers,
        max_client_batch_size=settings.max_client_batch_size,
        speculate=limits.max_speculate or None,
        router=ROUTER_NAME,
        version=service.version,
        sha=settings.git_sha,
        docker_label=settings.docker_label,
        modalities=service.modalities,
        lora_adapters=[known.adapter.name for known in service.adapters.known] or None,
        **(_encoder_facts(service) if service.is_encoder else {"layer_parts": service.engine.layer_parts}),
    )
    return json_answer(body)


def _encoder_facts(service: Service) -> dict[str, Any]:
    """What `/info` says of an encoder besides."""
    encoder, settings = service.encoder, service.settings
    labels = dict(enumerate(encoder.facts.labels))
    if labels:
        classes = {"id2label": labels, "label2id": {label: place for place, label in labels.items()}}
        model_type = {"reranker" if encoder.is_ranker else "classifier": classes}
    else:
        model_type = {"embedding": {"pooling": encoder.facts.pooling}}
    return {
        "model_type": model_type,
        "model_dtype": encoder.engine.dtype.removeprefix("torch."),
        "max_input_length": encoder.engine.limits.max_input_tokens,
        "max_batch_tokens": settings.max_batch_prefill_tokens,
        "max_client_texts": settings.max_client_texts,
    }


async def prometheus(http: HttpRequest) -> Response:
    """`/metrics`: in Prometheus' text format, of all models, and behind it what the control plane counts.

    Shards tell what memory they hold, if they answer at once; so does the control plane.
    """
    models, control = models_of(http), control_of(http)
    num_tasks = len(asyncio.all_tasks())
    await asyncio.gather(*map(_ask_memory, models.services))
    models.metrics.set_tasks(num_tasks)
    by_name = {model.name: model.service.metrics for model in models if model.service is not None}
    page = await merged_text(by_name, models.metrics, has_several=len(models) > 1)
    page += await _control_metrics(control)
    return Response(page, headers={"content-type": metrics.CONTENT_TYPE})


async def _ask_memory(service: Service) -> None:
    with suppress(FunitelError, TimeoutError):
        async with asyncio.timeout(MEMORY_SECONDS):
            await service.check_ready()


async def _control_metrics(control: ControlSocket | None) -> bytes:
    with suppress(FunitelError, TimeoutError):
        async with asyncio.timeout(MEMORY_SECONDS):
            answer = None if control is None else await control.ask("GET", "/metrics")
        return b"" if answer is None or answer.status != 200 else answer.content
    return b""


async def openapi_json(http: HttpRequest) -> Response:
    """`/openapi.json`: the document of all routes."""
    return Response(http.app.state.pages().document, media_type="application/json")


async def docs(http: HttpRequest) -> Response:
    """`/docs`: the same for people; with the console its routes can be tried."""
    pages = http.app.state.pages()
    return HTMLResponse(pages.page, headers=pages.headers)


async def scheduler(http: HttpRequest) -> Response:
    """`/debug/scheduler`: queue, batch, pool and last steps of every replica that serves."""
    now = time.monotonic()
    model = models_of(http).choose(query_of(http, InfoQuery).model, ModelUse.GENERATES)
    service = service_of(http) if model.service is None else model.service
    keys = visible_keys(http)
    body = SchedulerState(
        model_id=service.model_id,
        version=service.version,
        time=time.time(),
        replicas=[view.state(index, now, keys) for index, view in sorted(service.engine.views.items())],
    )
    return json_answer(body)


HEALTH = native_probe("/", health, "Whether every shard answers", failures=(503,))
ROUTES = (
    HEALTH,
    replace(HEALTH, path="/health"),
    replace(HEALTH, path="/ping"),
    replace(HEALTH, path="/health/ready"),
    native_probe("/health/live", live, "Whether the router answers"),
    native_state(
        "/info",
        info,
        "What is served: the default model, or `model`",
        query=InfoQuery,
        answer=Info,
        failures=(404, 503),
    ),
    native_fact("/metrics", prometheus, "Metrics for Prometheus", text="text/plain"),
    native_fact("/docs", docs, "The routes, with forms to try them", text="text/html"),
    native_fact("/openapi.json", openapi_json, "The OpenAPI document", answer=AnyObject),
    native_fact("/api-doc/openapi.json", openapi_json, "The same", answer=AnyObject),
)
USER_ROUTES = tenants.ROUTES
CONSOLE_ROUTES = console.ROUTES  # unless --console false
# With --debug-routes only.
DEBUG_ROUTES = (
    native_state(
        "/debug/scheduler",
        scheduler,
        "With --debug-routes: queue, batch, pool and last steps of every replica",
        query=InfoQuery,
        answer=SchedulerState,
        access=Access.CLOSED_FACT,
    ),
)
