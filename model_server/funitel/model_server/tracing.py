"""A span for each call a shard answers, below the one the router names in the call's metadata."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from opentelemetry.trace import SpanKind

from funitel.proto import tracing

SERVICE = "generate.v3.TextGenerationService"


def open_span(rpc: str, headers: Mapping[str, str]) -> tracing.OpenSpan:
    """The span of a call that came without gRPC, as gRPC's would be; below the one that `headers` name."""
    if not tracing.is_recording():
        return tracing.NO_SPAN
    method = f"{SERVICE}/{rpc}"
    parent = tracing.extract(headers) if headers else tracing.ROOT
    return tracing.begin(f"/{method}", parent, SpanKind.SERVER, _attributes(method))


def _attributes(method: str) -> dict[str, str]:
    service, _, name = method.partition("/")
    return {"rpc.system": "grpc", "rpc.service": service, "rpc.method": name}


class Traced(grpc.aio.ServerInterceptor):
    """Record each call as a span by OpenTelemetry's conventions for RPC servers, under its full method name."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.unary_unary is None:
            return handler
        method: str = handler_call_details.method.removeprefix("/")
        metadata = {key: value for key, value in handler_call_details.invocation_metadata if isinstance(value, str)}
        attributes = _attributes(method)
        if "user-agent" in metadata:
            attributes["rpc.user_agent"] = metadata["user-agent"]

        async def traced(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            with tracing.span(f"/{method}", tracing.extract(metadata), SpanKind.SERVER, attributes) as span:
                answer = await handler.unary_unary(request, context)
                span.set_attribute("rpc.grpc.status_code", 0)
                return answer

        return grpc.unary_unary_rpc_method_handler(
            traced, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )
