"""Build the HTTP application, the composition root: routes, middleware, errors, and the service behind them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from funitel.proto.errors import FunitelError
from funitel.router.api.batches.in_process import InProcess
from funitel.router.api.common.errors import ErrorBoundary, answer_error, answer_http_exception
from funitel.router.api.responses.store import ResponseStore
from funitel.router.api.routes import operations, pages
from funitel.router.auth.accounts import Accounts
from funitel.router.batch.service import Batches
from funitel.router.core.file_watch import Reloadable, reload_on_change
from funitel.router.middleware.access_log import AccessLog
from funitel.router.middleware.host_check import LOOPBACK_ORIGIN, HostCheck
from funitel.router.middleware.metrics_port import MetricsPort
from funitel.router.middleware.operation import Operation
from funitel.router.middleware.route_gate import RouteGate
from funitel.router.middleware.tracing import TracingMiddleware
from funitel.router.serving.service import Connect, Service
from funitel.router.serving.step_queries import StepSessions
from funitel.router.settings import RouterSettings

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
) -> Starlette:
    """Make the application.

    It answers at once; while `connect` runs, routes that need the engine answer 503.

    Args:
        settings: the router's.
        connect: makes the engine, in seconds or minutes; started with the application.
        on_failure: called when that fails; the application continues to answer 503.
        refreshed: further sources to reload when their files change.
        is_local: only this machine is to reach it, without a key: pages of other sites in its browsers are not.

    Raises:
        SettingsError: the file of API keys is not valid.
    """
    service = Service(settings)
    accounts = Accounts(settings.api_key, settings.api_key_file, service.metrics)
    batches = Batches(service, InProcess(accounts, lambda: app))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(service.start(connect, on_failure)),
            asyncio.create_task(reload_on_change([accounts, *refreshed])),
            asyncio.create_task(batches.run()),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await app.state.responses.runs.cancel()
            await service.close()

    listed, allowed = operations(settings), settings.allowed_host
    app = Starlette(
        routes=[_route(operation, accounts, service) for operation in listed],
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
    app.state.service = service
    app.state.responses = ResponseStore(settings.max_stored_responses, settings.max_stored_response_bytes)
    app.state.batches = batches
    app.state.steps = StepSessions()
    app.state.pages = partial(pages, listed)
    return app


def _route(operation: Operation, accounts: Accounts, service: Service) -> Route:
    gate = Middleware(RouteGate, operation=operation, accounts=accounts, drain=service.drain, model=service.model_id)
    return Route(operation.path, operation.handler, methods=[operation.method], middleware=[gate])


def _cors(origins: tuple[str, ...], *, is_local: bool) -> Middleware:
    """TGI's rules, save that a browser may send a key and may delete; of a local server, only pages of this machine."""
    return Middleware(
        CORSMiddleware,
        allow_origins=origins or ([] if is_local else ["*"]),
        allow_origin_regex=LOOPBACK_ORIGIN if is_local and not origins else None,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],  # clients in browsers send many of their own
    )
