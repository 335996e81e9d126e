"""`/debug/scheduler`: how the server stands, for operators and `funitel top`."""

import time

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from funitel.router.api.answers import json_answer
from funitel.router.api.inference import service_of
from funitel.router.schema_debug import SchedulerState


async def scheduler(http: HttpRequest) -> Response:
    """`/debug/scheduler`: queue, batch, pool and last steps of every replica that serves."""
    service, now = service_of(http), time.monotonic()
    body = SchedulerState(
        model_id=service.model_id,
        version=service.version,
        time=time.time(),
        replicas=[view.state(index, now) for index, view in sorted(service.engine.views.items())],
    )
    return json_answer(body)
