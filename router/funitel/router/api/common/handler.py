"""Route decorators: count the requests of a handler, and ask admission before and after their body is read."""

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import wraps
from typing import cast

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from funitel.router.api.common.body import receive_body
from funitel.router.serving.admission_gate import Admits
from funitel.router.serving.arrival import ARRIVAL, Arrival
from funitel.router.serving.service import Service
from funitel.router.transport.sse import EventStream

Handler = Callable[[HttpRequest], Awaitable[Response]]

_COUNTED = "funitel.counted"


def service_of(request: HttpRequest) -> Service:
    """The service of the application that got the request."""
    return cast(Service, request.app.state.service)


def counted_route(handler: Handler) -> Handler:
    """Count the requests of a handler, and those that fail before their answer begins.

    A request that one handler hands to another is counted once.
    """

    @wraps(handler)
    async def counted(request: HttpRequest) -> Response:
        if request.scope.get(_COUNTED):
            return await handler(request)
        request.scope[_COUNTED] = True
        metrics = service_of(request).metrics
        metrics.count_request()
        with metrics.counting_failures():
            return await handler(request)

    return counted


def generation_route(handler: Handler) -> Handler:
    """Ask the engine's admission about the requests of a handler, and count them."""

    async def admitted(request: HttpRequest) -> Response:
        return await _admitted(request, service_of(request).engine, handler)

    return counted_route(wraps(handler)(admitted))


def encoder_route(handler: Handler) -> Handler:
    """Ask the encoder's admission about the requests of a handler, and count them."""

    async def admitted(request: HttpRequest) -> Response:
        return await _admitted(request, service_of(request).encoder.engine, handler)

    return counted_route(wraps(handler)(admitted))


def reading_route(handler: Handler) -> Handler:
    """Bound the requests of a handler that only tokenizes."""

    @wraps(handler)
    async def admitted(request: HttpRequest) -> Response:
        return await _admitted(request, service_of(request).tokenize_limit, handler)

    return admitted


async def _admitted(request: HttpRequest, gate: Admits, handler: Handler) -> Response:
    """Ask admission before the body is read, and handle a request with a reservation that a stream keeps meanwhile.

    Raises:
        Overloaded: there is no room for it.
    """
    if ARRIVAL in request.scope:  # another handler has handed it on
        return await handler(request)
    arrived = Arrival.of(request)
    incoming = arrived.incoming
    gate.check_room(incoming)
    await receive_body(request, service_of(request).settings.payload_limit)
    reservation = gate.reserve(incoming)
    request.scope[ARRIVAL] = replace(arrived, reservation=reservation)
    with ExitStack() as held:
        held.callback(reservation.release)
        response = await handler(request)
        return _ReservedStream(response, held.pop_all()) if isinstance(response, EventStream) else response


class _ReservedStream(Response):
    """A stream whose request is submitted once it begins: until then, or its end, the reservation is held."""

    def __init__(self, stream: EventStream, held: ExitStack) -> None:
        self._stream = stream
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await self._stream(scope, receive, send)
