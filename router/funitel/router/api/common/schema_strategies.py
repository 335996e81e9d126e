"""The fields of decoding strategies, alike on TGI's native routes and in chats and completions."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from funitel.proto.strategy import BOUNDS, MAX_BREAKER, MAX_BREAKERS, DecodingStrategy
from funitel.router.api.common.schema_base import F32, U32, Body
from funitel.router.serving.strategies import ALGORITHMS

MAX_WORDS, MAX_WORD = 256, 256  # that are banned, and characters of one; each is looked at in every step


def _algorithm(name: str) -> str:
    plain = name.lower().removeprefix("sample.")
    if plain not in ALGORITHMS:
        raise ValueError(f"must be one of {', '.join(ALGORITHMS)}. Given: {name[:50]!r}")
    return plain


def _number(name: str, what: str) -> Any:
    least, most = BOUNDS[name]
    return Field(default=None, ge=least, le=most, description=what)


Breaker = Annotated[str, Field(min_length=1, max_length=MAX_BREAKER)]


class StrategyFields(Body):
    """Decoding strategies in the words of vLLM, llama.cpp, transformers and Inferflow; an absent one is off."""

    min_tokens: U32 | None = Field(default=None, description="Tokens before which nothing ends the answer.")
    bad_words: Annotated[list[Annotated[str, Field(max_length=MAX_WORD)]], Field(max_length=MAX_WORDS)] | None = Field(
        default=None, description="Words that the answer never has."
    )
    allowed_token_ids: list[U32] | None = Field(default=None, description="The only tokens that the answer may have.")
    speculate: U32 | None = Field(
        default=None, description="Most draft tokens that a step verifies; --speculate of the server if absent."
    )
    decoding_alg: Annotated[str, AfterValidator(_algorithm)] | None = Field(
        default=None, description=f"Sets the fields of a strategy that are not given: {', '.join(ALGORITHMS)}."
    )
    top_n_sigma: F32 | None = _number(
        "top_n_sigma", "Keep scores within so many standard deviations of the best; up to 0 is off."
    )
    max_k: int | None = _number("max_k", "Keep at most so many tokens behind top-p, min-p and typical-p; 0 is off.")
    tfs_z: F32 | None = _number("tfs_z", "Tail-free sampling: keep so much of the curvature; 1 is off.")
    xtc_probability: F32 | None = _number("xtc_probability", "Probability of excluding the top choices; 0 is off.")
    xtc_threshold: F32 | None = _number("xtc_threshold", "Probability from which a token is a top choice; 0.1.")
    mirostat: int | None = _number(
        "mirostat", "Version of mirostat; 0 is off. Excludes other rules that leave tokens out."
    )
    mirostat_tau: F32 | None = _number("mirostat_tau", "Aimed surprise of a token, in bits; 5 if absent.")
    mirostat_eta: F32 | None = _number("mirostat_eta", "Learning rate of mirostat; 0.1 if absent.")
    dry_multiplier: F32 | None = _number(
        "dry_multiplier", "DRY: what a token loses that goes on with a repetition; 0 is off."
    )
    dry_base: F32 | None = _number("dry_base", "By which that grows with each repeated token; 1.75 if absent.")
    dry_allowed_length: int | None = _number(
        "dry_allowed_length", "Tokens of the shortest repetition that counts; 2 if absent."
    )
    dry_penalty_last_n: int | None = _number(
        "dry_penalty_last_n", "Tokens in which repetitions are looked for; -1, all, if absent; 0 is none."
    )
    dry_sequence_breakers: Annotated[list[Breaker], Field(max_length=MAX_BREAKERS)] | None = Field(
        default=None, description='A token with such a text ends a repetition; "\\n", ":", "\\"", "*" if absent.'
    )
    fsd_alpha: F32 | None = _number("fsd_alpha", "FSD: weight of the penalty of repeated n-grams; 0 is off.")
    fsd_k: int | None = _number("fsd_k", "Likeliest tokens that FSD compares; 6 if absent.")
    fsd_n: int | None = _number("fsd_n", "Tokens of FSD's longest n-grams; 3 if absent.")
    fsd_beta: F32 | None = _number("fsd_beta", "Weight of longer n-grams against shorter ones; 0.9 if absent.")
    fsd_random_tokens: int | None = _number(
        "fsd_random_tokens", "Randomized FSD: so many first tokens are drawn with a probability of a half."
    )
    no_repeat_ngram_size: int | None = _number(
        "no_repeat_ngram_size", "N-grams of so many tokens come once only, the prompt's included; 0 is off."
    )

    @property
    def strategy(self) -> DecodingStrategy | None:
        """The strategies that are not neutral; None where there are none."""
        given = self.model_fields_set & _OF_STRATEGY
        if not given:
            return None
        values = {name: value for name in given if (value := getattr(self, name)) is not None}
        if not values:
            return None
        if "dry_sequence_breakers" in values:
            values["dry_sequence_breakers"] = tuple(values["dry_sequence_breakers"])
        if "top_n_sigma" in values:
            values["top_n_sigma"] = max(0.0, values["top_n_sigma"])
        return DecodingStrategy(**values)


_OF_STRATEGY = frozenset(DecodingStrategy.__slots__)
