"""Beam search of a request: what it may not be asked for with, and whether its beams fit. Pure."""

from dataclasses import replace
from typing import Any

from funitel.proto.detokenizer import Codec
from funitel.proto.step import SamplingParams
from funitel.router.core.beam_search import BeamParams
from funitel.router.core.request import Limits, Request
from funitel.router.serving.sampling_request import GREEDY, BeamRequest, BrokenRule, SamplingRequest
from funitel.router.settings import RouterSettings

MAX_LENGTH_PENALTY = 100.0  # either way: beyond it, and with long texts, scores are no numbers

# What each field has where it asks for nothing, beside None, 0, "" and what is empty.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (1.0,),
    "top_p": (1.0,),
    "typical_p": (1.0,),
    "repetition_penalty": (1.0,),
}
_EXCLUDED = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "count_penalty",
    "logit_bias",
    "watermark",
    "grammar",
    "target_language",
    "allowed_token_ids",
    "bad_words",
)


def check_beams(
    sampling: SamplingRequest, beams: BeamRequest, limits: Limits, settings: RouterSettings, *, stream: bool
) -> None:
    """Raise BrokenRule where a request asks for a beam search, and for what none has."""
    if stream:
        raise BrokenRule("use_beam_search", "`$use_beam_search` is not available when `stream` is true", True)
    if not limits.max_beams:
        raise BrokenRule("use_beam_search", "`$use_beam_search` is not supported by the shards of this server", True)
    for name in _EXCLUDED:
        value = getattr(sampling, name)
        if value and value not in _NEUTRAL.get(name, ()):
            raise BrokenRule(name, f"`$use_beam_search` and `${name}` exclude each other", _shown(value))
    if sampling.strategy is not None and (used := sampling.strategy.used):
        name = min(used)
        value = getattr(sampling.strategy, name)
        raise BrokenRule(name, f"`$use_beam_search` and `${name}` exclude each other", _shown(value))
    field, most = beams.width_field, min(settings.max_best_of, limits.max_beams)
    if not 0 < beams.width <= most:
        raise BrokenRule(field, f"`${field}` must be > 0 and <= {most} with `$use_beam_search`", beams.width)
    if not -MAX_LENGTH_PENALTY <= beams.length_penalty <= MAX_LENGTH_PENALTY:
        rule = f"`$length_penalty` must be >= -{MAX_LENGTH_PENALTY:g} and <= {MAX_LENGTH_PENALTY:g}"
        raise BrokenRule("length_penalty", rule, beams.length_penalty)


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def without_sampling(sampling: SamplingRequest) -> SamplingRequest:
    """The same, after `check_beams`, with nothing said of how tokens are drawn."""
    return replace(sampling, do_sample=False, best_of=None, seed=None, **GREEDY)


def with_beams(request: Request, asked: BeamRequest, limits: Limits, codec: Codec) -> Request:
    """The request with its beam search; raises BrokenRule where its beams can never fit."""
    num_prompt, max_new_tokens = len(request.input_ids), request.stopping.max_new_tokens
    needed = needed_blocks(num_prompt, max_new_tokens, asked.width, limits.block_size) * limits.block_size
    if needed > limits.pool_tokens:
        raise BrokenRule(
            asked.width_field,
            f"`${asked.width_field}` beams of {num_prompt} prompt tokens and {max_new_tokens} `$max_new_tokens` need "
            f"{needed} tokens of the KV pool, which has {limits.pool_tokens}",
            asked.width,
        )
    params = BeamParams(
        width=asked.width,
        num_returned=asked.num_returned,
        max_new_tokens=max_new_tokens,
        length_penalty=asked.length_penalty,
        early_stopping=asked.early_stopping,
        eos_token_ids=frozenset() if request.stopping.ignore_eos else limits.eos_token_ids,
        stop_token_ids=frozenset(request.sampling.stop_token_ids),
        stop_sequences=request.stopping.stop_sequences,
        min_new_tokens=request.sampling.min_new_tokens,
        decode=codec.decode,
    )
    return searched(request, params)


def searched(request: Request, params: BeamParams) -> Request:
    """The request with a beam search, for which its rows tell the model's own log-probabilities."""
    return replace(request, sampling=SamplingParams(seed=request.sampling.seed, raw_logprobs=True), beams=params)


def needed_blocks(num_prompt: int, max_new_tokens: int, width: int, block_size: int) -> int:
    """Blocks that a beam search may come to need, or enters with if these are more; beams share those of the prompt."""
    num_shared = num_prompt // block_size
    num_whole = -(-(num_prompt + max_new_tokens - 1) // block_size)
    num_entering = -(-num_prompt // block_size) + width
    return max(num_shared + width * (num_whole - num_shared), num_entering)
