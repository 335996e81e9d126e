"""Count every HTTP answer by its route and status, whoever gives it."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from funitel.router.metrics import Metrics

_ROUTE = "funitel.route"
UNKNOWN_ROUTE = "other"  # of paths no route has: their number has no bound


class RouteName:
    """Note in a request's scope which route it takes."""

    def __init__(self, app: ASGIApp, name: str) -> None:
        self._app = app
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_ROUTE] = self._name
        await self._app(scope, receive, send)


class ResponseCount:
    """Count the answers of the whole application."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_count(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.count_response(scope.get(_ROUTE, UNKNOWN_ROUTE), message["status"])
            await send(message)

        await self._app(scope, receive, send_and_count if scope["type"] == "http" else send)
