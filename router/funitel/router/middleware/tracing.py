"""Tracing of HTTP: a span for each request, below the one that the client names in `traceparent`."""

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from funitel.proto.errors import FunitelError
from funitel.proto.process import logs
from funitel.proto.tracing import spans
from funitel.proto.tracing.spans import NO_SPAN, PARENT, STATE
from funitel.router.core.request_context import RequestContext, current
from funitel.router.middleware.operation import operation_of
from funitel.router.telemetry.genai_attributes import attributes_of

METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH")
EVENT_STREAM = b"text/event-stream"


class TracingMiddleware:
    """Record each request by OpenTelemetry's conventions for HTTP servers; a streamed answer as `stream` below it."""

    def __init__(self, app: ASGIApp, model: str) -> None:
        """`model` is the name of the served model, where a request has chosen none."""
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

        async def send_traced(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.start(message)
            await send(message)

        context = current()
        context.trace_id = span.trace_id
        try:
            with spans.activate(span), logs.log_context(trace_id=span.trace_id):
                await self._app(scope, receive, send_traced)
        finally:
            answer.end(scope, context, context.served_model or self._model)


class _AnswerSpan:
    """The span of a request while it is answered."""

    def __init__(self, span: spans.OpenSpan) -> None:
        self._span = span
        self._stream = NO_SPAN
        self._status = 0

    def start(self, message: Message) -> None:
        """Record how the answer begins."""
        self._status = message["status"]
        self._span.set_attributes(**{"http.response.status_code": self._status})
        if any(name == b"content-type" and value.startswith(EVENT_STREAM) for name, value in message["headers"]):
            self._stream = spans.begin("stream", self._span.context)

    def end(self, scope: Scope, context: RequestContext, model: str) -> None:
        """Name the span by the route, and record how the request ended."""
        operation = operation_of(scope)
        if operation is not None:
            self._span.span.update_name(f"{operation.method} {operation.path}")
            self._span.set_attributes(**{"http.route": operation.path})
        self._stream.end(**{"funitel.tokens": context.tokens})
        if context.error is not None and context.error.is_ours:
            self._span.set_error(context.error)
        elif self._status >= 500:
            self._span.set_error(FunitelError("internal error"))
        self._span.end(**attributes_of(context, model))


def _parent(scope: Scope) -> Context:
    """Return the parent that the client names in one `traceparent`; there may be several `tracestate`."""
    parents = [value for name, value in scope["headers"] if name == b"traceparent"]
    if len(parents) != 1:
        return spans.ROOT
    states = [value.decode("latin-1") for name, value in scope["headers"] if name == b"tracestate"]
    return spans.extract({PARENT: parents[0].decode("latin-1"), STATE: ",".join(states)})
