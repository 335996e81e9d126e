"""Handle `/v1/requests`: the requests that run.

A key sees its own requests, an operator's those of all keys: `visibility`.
"""

import time
from typing import Literal

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from funitel.proto.errors import InvalidRequest, NotFound
from funitel.router.api.common.body import json_answer, query_of
from funitel.router.api.common.handler import models_of, resumable_of
from funitel.router.api.common.visibility import visible_owners
from funitel.router.api.requests.schema import AbortedRequest, RequestList, RequestRecord, StreamQuery
from funitel.router.middleware.auth import tenant_of
from funitel.router.resumable.header import LAST_EVENT, last_event
from funitel.router.serving.running import ActiveRequest, RunningState

OF_A_BATCH = "is one of a batch: only the batch can be changed, which `POST /v1/batches/{batch_id}/cancel` ends"
_WORDS: dict[RunningState, Literal["waiting", "running", "paused"]] = {
    RunningState.WAITING: "waiting",
    RunningState.RUNNING: "running",
    RunningState.PAUSED: "paused",
}


async def listed(http: HttpRequest) -> Response:
    """`GET /v1/requests`: the requests that run."""
    return json_answer(RequestList(data=running_of(http)))


def running_of(http: HttpRequest) -> list[RequestRecord]:
    """The requests that run, of those that the key of a request may see."""
    now = time.monotonic()
    return [_record(request, now) for request in _visible(http)]


async def abort(http: HttpRequest) -> Response:
    """`DELETE /v1/requests/{request_id}`: end a request now; its client gets the answer up to here."""
    for request in _changeable(http):
        request.abort()
    return json_answer(AbortedRequest(id=http.path_params["request_id"]))


async def pause(http: HttpRequest) -> Response:
    """`POST /v1/requests/{request_id}/pause`: compute nothing more of a request until it is resumed."""
    found = _changeable(http)
    for request in found:
        request.pause()
    return json_answer(_record(found[0], time.monotonic()))


async def resume(http: HttpRequest) -> Response:
    """`POST /v1/requests/{request_id}/resume`: let a paused request go on."""
    found = _changeable(http)
    for request in found:
        request.resume()
    return json_answer(_record(found[0], time.monotonic()))


async def stream(http: HttpRequest) -> Response:
    """`GET /v1/requests/{request_id}/stream`: the events of a stream after a number, for its owner alone."""
    after, field = query_of(http, StreamQuery).after, "after"
    if after is None:
        after, field = last_event(http.headers) or 0, LAST_EVENT
    return resumable_of(http).attach(tenant_of(http.scope), http.path_params["request_id"], after, field)


def _visible(http: HttpRequest) -> list[ActiveRequest]:
    owners = visible_owners(http)
    return [request for service in models_of(http).services for request in service.running.of(owners)]


def _changeable(http: HttpRequest) -> list[ActiveRequest]:
    """The requests of the id in the path: clients may give several the same.

    Raises:
        NotFound: none runs.
        InvalidRequest: one is of a batch, which has places for so many requests and records every answer.
    """
    request_id = http.path_params["request_id"]
    found = [request for request in _visible(http) if request.has_id(request_id)]
    if not found:
        raise NotFound(f"no request with id {request_id!r} runs")
    if any(request.is_background for request in found):
        raise InvalidRequest(f"request {request_id!r} {OF_A_BATCH}")
    return found


def _record(request: ActiveRequest, now: float) -> RequestRecord:
    context = request.context
    return RequestRecord(
        id=context.request_id,
        response_id=context.response_id,
        state=_WORDS[request.state],
        age_seconds=round(now - request.began, 3),
        prompt_tokens=request.num_prompt_tokens,
        tokens=request.num_tokens,
        choices=len(request.streams),
        key=context.key_name,
    )
