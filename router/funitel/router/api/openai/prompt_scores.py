"""Build `prompt_logprobs`, vLLM's: the tokens of a prompt with the likeliest ones at their places. Knows no HTTP."""

from funitel.proto.errors import InvalidRequest
from funitel.proto.step import FinishReason, Generation
from funitel.router.api.openai.schema_answers import PromptLogprob, PromptLogprobs

MIN_LOGPROB = -9999.0  # OpenAI's, for a token that could not be drawn; JSON has no infinity


def ended_early(generation: Generation) -> bool:
    """Whether a sequence was aborted before it had a token, and so before the scores of its prompt came."""
    finished = generation.finished
    return finished is not None and finished.finish_reason is FinishReason.ABORT and not finished.num_tokens


def prompt_logprobs(generation: Generation | None, num_top: int) -> PromptLogprobs | None:
    """The scores of a prompt that come with the first generation of its sequence; None of one that ended early.

    Raises:
        InvalidRequest: the shards give none.
    """
    tokens = None if generation is None else generation.prefill_tokens
    top = None if generation is None else generation.prompt_top
    if generation is not None and tokens is None and ended_early(generation):
        return None
    if tokens is None or top is None:
        raise InvalidRequest("`prompt_logprobs` is not supported by the shards of this server", "prompt_logprobs")
    found: PromptLogprobs = [None]
    for place, (token_id, text, logprob) in enumerate(zip(tokens.ids, tokens.texts, tokens.logprobs, strict=True)):
        if place == 0:
            continue
        if logprob != logprob:
            found.append(None)
            continue
        at = {str(token_id): _scored(logprob, top.ranks[place - 1], text)}
        for rank, (each, name, value) in enumerate(top.at(place - 1)[:num_top], 1):
            at.setdefault(str(each), _scored(value, rank, name))
        found.append(at)
    return found


def _scored(logprob: float, rank: int, text: str) -> PromptLogprob:
    return PromptLogprob(logprob=max(logprob, MIN_LOGPROB), rank=rank, decoded_token=text)
