"""A span for each HTTP request, below the one the client names in `traceparent`."""

from opentelemetry.trace import SpanKind
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from funitel.proto import tracing


class Traced:
    """Record each request as a span by OpenTelemetry's conventions for HTTP servers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        method, path = scope["method"], scope["path"]
        attributes = {"http.request.method": method, "url.path": path, "url.scheme": scope["scheme"]}
        with tracing.span(f"{method} {path}", tracing.extract(headers), SpanKind.SERVER, attributes) as span:

            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                await send(message)

            await self._app(scope, receive, noting)
