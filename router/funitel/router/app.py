"""Build the HTTP application, the composition root: routes, middleware, errors, and the service behind them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from funitel.proto.errors import FunitelError
from funitel.router.api.batches.in_process import InProcess
from funitel.router.api.common.errors import ErrorBoundary, answer_error, answer_http_exception
from funitel.router.api.gated_routes import gated_routes, journalled_paths
from funitel.router.api.responses.store import ResponseStore
from funitel.router.batch.service import Batches
from funitel.router.core.background_tasks import Tasks
from funitel.router.core.file_watch import Reloadable, reload_on_change
from funitel.router.fleet.link import FleetLink
from funitel.router.fleet.models import ConnectReplicas, ServedModels
from funitel.router.middleware.access_log import AccessLog
from funitel.router.middleware.host_check import LOOPBACK_ORIGIN, HostCheck
from funitel.router.middleware.metrics_port import MetricsPort
from funitel.router.middleware.tracing import TracingMiddleware
from funitel.router.serving.service import Connect, Service
from funitel.router.serving.step_queries import StepSessions
from funitel.router.settings import RouterSettings, is_guarded
from funitel.router.tenants.link import accounts_of

logger = logging.getLogger(__name__)


def _log_failure(error: FunitelError) -> None:
    logger.error("cannot start: %s", error.message)


def build_app(
    settings: RouterSettings,
    connect: Connect,
    on_failure: Callable[[FunitelError], None] = _log_failure,
    refreshed: Sequence[Reloadable] = (),
    *,
    is_local: bool = False,
    connect_replicas: ConnectReplicas | None = None,
) -> Starlette:
    """Make the application.

    It answers at once; while `connect` runs, routes that need the engine answer 503.

    Args:
        settings: the router's.
        connect: makes the engine, in seconds or minutes; started with the application.
        on_failure: called when that fails; the application continues to answer 503.
        refreshed: further sources to reload when their files change.
        connect_replicas: makes the engine of a model that the control plane of the settings names.
        is_local: only this machine is to reach it, without a key: pages of other sites in its browsers are not.

    Raises:
        SettingsError: the file of API keys is not valid.
    """
    service = Service(settings)
    models = ServedModels(service)
    link = None
    if settings.control_socket is not None and connect_replicas is not None:
        link = FleetLink(models, settings.control_socket, connect_replicas)
    accounts, tenants = accounts_of(settings, service.metrics, None if link is None else link.control)
    batches = Batches(models, InProcess(accounts, lambda: app))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        background = Tasks()
        if not settings.no_model:
            background.start(service.start(connect, on_failure))
        background.start(reload_on_change([accounts, *refreshed]))
        background.start(batches.run())
        if settings.console:
            background.start(models.history.run())
        if link is not None:
            background.start(link.run())
        if tenants is not None:
            background.start(tenants.run())
        try:
            yield
        finally:
            await background.cancel()
            await app.state.responses.runs.cancel()
            if tenants is not None:
                await tenants.close()
            await asyncio.gather(service.close(), *([] if link is None else [link.close()]))

    routes, pages = gated_routes(settings, accounts, models, None if link is None else link.loads)
    allowed = settings.allowed_host
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(AccessLog, metrics=service.metrics, drain=service.drain),
            *([] if settings.otlp_endpoint is None else [Middleware(TracingMiddleware, model=service.model_id)]),
            *([] if settings.prometheus_port is None else [Middleware(MetricsPort, port=settings.prometheus_port)]),
            *([Middleware(HostCheck, allowed=allowed, answer=answer_error)] if is_local or allowed else []),
            _cors(settings.cors_allow_origin, is_local=is_local),
            Middleware(ErrorBoundary),
        ],
        exception_handlers={FunitelError: answer_error, HTTPException: answer_http_exception},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # `/generate/` is no route
    app.state.service, app.state.models = service, models
    app.state.control = None if link is None else link.control
    app.state.responses = ResponseStore(settings.max_stored_responses, settings.max_stored_response_bytes)
    app.state.batches = batches
    app.state.steps = StepSessions()
    app.state.takes_changes = is_local or is_guarded(settings)
    app.state.pages = pages
    app.state.journalled_paths = journalled_paths(routes)
    return app


def _cors(origins: tuple[str, ...], *, is_local: bool) -> Middleware:
    """TGI's rules, save that a browser may send a key, change and delete; locally, only pages of this machine."""
    return Middleware(
        CORSMiddleware,
        allow_origins=origins or ([] if is_local else ["*"]),
        allow_origin_regex=LOOPBACK_ORIGIN if is_local and not origins else None,
        allow_methods=["GET", "POST", "PATCH", "DELETE"],
        allow_headers=["*"],  # clients in browsers send many of their own
    )
