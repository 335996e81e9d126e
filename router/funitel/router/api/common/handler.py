"""Route decorators: count the requests of a handler, and ask admission before and after their body is read."""

import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import TypeVar, cast

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from funitel.proto.errors import FunitelError
from funitel.router.api.common.body import declared_size, forget_body, read_body, receive_body, receive_upload
from funitel.router.api.common.errors import error_record
from funitel.router.api.common.model_choice import SERVICE
from funitel.router.api.common.schema_base import Body
from funitel.router.core import request_context
from funitel.router.core.journal import REQUEST_ID_FACT, is_replayed
from funitel.router.engine.interface import Admits
from funitel.router.fleet.control import ControlSocket
from funitel.router.fleet.models import ServedModels
from funitel.router.middleware.auth import tenant_of
from funitel.router.resumable.header import resume_seconds
from funitel.router.resumable.streams import ResumableStreams
from funitel.router.serving.arrival import ARRIVAL, Arrival
from funitel.router.serving.service import Service
from funitel.router.text.encode_pool import SHORT_CHARACTERS
from funitel.router.transport.kept_answer import keep
from funitel.router.transport.sse import EventStream

B = TypeVar("B", bound=Body)

_COUNTED = "funitel.counted"
_JOURNALLED = "is_journalled"  # an attribute of a handler


@dataclass(frozen=True, slots=True)
class IncomingRequest:
    """A request that admission has let pass, with its service and what is known of its arrival."""

    http: HttpRequest
    service: Service
    arrived: Arrival

    @property
    def error_record(self) -> Callable[[FunitelError], BaseModel]:
        """Makes the record of an error that ends a stream, as the route answers errors."""
        return error_record(self.http.scope)

    async def read(self, model: type[B]) -> B:
        """Read and check the body; raises as `read_body`."""
        return await read_body(self.http, model, self.service)


Handler = Callable[[HttpRequest], Awaitable[Response]]
IncomingHandler = Callable[[IncomingRequest], Awaitable[Response]]


def service_of(request: HttpRequest) -> Service:
    """The service of the model that was chosen for a request; else the router's own."""
    chosen: Service | None = request.scope.get(SERVICE)
    return cast(Service, request.app.state.service) if chosen is None else chosen


def models_of(request: HttpRequest) -> ServedModels:
    """All models of the application that got a request."""
    return cast(ServedModels, request.app.state.models)


def control_of(request: HttpRequest) -> ControlSocket | None:
    """The control plane of the router; None where it has none."""
    return cast(ControlSocket | None, request.app.state.control)


def resumable_of(request: HttpRequest) -> ResumableStreams:
    """The streams of the application that clients may resume."""
    return models_of(request).resumable


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


def journalled(handler: Handler) -> Handler:
    """Mark a handler that puts its requests into the journal before they have any effect.

    A request that another router finds without a trace of this handler is answered as a new one.
    """
    setattr(handler, _JOURNALLED, True)
    return handler


def is_journalled(handler: Handler) -> bool:
    """Whether a handler is marked so, or one that it wraps."""
    return bool(getattr(handler, _JOURNALLED, False))


def generation_route(handler: IncomingHandler) -> Handler:
    """Ask the engine's admission about the requests of a handler, and count them."""

    async def admitted(request: HttpRequest) -> Response:
        service = service_of(request)
        service.check_writes()
        return await _admitted(request, service, service.engine, handler)

    return counted_route(journalled(wraps(handler)(admitted)))


def upload_route(handler: IncomingHandler) -> Handler:
    """Ask the engine's admission about the requests of a handler that transcribes a file, and count them."""

    async def admitted(request: HttpRequest) -> Response:
        service = service_of(request)
        assert service.audio is not None, "WrongTask is raised where none is served"
        return await _admitted(request, service, service.engine, handler, is_upload=True)

    return counted_route(journalled(wraps(handler)(admitted)))


def encoder_route(handler: IncomingHandler) -> Handler:
    """Ask the encoder's admission about the requests of a handler, and count them."""

    async def admitted(request: HttpRequest) -> Response:
        service = service_of(request)
        return await _admitted(request, service, service.encoder.engine, handler)

    return counted_route(journalled(wraps(handler)(admitted)))


def reading_route(handler: IncomingHandler) -> Handler:
    """Bound the requests of a handler that only tokenizes."""

    @wraps(handler)
    async def admitted(request: HttpRequest) -> Response:
        service = service_of(request)
        return await _admitted(request, service, service.tokenize_limit, handler)

    return journalled(admitted)


async def _admitted(
    request: HttpRequest, service: Service, gate: Admits, handler: IncomingHandler, *, is_upload: bool = False
) -> Response:
    """Ask admission before the body is read, and handle a request with a reservation that a stream keeps meanwhile.

    Raises:
        Overloaded: there is no room for it.
    """
    noted: Arrival | None = request.scope.get(ARRIVAL)
    if noted is not None:  # another handler has handed it on
        return await handler(IncomingRequest(request, service, noted))
    try:
        return await _reserved(request, service, gate, handler, is_upload=is_upload)
    finally:
        forget_body(request.scope)


async def _reserved(
    request: HttpRequest, service: Service, gate: Admits, handler: IncomingHandler, *, is_upload: bool
) -> Response:
    arrived = Arrival.of(request)
    seconds = resume_seconds(request.headers, resumable_of(request).max_seconds)
    incoming = arrived.incoming
    request_context.current().owner = arrived.key
    was_admitted = is_replayed(request.scope)
    if not was_admitted:
        gate.check_room(incoming)
    if is_upload:
        await receive_upload(request, service.settings.max_audio_bytes, "--max-audio-bytes")
    else:
        if declared_size(request) > SHORT_CHARACTERS and not was_admitted:
            service.tokenizer.pool.check_room()
        await receive_body(request, service.payload_limit)
    arrived = request.scope[ARRIVAL] = _journalled(request, service, arrived)
    with ExitStack() as held:
        if not was_admitted:
            reservation = gate.reserve(incoming)
            arrived = request.scope[ARRIVAL] = replace(arrived, reservation=reservation)
            held.callback(reservation.release)
        response = await handler(IncomingRequest(request, service, arrived))
        if not isinstance(response, EventStream):
            return response
        stream = response if seconds is None else _resumable(request, response, seconds)
        return _ReservedStream(stream, held.pop_all())


def _resumable(request: HttpRequest, stream: EventStream, seconds: int) -> Response:
    """Make a stream one that its client may resume, by the id of the request."""
    request_id = request_context.current().request_id
    return resumable_of(request).begin(tenant_of(request.scope), request_id, seconds, stream)


def _journalled(request: HttpRequest, service: Service, arrived: Arrival) -> Arrival:
    """Put a request that is whole into the journal; one that is replayed has arrived earlier, with its deadline."""
    context = request_context.current()
    journal = context.journal = keep(request.scope)
    if journal.is_replayed:
        journal.when_done(partial(service.replay_ended, journal.key))
    journal.draw(REQUEST_ID_FACT, lambda: context.request_id)
    waited = max(0.0, time.time() - journal.draw("arrived", time.time))
    if not waited or arrived.deadline is None:
        return arrived
    return replace(arrived, deadline=arrived.deadline - waited)


class _ReservedStream(Response):
    """A stream that holds the reservation until its request is submitted, or it ends."""

    def __init__(self, stream: Response, held: ExitStack) -> None:
        self._stream = stream
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await self._stream(scope, receive, send)
