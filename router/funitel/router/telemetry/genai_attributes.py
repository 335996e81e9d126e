"""A request in the words of OpenTelemetry's conventions for generative AI, and in those of TGI's spans."""

from funitel.proto.tracing.spans import Attribute
from funitel.router.core.request_context import RequestContext

PROVIDER = "funitel"
LONGEST_NAME = 200  # of what a client calls the model, in characters


def attributes_of(note: RequestContext, served_model: str) -> dict[str, Attribute]:
    """Attributes of the span of a request that has ended; none for one that asked for no work of a model."""
    if not note.operation:
        return {}
    found: dict[str, Attribute] = {
        "gen_ai.operation.name": note.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": (note.model or served_model)[:LONGEST_NAME],
        "gen_ai.response.model": served_model,
        **_asked(note),
    }
    if note.response_id is not None:
        found["gen_ai.response.id"] = note.response_id
    if note.prompt_tokens is not None:
        found["gen_ai.usage.input_tokens"] = note.prompt_tokens
        found["gen_ai.usage.output_tokens"] = note.tokens
        found["gen_ai.usage.cache_read.input_tokens"] = note.cached_tokens
    if note.finish_reasons:
        found["gen_ai.response.finish_reasons"] = tuple(note.finish_reasons)
    if note.first_token_seconds is not None:
        found["gen_ai.server.time_to_first_token"] = note.first_token_seconds
    return found | _times(note)


def _asked(note: RequestContext) -> dict[str, Attribute]:
    """How the answer is sampled; what was not asked for is as the server decides."""
    if note.request is None:
        return {}
    sampling, most = note.request.sampling, note.request.stopping.max_new_tokens
    found: dict[str, Attribute] = {
        "gen_ai.request.max_tokens": most,
        "gen_ai.request.temperature": sampling.temperature if sampling.is_sampled else 0.0,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.seed": str(sampling.seed),  # 64 bits without a sign, which an attribute's integers have
        "seed": str(sampling.seed),
    }
    if sampling.top_k:
        found["gen_ai.request.top_k"] = sampling.top_k
    if note.num_choices != 1:
        found["gen_ai.request.choice.count"] = note.num_choices
    return found


def _times(note: RequestContext) -> dict[str, Attribute]:
    """TGI's names, in seconds."""
    if note.timings is None:
        return {}
    queue, inference = note.timings.queue_seconds, note.timings.inference_seconds
    return {
        "total_time": note.validation_seconds + queue + inference,
        "validation_time": note.validation_seconds,
        "queue_time": queue,
        "inference_time": inference,
        "time_per_token": inference / max(note.tokens, 1),
    }
