"""Validate a generation request by TGI's rules, in TGI's order and words. Pure; knows no HTTP.

`check_parameters` runs before the prompt is tokenized, `build_request` after.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from funitel.proto.errors import ContextTooLong
from funitel.proto.step import GrammarType, SamplingParams, StoppingParams
from funitel.router.core import request_context
from funitel.router.core.request import Limits, Request
from funitel.router.serving.sampling_request import WHOLE_CONTEXT, BrokenRule, SamplingRequest
from funitel.router.serving.strategies import check_strategy
from funitel.router.settings import RouterSettings

FIRST_SLICE = 1024  # TGI's: a longer `max_new_tokens` is accepted whenever that many tokens fit


def _require(condition: bool, field: str, rule: str, given: Any = None) -> None:
    if not condition:
        raise BrokenRule(field, rule, given)


def check_parameters(
    sampling: SamplingRequest, inputs: str, limits: Limits, settings: RouterSettings, *, stream: bool
) -> None:
    """Raise BrokenRule for the first rule that the parameters or an empty prompt break."""
    _check_best_of(sampling, settings, stream=stream)
    _check_sampling(sampling)
    _require(sampling.max_new_tokens != 0, "max_new_tokens", "`$max_new_tokens` must be strictly positive", 0)
    _check_stop(sampling.stop, settings.max_stop_sequences)
    _require(
        sampling.seed is None or (sampling.best_of or 1) == 1,
        "seed",
        "`$seed` must not be set when `$best_of` > 1",
        sampling.seed,
    )
    top_n, max_top_n = sampling.top_n_tokens or 0, settings.max_top_n_tokens
    if sampling.raw_logprobs or sampling.prompt_logprobs is not None:  # of OpenAI's routes
        max_top_n = max(max_top_n, settings.max_logprobs)
    _require(
        top_n <= max_top_n,
        "top_n_tokens",
        f"`$top_n_tokens` must be >= 0 and <= {max_top_n}",
        top_n,
    )
    prompt_top = sampling.prompt_logprobs or 0
    _require(
        prompt_top <= max_top_n,
        "prompt_logprobs",
        f"`$prompt_logprobs` must be >= 0 and <= {max_top_n}",
        prompt_top,
    )
    _require(inputs != "", "inputs", "`$inputs` cannot be empty")
    truncate = sampling.truncate
    _require(
        truncate is None or 0 < truncate <= limits.max_input_tokens,
        "truncate",
        f"`$truncate` must be strictly positive and less than {limits.max_input_tokens}",
        truncate,
    )
    speculate = sampling.speculate or 0
    _require(
        0 <= speculate <= limits.max_speculate,
        "speculate",
        f"`$speculate` must be >= 0 and <= {limits.max_speculate}, --speculate of this server",
        speculate,
    )
    _check_supported(sampling)
    if sampling.strategy is not None:
        check_strategy(sampling, sampling.strategy)


def _check_supported(sampling: SamplingRequest) -> None:
    """What TGI would ignore, or has no word for."""
    min_p = sampling.min_p
    _require(min_p is None or 0 <= min_p <= 1, "min_p", "`$min_p` must be >= 0.0 and <= 1.0", min_p)
    for token_id, bias in sampling.logit_bias.items():
        _require(
            token_id.isascii() and token_id.isdigit() and str(int(token_id[:20])) == token_id,
            "logit_bias",
            "`$logit_bias` must have token ids as its names",
            repr(token_id[:50]),
        )
        _require(-100 <= bias <= 100, "logit_bias", "`$logit_bias` must be >= -100.0 and <= 100.0", bias)


def check_token_ids(sampling: SamplingRequest, num_tokens: int) -> None:
    """Raise BrokenRule for a token id that a vocabulary of so many tokens does not have."""
    for token_id in sampling.logit_bias:
        _require(
            int(token_id) < num_tokens,
            "logit_bias",
            f"`$logit_bias` must have token ids >= 0 and < {num_tokens} as its names",
            token_id,
        )
    for field, ids in (("stop_token_ids", sampling.stop_token_ids), ("allowed_token_ids", sampling.allowed_token_ids)):
        largest = max(ids, default=0)
        _require(largest < num_tokens, field, f"`${field}` must be token ids >= 0 and < {num_tokens}", largest)


def check_prompt_ids(input_ids: Sequence[int], num_tokens: int) -> None:
    """Raise BrokenRule for a text with a token of the tokenizer's that the model, of so many, does not have."""
    largest = max(input_ids, default=0)
    _require(
        largest < num_tokens,
        "inputs",
        f"`$inputs` has a token that the model does not have: token ids must be >= 0 and < {num_tokens}",
        largest,
    )


def _check_best_of(sampling: SamplingRequest, settings: RouterSettings, *, stream: bool) -> None:
    best_of = 1 if sampling.best_of is None else sampling.best_of
    if stream:
        _require(best_of == 1, "best_of", "`$best_of` != 1 is not supported when streaming tokens", best_of)
        _require(
            not sampling.decoder_input_details,
            "decoder_input_details",
            "`$decoder_input_details` == true is not supported when streaming tokens",
        )
    _require(
        settings.max_best_of > 1 or best_of == 1, "best_of", "`$best_of` != 1 is not allowed for this endpoint", best_of
    )
    _require(
        0 < best_of <= settings.max_best_of, "best_of", f"`$best_of` must be > 0 and <= {settings.max_best_of}", best_of
    )
    _require(
        best_of == 1 or _wants_sampling(sampling), "best_of", "you must use sampling when `$best_of` is > 1", best_of
    )


def _wants_sampling(sampling: SamplingRequest) -> bool:
    if sampling.strategy is not None and (sampling.strategy.is_sampled or sampling.strategy.is_deterministic):
        return sampling.strategy.is_sampled
    shaping = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.typical_p)
    return bool(sampling.do_sample) or bool(sampling.min_p) or any(value is not None for value in shaping)


def _check_sampling(sampling: SamplingRequest) -> None:
    p = sampling
    positive = "must be strictly positive"
    share = "must be > 0.0 and < 1.0"
    rules = (
        ("temperature", p.temperature is None or p.temperature > 0, positive),
        ("repetition_penalty", p.repetition_penalty is None or p.repetition_penalty > 0, positive),
        (
            "frequency_penalty",
            p.frequency_penalty is None or -2 <= p.frequency_penalty <= 2,
            "must be >= -2.0 and <= 2.0",
        ),
        ("top_p", p.top_p is None or 0 < p.top_p < 1, share),
        ("typical_p", p.typical_p is None or 0 < p.typical_p < 1, share),
        ("top_k", p.top_k is None or p.top_k > 0, positive),
    )
    for name, holds, rule in rules:
        _require(holds, name, f"`${name}` {rule}", getattr(p, name))


def _check_stop(stop: Sequence[str], limit: int) -> None:
    _require(len(stop) <= limit, "stop", f"`$stop` supports up to {limit} stop sequences", len(stop))
    _require(all(stop), "stop", "`$stop` sequences cannot be empty")


def with_truncation(sampling: SamplingRequest, limits: Limits) -> SamplingRequest:
    """The same with the tokens that fit beside the completion for `WHOLE_CONTEXT`."""
    if sampling.truncate != WHOLE_CONTEXT:
        return sampling
    room = limits.max_total_tokens - (sampling.max_new_tokens or 1)
    return replace(sampling, truncate=max(1, min(limits.max_input_tokens, room)))


def truncated(input_ids: Sequence[int], truncate: int | None) -> tuple[int, ...]:
    """The last `truncate` tokens of a prompt, or all of them."""
    return tuple(input_ids if truncate is None else input_ids[-truncate:])


def check_not_cut(num_input_tokens: int, truncate: int | None) -> None:
    """Raise BrokenRule where a prompt with images would lose its beginning, and maybe a part of an image."""
    if truncate is not None and num_input_tokens > truncate:
        rule = f"`$truncate` must be >= {num_input_tokens}, the tokens of the prompt: one with images is never cut"
        raise BrokenRule("truncate", rule, truncate, kind=ContextTooLong)


def completion_limit(num_input_tokens: int, max_new_tokens: int | None, limits: Limits) -> int:
    """Return how many completion tokens a request may have: those that are asked for, or that the context has room for.

    Raises:
        BrokenRule: prompt and first slice exceed the context, or the prompt its own limit; in that order.
    """
    check_prompt_length(num_input_tokens, max_new_tokens, limits)
    room = limits.max_total_tokens - num_input_tokens
    return room if max_new_tokens is None else min(max_new_tokens, room)


def check_prompt_length(num_input_tokens: int, max_new_tokens: int | None, limits: Limits, words: str = "") -> None:
    """Raise BrokenRule as `completion_limit`; `words` say the number of tokens where it is a lower bound."""
    room = limits.max_total_tokens - num_input_tokens
    wanted = max(room, 0) if max_new_tokens is None else max_new_tokens
    given = words or str(num_input_tokens)
    if num_input_tokens + min(wanted, FIRST_SLICE) > limits.max_total_tokens:
        raise BrokenRule(
            "max_new_tokens",
            f"`$inputs` tokens + `$max_new_tokens` must be <= {limits.max_total_tokens}. "
            f"Given: {given} `$inputs` tokens and {wanted} `$max_new_tokens`",
            kind=ContextTooLong,
        )
    if num_input_tokens > limits.max_input_tokens:
        raise BrokenRule(
            "inputs",
            f"`$inputs` must have less than {limits.max_input_tokens} tokens",
            words or num_input_tokens,
            kind=ContextTooLong,
        )


def with_default_stops(sampling: SamplingRequest, settings: RouterSettings) -> SamplingRequest:
    """The same, which also ends where every completion of this model does, unless nothing but its length ends it."""
    if sampling.ignore_eos or not (settings.default_stop or settings.default_stop_token_ids):
        return sampling
    return replace(
        sampling,
        stop=(*sampling.stop, *(text for text in settings.default_stop if text not in sampling.stop)),
        stop_token_ids=(*sampling.stop_token_ids, *(settings.default_stop_token_ids or ())),
    )


def build_request(
    sampling: SamplingRequest,
    inputs: str,
    input_ids: Sequence[int],
    limits: Limits,
    *,
    add_special_tokens: bool = True,
    first_token: int | None = None,
    banned_tokens: tuple[tuple[int, ...], ...] = (),
) -> Request:
    """Make the request of checked parameters and a tokenized prompt; without a seed it gets a random one.

    Raises:
        BrokenRule: the prompt has no tokens, or see `completion_limit`.
    """
    prompt = truncated(input_ids, sampling.truncate)
    _require(bool(prompt), "inputs", "`$inputs` cannot be empty: the prompt has no tokens")
    max_new_tokens = completion_limit(len(prompt), sampling.max_new_tokens, limits)
    strategy = sampling.strategy if sampling.strategy and sampling.strategy.used else None
    speculate = limits.max_speculate if sampling.speculate is None else sampling.speculate
    least = sampling.min_new_tokens
    _require(
        least <= max_new_tokens, "min_new_tokens", f"`$min_new_tokens` must be <= {max_new_tokens}, the most", least
    )
    return Request(
        input_ids=prompt,
        sampling=SamplingParams(
            temperature=1.0 if sampling.temperature is None else sampling.temperature,
            top_k=sampling.top_k or 0,
            top_p=1.0 if sampling.top_p is None else sampling.top_p,
            typical_p=1.0 if sampling.typical_p is None else sampling.typical_p,
            do_sample=bool(sampling.do_sample),
            seed=sampling.seed
            if sampling.seed is not None
            else request_context.current().journal.draw_next("seed", random_seed),
            repetition_penalty=1.0 if sampling.repetition_penalty is None else sampling.repetition_penalty,
            frequency_penalty=sampling.frequency_penalty or 0.0,
            presence_penalty=sampling.presence_penalty,
            count_penalty=sampling.count_penalty,
            watermark=sampling.watermark,
            min_p=sampling.min_p or 0.0,
            logit_bias=tuple((int(token_id), bias) for token_id, bias in sampling.logit_bias.items()),
            raw_logprobs=sampling.raw_logprobs,
            grammar=sampling.grammar.text if sampling.grammar else "",
            grammar_type=sampling.grammar.kind if sampling.grammar else GrammarType.NONE,
            first_token=first_token,
            min_new_tokens=sampling.min_new_tokens,
            stop_token_ids=sampling.stop_token_ids,
            allowed_token_ids=sampling.allowed_token_ids,
            banned_tokens=banned_tokens,
            strategy=strategy,
        ),
        stopping=StoppingParams(
            max_new_tokens=max_new_tokens, stop_sequences=sampling.stop, ignore_eos=sampling.ignore_eos
        ),
        # The first is for shards that know TGI's fields alone, which have no likeliest tokens for a prompt.
        prefill_logprobs=sampling.decoder_input_details or sampling.prompt_logprobs is not None,
        prompt_logprobs=sampling.prompt_logprobs,
        top_n_tokens=sampling.top_n_tokens or 0,
        inputs=inputs,
        add_special_tokens=add_special_tokens,
        shows_special=sampling.shows_special,
        shows_stop=sampling.shows_stop,
        cache_salt=sampling.cache_salt,
        speculate=0 if strategy or sampling.beams is not None else speculate,  # no memory of a strategy is taken back
    )


def random_seed() -> int:
    """A seed from anywhere in the wire's range."""
    return random.getrandbits(64)
