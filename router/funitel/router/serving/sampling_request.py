"""How the tokens of an answer are chosen, in the words of the APIs under `/v1`, and the same in the router's."""

from dataclasses import dataclass

from funitel.router.api.native.schema import GenerateParameters
from funitel.router.text.model_files import RecommendedSampling

U64_RANGE = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSampling:
    """How tokens are chosen and when they end. None is "the client did not say".

    Nothing said about temperature, top_p and seed takes what is recommended for the model; temperature 0 or top_p 0 is
    greedy. Penalties have OpenAI's meaning. Log-probabilities are the model's own, before any processing.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its score), each id once
    seed: int | None = None
    max_tokens: int | None = None  # None: up to the context's end
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    cache_salt: str = ""
    priority: int | None = None
    target_language: str | None = None
    top_logprobs: int | None = None  # None: log-probabilities are not wanted; 0: those of the tokens themselves only


def parameters_of(sampling: ChatSampling, recommended: RecommendedSampling) -> GenerateParameters:
    """The same wishes as native parameters, but for OpenAI's penalties."""
    temperature, top_p = sampling.temperature, sampling.top_p
    if temperature is None and top_p is None and sampling.seed is None:
        temperature, top_p = recommended.temperature, recommended.top_p
    greedy = temperature == 0 or top_p == 0
    return GenerateParameters(
        do_sample=not greedy,
        temperature=None if greedy else temperature,
        top_p=None if greedy or top_p == 1 else top_p,
        top_k=None if greedy else sampling.top_k,
        min_p=None if greedy else sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias={str(token_id): bias for token_id, bias in sampling.logit_bias} or None,
        max_new_tokens=sampling.max_tokens,
        stop=list(sampling.stop),
        ignore_eos=sampling.ignore_eos,
        cache_salt=sampling.cache_salt,
        priority=sampling.priority,
        target_language=sampling.target_language,
        seed=None if sampling.seed is None else sampling.seed % U64_RANGE,
        top_n_tokens=sampling.top_logprobs,
    )
