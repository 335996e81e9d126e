"""Tell every layer which route a request takes, and count the answers by route and status, whoever gives them."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from funitel.router.middleware.operation import Operation
from funitel.router.telemetry.metrics import Metrics

ROUTE = "funitel.route"  # in a request's scope: the Operation it takes, once one is found
UNKNOWN_ROUTE = "other"  # of paths no route has: their number has no bound


def is_native(scope: Scope) -> bool:
    """Whether a request takes one of TGI's routes: by the route found, for Vertex AI may choose a path under /v1."""
    operation: Operation | None = scope.get(ROUTE)
    if operation is None:
        path: str = scope["path"]
        return not path.startswith("/v1/")
    return operation.is_native


class RouteContext:
    """Note in a request's scope which route it takes."""

    def __init__(self, app: ASGIApp, operation: Operation) -> None:
        self._app = app
        self._operation = operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ROUTE] = self._operation
        await self._app(scope, receive, send)


class ResponseCount:
    """Count the answers of the whole application."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                operation: Operation | None = scope.get(ROUTE)
                self._metrics.count_response(operation.path if operation else UNKNOWN_ROUTE, message["status"])
            await send(message)

        await self._app(scope, receive, send_and_count if scope["type"] == "http" else send)
