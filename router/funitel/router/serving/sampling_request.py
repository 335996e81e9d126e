"""The sampling request: how the tokens of an answer are chosen and when they end. Every API converts to it.

Errors name its fields by `BrokenRule`, and `prepare` puts them in the names of the API that was asked.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from string import Template
from typing import Any

from funitel.proto.errors import InvalidRequest
from funitel.proto.strategy import DecodingStrategy
from funitel.router.core.grammar import Grammar
from funitel.router.text.model_files import RecommendedSampling

U64_RANGE = 2**64
WHOLE_CONTEXT = -1  # of `truncate`
GREEDY: dict[str, Any] = {"temperature": None, "top_p": None, "top_k": None, "min_p": None, "typical_p": None}
"""What greedy decoding leaves out of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """Sampling and stopping parameters, in TGI's names; None is "the client did not say".

    Under `/v1`, `do_sample` is None: temperature 0 or top_p 0 is greedy, and where nothing is said about temperature,
    top_p and seed, those recommended for the model are used.
    """

    do_sample: bool | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None  # TGI's: times a token's share of the text
    presence_penalty: float = 0.0  # OpenAI's
    count_penalty: float = 0.0  # OpenAI's `frequency_penalty`
    logit_bias: Mapping[str, float] = field(default_factory=dict)  # added to the score, by token id
    seed: int | None = None
    strategy: DecodingStrategy | None = None
    watermark: bool = False
    grammar: Grammar | None = None
    target_language: str | None = None
    max_new_tokens: int | None = None  # None: up to the context's end
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0  # before which nothing ends the completion
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[str, ...] = ()  # that a completion never has
    shows_special: bool = False  # special tokens are part of the text
    shows_stop: bool = False  # the stop that ended it is part of the text
    truncate: int | None = None  # keep the last so many tokens of the prompt; WHOLE_CONTEXT: as many as fit
    top_n_tokens: int | None = None
    decoder_input_details: bool = False
    prompt_logprobs: int | None = None  # so many likeliest tokens at each place of the prompt
    raw_logprobs: bool = False  # log-probabilities are the model's own, before any processing
    adapter_id: str | None = None
    cache_salt: str = ""
    priority: int | None = None
    speculate: int | None = None  # maximum of draft tokens in a step; None: the server's

    def resolved(self, recommended: RecommendedSampling) -> "SamplingRequest":
        """The same with `do_sample` decided, by the rules of `/v1` where it is None."""
        if self.do_sample is not None:
            return self
        temperature, top_p = self.temperature, self.top_p
        strategy = self.strategy
        if temperature is None and top_p is None and self.seed is None:
            temperature = recommended.temperature
            if strategy is None or not (strategy.mirostat or strategy.is_deterministic):
                top_p = recommended.top_p
        seed = None if self.seed is None else self.seed % U64_RANGE
        if temperature == 0 or top_p == 0:
            strategy = None if strategy is None else strategy.greedy
            return replace(self, do_sample=False, seed=seed, strategy=strategy, **GREEDY)
        top_p = None if top_p == 1 else top_p
        return replace(self, do_sample=True, temperature=temperature, top_p=top_p, seed=seed)


class BrokenRule(Exception):
    """A rule for a field that a request breaks; the text has `$field` where each API says its own name of it."""

    def __init__(
        self, field: str, text: str, given: Any = None, *, kind: type[InvalidRequest] = InvalidRequest
    ) -> None:
        super().__init__(text)
        self._field = field
        self._text = text
        self._given = "" if given is None else f". Given: {given}"
        self._kind = kind

    def error(self, names: Mapping[str, str]) -> InvalidRequest:
        """The error for the client of an API; `names` has its names of fields that it calls otherwise."""
        text = Template(self._text).substitute(_Names(names))
        return self._kind(text + self._given, names.get(self._field, self._field))


class _Names(dict[str, str]):
    def __missing__(self, field: str) -> str:
        return field
