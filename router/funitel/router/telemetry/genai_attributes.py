"""Attributes of a request's span: OpenTelemetry's conventions for generative AI, and the names of TGI's spans."""

from funitel.proto.tracing.spans import Attribute
from funitel.router.core.request_context import RequestContext

PROVIDER = "funitel"
MAX_NAME_CHARACTERS = 200  # of a model, as a client names it


def attributes_of(context: RequestContext, served_model: str) -> dict[str, Attribute]:
    """Return the attributes of the span of a request that has ended; none for one without work for a model."""
    if not context.operation:
        return {}
    found: dict[str, Attribute] = {
        "gen_ai.operation.name": context.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": (context.model or served_model)[:MAX_NAME_CHARACTERS],
        "gen_ai.response.model": served_model,
        **_asked(context),
    }
    if context.response_id is not None:
        found["gen_ai.response.id"] = context.response_id
    if context.prompt_tokens is not None:
        found["gen_ai.usage.input_tokens"] = context.prompt_tokens
        found["gen_ai.usage.output_tokens"] = context.tokens
        found["gen_ai.usage.cache_read.input_tokens"] = context.cached_tokens
    if context.finish_reasons:
        found["gen_ai.response.finish_reasons"] = tuple(context.finish_reasons)
    if context.first_token_seconds is not None:
        found["gen_ai.server.time_to_first_token"] = context.first_token_seconds
    return found | _times(context)


def _asked(context: RequestContext) -> dict[str, Attribute]:
    """Return the sampling parameters."""
    if context.request is None:
        return {}
    sampling, max_tokens = context.request.sampling, context.request.stopping.max_new_tokens
    found: dict[str, Attribute] = {
        "gen_ai.request.max_tokens": max_tokens,
        "gen_ai.request.temperature": sampling.temperature if sampling.is_sampled else 0.0,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.seed": str(sampling.seed),  # 64 bits without a sign, which an attribute's integers have
        "seed": str(sampling.seed),
    }
    if sampling.top_k:
        found["gen_ai.request.top_k"] = sampling.top_k
    if context.num_choices != 1:
        found["gen_ai.request.choice.count"] = context.num_choices
    return found


def _times(context: RequestContext) -> dict[str, Attribute]:
    """Return TGI's times, in seconds."""
    if context.timings is None:
        return {}
    queue, inference = context.timings.queue_seconds, context.timings.inference_seconds
    return {
        "total_time": context.validation_seconds + queue + inference,
        "validation_time": context.validation_seconds,
        "queue_time": queue,
        "inference_time": inference,
        "time_per_token": inference / max(context.tokens, 1),
    }
