"""Forward the routes of models to the control plane: method, path, query and body as they came, its answer as it is."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar
from urllib.parse import quote

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from funitel.proto.errors import Forbidden, NotFound, ShuttingDown
from funitel.router.api.common.asker import asker_of
from funitel.router.api.common.body import declared_size, receive_body, taken_body
from funitel.router.api.common.handler import control_of, models_of
from funitel.router.core.drain import SHUTTING_DOWN
from funitel.router.fleet.control import ControlSocket
from funitel.router.fleet.models import ServedModels
from funitel.router.middleware.operation import PATH_PARAMETER, operation_of
from funitel.router.transport.sse import run_until_disconnect

T = TypeVar("T")

NO_CONTROL = "this server has one model, and no control plane that launches others: start it with `funitel up`"
OPEN_TO_ALL = (
    "without an API key models are launched and changed from this machine only: give the server --api-key or "
    "--api-key-file, let it listen on 127.0.0.1, or use the control socket"
)
SEEN_SECONDS = 0.25  # that an answer waits until this router has heard of the change too
QUERY = "%!$&'()*+,;=:@/?[]"  # of ASCII, stands in a query as it came
_KEPT = (b"retry-after", b"location", b"cache-control")  # headers of an answer


async def forward(http: HttpRequest) -> Response:
    """Forward a request without a body."""
    return await _forwarded(http, b"")


async def forward_body(http: HttpRequest) -> Response:
    """Forward a request with a body of JSON, at most as long as bodies may be."""
    control = _control(http)
    if declared_size(http) == 0 and "transfer-encoding" not in http.headers:
        return await _forwarded(http, b"", control)
    await receive_body(http, models_of(http).payload_limit)
    body = taken_body(http.scope)
    return await _forwarded(http, body, control)


def _control(http: HttpRequest) -> ControlSocket:
    control = control_of(http)
    if control is None:
        raise NotFound(NO_CONTROL)
    if not http.app.state.takes_changes:
        raise Forbidden(OPEN_TO_ALL)
    return control


async def _forwarded(http: HttpRequest, body: bytes, control: ControlSocket | None = None) -> Response:
    """Ask the control plane, however long the answer takes; a client that leaves ends the question, not the work.

    Raises:
        NotFound: the router has no control plane.
        Forbidden: the port is open to other machines, without a key.
        NotReady: it does not answer, or the router drains.
    """
    control, models = control or _control(http), models_of(http)
    before = models.num_snapshots
    asking = _unless_ending(models, control.ask(http.method, _target(http), body, asker_of(http)))
    answer = await run_until_disconnect(http.receive, asking)
    if http.method != "GET" and answer.status < 300:
        await models.changed(before, SEEN_SECONDS)
    headers = {name.decode(): answer.headers[name].decode("latin-1") for name in _KEPT if name in answer.headers}
    response = Response(answer.content, answer.status, headers, "application/json")
    for cookie in answer.cookies:
        response.headers.append("set-cookie", cookie.decode("latin-1"))
    return response


async def _unless_ending(models: ServedModels, work: Coroutine[Any, Any, T]) -> T:
    """Do some work; raises ShuttingDown, and ends it, when the router begins to drain."""
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(models.drained.wait())
    try:
        await asyncio.wait([working, ending], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ShuttingDown(SHUTTING_DOWN)
        return working.result()
    finally:
        working.cancel()
        ending.cancel()


def _target(http: HttpRequest) -> str:
    """The path, with each parameter percent-encoded whole, and the query."""
    operation = operation_of(http.scope)
    assert operation is not None
    parameters = http.path_params
    path = PATH_PARAMETER.sub(lambda found: quote(str(parameters[found[1]]), safe=""), operation.path)
    query = quote(http.scope["query_string"], safe=QUERY)
    return f"{path}?{query}" if query else path
