"""A span for each HTTP request, below the one the client names in `traceparent`."""

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from funitel.proto.errors import FunitelError
from funitel.proto.process import logs
from funitel.proto.tracing import spans
from funitel.proto.tracing.spans import NO_SPAN, PARENT, STATE
from funitel.router.core.request_context import RequestContext, current
from funitel.router.middleware.operation import Operation
from funitel.router.middleware.route_context import ROUTE
from funitel.router.telemetry.genai_attributes import attributes_of

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH")
EVENT_STREAM = b"text/event-stream"


class TracingMiddleware:
    """Record each request by OpenTelemetry's conventions for HTTP servers; a streamed answer as `stream` below it."""

    def __init__(self, app: ASGIApp, model: str) -> None:
        """`model` is the name of the one that is served."""
        self._app = app
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in METHODS else "_OTHER"
        attributes = {
            "http.request.method": method,
            "url.path": scope["path"],
            "url.scheme": scope["scheme"],
            "http.request.header.x-request-id": current().request_id,
        }
        span = spans.begin(method, _parent(scope), SpanKind.SERVER, attributes)
        answer = _AnswerSpan(span)

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.start(message)
            await send(message)

        note = current()
        note.trace_id = span.trace_id
        try:
            with spans.activate(span), logs.log_context(trace_id=span.trace_id):
                await self._app(scope, receive, noting)
        finally:
            answer.end(scope, note, self._model)


class _AnswerSpan:
    """The span of a request while it is answered."""

    def __init__(self, span: spans.OpenSpan) -> None:
        self._span = span
        self._stream = NO_SPAN
        self._status = 0

    def start(self, message: Message) -> None:
        """Note how the answer begins."""
        self._status = message["status"]
        self._span.set_attributes(**{"http.response.status_code": self._status})
        if any(name == b"content-type" and value.startswith(EVENT_STREAM) for name, value in message["headers"]):
            self._stream = spans.begin("stream", self._span.context)

    def end(self, scope: Scope, note: RequestContext, model: str) -> None:
        """Name the request by the route it took, and tell what came of it."""
        operation: Operation | None = scope.get(ROUTE)
        if operation is not None:
            self._span.span.update_name(f"{operation.method} {operation.path}")
            self._span.set_attributes(**{"http.route": operation.path})
        self._stream.end(**{"funitel.tokens": note.tokens})
        if note.error is not None and note.error.is_ours:
            self._span.set_error(note.error)
        elif self._status >= 500:
            self._span.set_error(FunitelError("internal error"))
        self._span.end(**attributes_of(note, model))


def _parent(scope: Scope) -> Context:
    """The place that the client names: in one `traceparent`; of `tracestate` there may be several."""
    parents = [value for name, value in scope["headers"] if name == b"traceparent"]
    if len(parents) != 1:
        return spans.ROOT
    states = [value.decode("latin-1") for name, value in scope["headers"] if name == b"tracestate"]
    return spans.extract({PARENT: parents[0].decode("latin-1"), STATE: ",".join(states)})
