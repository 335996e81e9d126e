"""Sampling parameters of the offline API: validation, and conversion to those of the engine."""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from funitel.proto import step
from funitel.proto.errors import InvalidRequest
from funitel.proto.strategy import BOUNDS, DRY_BREAKERS, MAX_BREAKER, MAX_BREAKERS, DecodingStrategy
from funitel.router.core.grammar import Grammar

DEFAULT_MAX_TOKENS = 256  # length of a completion that does not stop by itself
MIN_TEMPERATURE = 1e-5  # lower ones differ from greedy in rounding only
NUM_SEEDS = 2**64
_NEUTRAL = DecodingStrategy()
MAX_PENALTY = 2.0
MAX_BIAS = 100.0


class RequestOutputKind(Enum):
    """What each output of a request that is read while it runs has of its completions."""

    CUMULATIVE = "cumulative"  # all of them so far
    DELTA = "delta"  # what is new since the output before
    FINAL_ONLY = "final_only"  # there is one output, at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of completions. Values out of range raise InvalidRequest on construction.

    Attributes:
        n: completions of each prompt.
        temperature: 0 means greedy.
        top_p, top_k, min_p, typical_p: which tokens may be sampled; `top_k` 0 or -1 means all.
        seed: of a prompt's first completion; the i-th has seed + i. The same seed gives the same tokens in any batch,
            here and from a server. None means random.
        stop: texts that end a completion. They are cut off, unless `include_stop_str_in_output`.
        max_tokens: maximum of tokens in a completion; None: as many as the context allows.
        presence_penalty, frequency_penalty: as OpenAI defines them.
        repetition_penalty: divides the logits of tokens that occurred, also in the prompt.
        logprobs: number of likeliest tokens to report at each position, besides the chosen one; None: nothing.
        prompt_logprobs: the same for the prompt's tokens from the second on; it is computed without the prefix cache.
        ignore_eos: go on after the model's end of text.
        min_tokens: tokens before which nothing ends a completion.
        stop_token_ids: tokens that end a completion, as the model's end of text does.
        skip_special_tokens: leave special tokens out of the text.
        bad_words: words that a completion never has.
        allowed_token_ids: the only tokens of a completion; empty: all.
        top_n_sigma, max_k, tfs_z, xtc_probability, xtc_threshold, mirostat, mirostat_tau, mirostat_eta, dry_multiplier,
            dry_base, dry_allowed_length, dry_penalty_last_n, dry_sequence_breakers, fsd_alpha, fsd_k, fsd_n, fsd_beta,
            fsd_random_tokens, no_repeat_ngram_size: decoding strategies, as docs/decoding.md defines them.
        logit_bias: added to the logits of tokens, by id.
        grammar: constraint of the completion: `Grammar.json(schema)`, `.regex(pattern)` or `.choice(texts)`.
        output_kind: what the outputs of a request have that is read while it runs; `LLM.generate` gives whole ones.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    skip_special_tokens: bool = True
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] = ()
    top_n_sigma: float = 0.0
    max_k: int = 0
    tfs_z: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: Sequence[str] = DRY_BREAKERS
    fsd_alpha: float = 0.0
    fsd_k: int = 6
    fsd_n: int = 3
    fsd_beta: float = 0.9
    fsd_random_tokens: int = 0
    no_repeat_ngram_size: int = 0
    logit_bias: Mapping[int, float] | None = None
    grammar: Grammar | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1)
        _check_number("temperature", self.temperature, 0.0)
        _check_number("top_p", self.top_p, 0.0, 1.0, is_open=True)
        _check_int("top_k", self.top_k, -1)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("typical_p", self.typical_p, 0.0, 1.0, is_open=True)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, NUM_SEEDS - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1)
        _check_number("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_number("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, is_open=True)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0)
        _check_int("min_tokens", self.min_tokens, 0)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, "True or False", getattr(self, name))
        self._check_stop()
        self._check_token_rules()
        self._check_logit_bias()
        self._check_strategy()
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise _wrong("grammar", "a Grammar", self.grammar)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise _wrong("output_kind", "a RequestOutputKind", self.output_kind)

    def _check_stop(self) -> None:
        texts = [self.stop] if isinstance(self.stop, str) else self.stop
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
            raise _wrong("stop", "a text or a list of texts, none of them empty", self.stop)

    def _check_token_rules(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            if not isinstance(ids, list | tuple) or not all(is_int(token_id, 0) for token_id in ids):
                raise _wrong(name, "a list of token ids", ids)
        words = self.bad_words
        if not isinstance(words, list | tuple) or not all(isinstance(word, str) and word.strip() for word in words):
            raise _wrong("bad_words", "a list of texts, none of them empty", words)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _wrong("min_tokens", f"<= max_tokens {self.max_tokens}", self.min_tokens)

    def _check_logit_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise _wrong("logit_bias", "a mapping from token ids to numbers", self.logit_bias)
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias: a token id", token_id, 0)
            _check_number(f"logit_bias[{token_id}]", bias, -MAX_BIAS, MAX_BIAS)

    def _check_strategy(self) -> None:
        for name, (least, most) in BOUNDS.items():
            value = getattr(self, name)
            if isinstance(getattr(_NEUTRAL, name), int):
                _check_int(name, value, int(least), most)
            else:
                _check_number(name, value, least, most)
        texts = self.dry_sequence_breakers
        is_right = isinstance(texts, list | tuple) and len(texts) <= MAX_BREAKERS
        if not is_right or not all(isinstance(text, str) and 0 < len(text) <= MAX_BREAKER for text in texts):
            allowed = f"at most {MAX_BREAKERS} texts of 1 to {MAX_BREAKER} characters"
            raise _wrong("dry_sequence_breakers", allowed, texts)
        filters = {"top_k": max(self.top_k, 0), "top_p": self.top_p, "min_p": self.min_p, "typical_p": self.typical_p}
        given = {name: value for name, value in filters.items() if value != getattr(step.SamplingParams(), name)}
        found = self._strategy.contradiction(given)
        if found is not None and self.temperature >= MIN_TEMPERATURE:
            first, second, one, other = found
            raise InvalidRequest(f"{first} and {second} exclude each other, given {one} and {other}", second)

    @property
    def _strategy(self) -> DecodingStrategy:
        values = {name: getattr(self, name) for name in DecodingStrategy.__slots__}
        values["dry_sequence_breakers"] = tuple(self.dry_sequence_breakers)
        values["top_n_sigma"] = max(0.0, self.top_n_sigma)
        strategy = DecodingStrategy(**values)
        return strategy if self.temperature >= MIN_TEMPERATURE else strategy.greedy

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check_vocabulary(self, size: int) -> None:
        """Raise InvalidRequest for parameters that exceed a vocabulary of `size` tokens."""
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, size)
        for token_id in self.logit_bias or ():
            _check_int("logit_bias: a token id", token_id, 0, size - 1)
        for name in ("stop_token_ids", "allowed_token_ids"):
            for token_id in getattr(self, name):
                _check_int(f"{name}: a token id", token_id, 0, size - 1)

    def for_engine(self, banned_tokens: tuple[tuple[int, ...], ...] = ()) -> list[step.SamplingParams]:
        """The engine's parameters for each of the `n` completions; `banned_tokens` are those of `bad_words`."""
        strategy = self._strategy
        first = step.SamplingParams(
            **self._sampling_fields(),
            seed=random.randrange(NUM_SEEDS) if self.seed is None else self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            count_penalty=self.frequency_penalty,
            logit_bias=tuple((self.logit_bias or {}).items()),
            grammar="" if self.grammar is None else self.grammar.text,
            grammar_type=step.GrammarType.NONE if self.grammar is None else self.grammar.kind,
            raw_logprobs=True,
            min_new_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            allowed_token_ids=tuple(self.allowed_token_ids),
            banned_tokens=banned_tokens,
            strategy=strategy if strategy.used else None,
        )
        return [replace(first, seed=(first.seed + index) % NUM_SEEDS) for index in range(self.n)]

    def _sampling_fields(self) -> dict[str, Any]:
        """The fields of random sampling; empty for greedy decoding."""
        if self.temperature < MIN_TEMPERATURE:
            return {}
        return {
            "do_sample": True,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": max(self.top_k, 0),
            "min_p": self.min_p,
            "typical_p": self.typical_p,
        }


def params_for(given: SamplingParams | Iterable[SamplingParams], num_prompts: int) -> list[SamplingParams]:
    """The parameters of each prompt: the same for all, or one each.

    Raises:
        InvalidRequest: their number differs from that of the prompts, or an item has another type.
    """
    if isinstance(given, SamplingParams):
        return [given] * num_prompts
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise _wrong("sampling_params", "SamplingParams or a list of them", given)
    each = list(given)
    for params in each:
        if not isinstance(params, SamplingParams):
            raise _wrong("sampling_params", "SamplingParams or a list of them", params)
    if len(each) != num_prompts:
        raise InvalidRequest(
            f"sampling_params must be one for all or one for each of the {num_prompts} prompts, given {len(each)}",
            "sampling_params",
        )
    return each


def is_int(value: object, minimum: int, maximum: float = math.inf) -> bool:
    """Whether a value is an integer within bounds, and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


def _check_int(name: str, value: Any, minimum: int, maximum: float = math.inf) -> None:
    if not is_int(value, minimum, maximum):
        allowed = f"an integer >= {minimum}" if maximum == math.inf else f"an integer within {minimum}..{maximum}"
        raise _wrong(name, allowed, value)


def _check_number(name: str, value: Any, minimum: float, maximum: float = math.inf, is_open: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not minimum <= value <= maximum or (is_open and value == minimum):
        above = f"> {minimum:g}" if is_open else f">= {minimum:g}"
        raise _wrong(name, f"a number {above}" + (f" and <= {maximum:g}" if maximum < math.inf else ""), value)


def _wrong(name: str, allowed: str, value: Any) -> InvalidRequest:
    return InvalidRequest(f"{name} must be {allowed}, given {value!r}", name)
