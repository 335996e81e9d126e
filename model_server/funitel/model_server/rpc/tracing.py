"""Trace the calls a shard answers: one span below each span that the router names in a call's headers.

A call without such headers has no span.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from opentelemetry.trace import SpanKind

from funitel.proto import generate_pb2 as pb
from funitel.proto.errors import Cancelled, FunitelError
from funitel.proto.tracing import spans as tracing
from funitel.proto.tracing.spans import Attribute

SERVICE = "generate.v3.TextGenerationService"


def status_of(error: FunitelError) -> grpc.StatusCode:
    """The status that ends a call with an error."""
    return grpc.StatusCode[error.grpc_status]


class CallSpans:
    """The spans of one call: a step may be made for several traced requests."""

    def __init__(self, spans: tuple[tracing.OpenSpan, ...] = ()) -> None:
        self._spans = spans

    def end(self, answer: object) -> None:
        """End them: the call was answered."""
        if not self._spans:
            return
        attributes: dict[str, Attribute] = {"rpc.grpc.status_code": grpc.StatusCode.OK.value[0]}
        if isinstance(answer, pb.PrefillResponse | pb.DecodeResponse):
            attributes["funitel.step.rows"] = answer.num_forward_rows
            attributes["funitel.step.tokens"] = answer.num_forward_tokens
            attributes["funitel.step.seconds"] = answer.total_ns / 1e9
        for span in self._spans:
            span.end(**attributes)

    def fail(self, error: Exception, status: grpc.StatusCode) -> None:
        """End them: the call has failed."""
        for span in self._spans:
            span.fail(error, **{"rpc.grpc.status_code": status.value[0]})

    def __enter__(self) -> "CallSpans":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End them where the call has raised: what `abort` raises comes from the error it was given."""
        cause = error if error is None or isinstance(error, FunitelError) else error.__context__
        if isinstance(cause, FunitelError):
            self.fail(cause, status_of(cause))
        elif isinstance(error, Exception):
            self.fail(error, grpc.StatusCode.UNKNOWN)
        elif error is not None:
            self.fail(Cancelled("the call was cancelled"), grpc.StatusCode.CANCELLED)


NO_SPANS = CallSpans()


def open_spans(rpc: str, headers: Mapping[str, str]) -> CallSpans:
    """The spans of a call that came now; below those that `headers` name."""
    if not tracing.is_recording() or tracing.PARENT not in headers:
        return NO_SPANS
    attributes = {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": rpc}
    name = f"/{SERVICE}/{rpc}"
    places = tracing.extract_all(headers)
    return CallSpans(tuple(tracing.begin(name, place, SpanKind.SERVER, attributes) for place in places))


class TracedCalls(grpc.aio.ServerInterceptor):
    """Record each call as OpenTelemetry's conventions for RPC servers say, under its full method name."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of one call."""
        handler = await continuation(handler_call_details)
        metadata = {key: value for key, value in handler_call_details.invocation_metadata if isinstance(value, str)}
        if handler is None or handler.unary_unary is None or tracing.PARENT not in metadata:
            return handler
        rpc: str = handler_call_details.method.rpartition("/")[2]

        async def traced(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            with open_spans(rpc, metadata) as spans:
                answer = await handler.unary_unary(request, context)
                spans.end(answer)
                return answer

        return grpc.unary_unary_rpc_method_handler(
            traced, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )
