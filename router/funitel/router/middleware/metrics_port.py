"""The second port, which answers `/metrics` alone."""

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class MetricsPort:
    """Answer nothing but `/metrics` on the port that is for metrics."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self._app = app
        self._port = port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["server"][1] == self._port and scope["path"] != "/metrics":
            await PlainTextResponse("only /metrics is answered here\n", 404)(scope, receive, send)
        else:
            await self._app(scope, receive, send)
