"""The step before a handler that chooses the model of a request, and holds the request while that is loaded."""

import time

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from funitel.router.api.common.body import (
    forget_body,
    has_upload,
    is_audio,
    read_json,
    receive_body,
    receive_upload,
    upload_of,
)
from funitel.router.core import request_context
from funitel.router.core.journal import is_replayed
from funitel.router.fleet.loading import Loads
from funitel.router.fleet.models import ServedModel, ServedModels
from funitel.router.middleware.auth import account_of
from funitel.router.middleware.operation import PATH_PARAMETER, ModelUse, Operation
from funitel.router.serving.arrival import ARRIVED, Arrival
from funitel.router.serving.service import Service
from funitel.router.transport.sse import run_until_disconnect

SERVICE = "funitel.service"  # in a request's scope: the service of the model that was chosen for it
NAME = "name"  # parameter of a path that names a model
FIELDS = ("model", "base_model_name")  # of a body that name a model
PARAMETERS, ADAPTER = "parameters", "adapter_id"  # TGI's field that names an adapter


class ModelChoice:
    """Around one route that needs a model, behind the key check.

    With one model, the router's own, a request passes at once. Else its body is received, within the limits, to learn
    what model it names; a request for a model that is not loaded waits here. It runs within the drain of the service.

    Args:
        app: the route.
        operation: its row of the table.
        models: the models there are.
        loads: what requests for others wait for; None where there is no control plane.
    """

    def __init__(self, app: ASGIApp, operation: Operation, models: ServedModels, loads: Loads) -> None:
        self._app = app
        self._use: ModelUse = operation.model
        self._has_name = NAME in PATH_PARAMETER.findall(operation.path)
        self._has_body = operation.body is not None
        self._has_form = operation.form is not None
        self._models = models
        self._loads = loads

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        models = self._models
        if models.is_alone and models.only is not None:
            models.only.num_requests += 1
            with models.only.working():
                await self._app(scope, receive, send)
            return
        try:
            model = await self._choose(scope, receive)
            model.num_requests += 1
            service = model.service
            if service is None:
                service = await self._attached(model, scope, receive)
            scope[SERVICE] = service
            request_context.current().served_model = model.name
            with model.working() if service is models.own else service.drain.admitted(was_admitted=is_replayed(scope)):
                await self._app(scope, receive, send)
        finally:
            forget_body(scope)

    async def _choose(self, scope: Scope, receive: Receive) -> ServedModel:
        """The model that a request means.

        Raises:
            ModelNotFound: it names one that is not there.
            Forbidden: the API key is not for it.
            NotReady: there is no model.
            FunitelError: the body cannot be read, as `read_json`.
        """
        model = self._models.only
        if model is None:
            model = self._models.choose(await self._asked(scope, receive), self._use)
            account = account_of(scope)
            if account is not None:
                account.check_model(model.name)
        return model

    async def _asked(self, scope: Scope, receive: Receive) -> object:
        """What a request names."""
        if self._has_name:
            return scope["path_params"][NAME]
        request = HttpRequest(scope, receive)
        if self._has_form or (self._use is ModelUse.ANY and is_audio(request)):
            await self._receive_upload(request)
            return upload_of(scope).fields.get(FIELDS[0]) if has_upload(scope) else None
        if not self._has_body:
            return None
        content = await read_json(request, self._models.payload_limit)
        if not isinstance(content, dict):
            return None
        asked = next((found for field in FIELDS if (found := content.get(field)) is not None), None)
        if asked is None and isinstance(content.get(PARAMETERS), dict):
            adapter = content[PARAMETERS].get(ADAPTER)
            return adapter if isinstance(adapter, str) and self._models.get(adapter) is not None else None
        return asked

    async def _receive_upload(self, request: HttpRequest) -> None:
        await receive_upload(request, self._models.own.settings.max_audio_bytes, "--max-audio-bytes")

    async def _attached(self, model: ServedModel, scope: Scope, receive: Receive) -> Service:
        """Hold a request until the model is loaded; raises as `Loads.attached`, and Cancelled if the client leaves."""
        request = HttpRequest(scope, receive)
        arrived = Arrival.of(request)
        scope[ARRIVED] = arrived.at
        if self._has_body and not has_upload(scope):
            await receive_body(request, self._models.payload_limit)
        limit = model.entry.request_limit or self._models.own.settings.max_concurrent_requests
        began = time.monotonic()
        try:
            waiting = self._loads.attached(model, limit, arrived.deadline, was_admitted=is_replayed(scope))
            return await run_until_disconnect(receive, waiting)
        finally:
            request_context.current().load_seconds = time.monotonic() - began
