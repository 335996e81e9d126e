"""Decoding strategies of one request beyond temperature, top-k, top-p, min-p and typical-p.

Standard library only, as `step`, of which it is a part. docs/decoding.md defines each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

DRY_BREAKERS = ("\n", ":", '"', "*")
"""Texts across which DRY looks for no repetition; llama.cpp's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingStrategy:
    """Decoding strategies of a request. Defaults are neutral, or those of a strategy that another field turns on."""

    top_n_sigma: float = 0.0  # keep scores within so many standard deviations of the best; 0: all
    max_k: int = 0  # keep at most so many tokens, after top-p; 0: all
    tfs_z: float = 1.0  # tail-free sampling: share of the curvature that is kept; 1: all
    xtc_probability: float = 0.0  # with which the top choices are excluded; 0: never
    xtc_threshold: float = 0.1  # probability from which a token is a top choice
    mirostat: int = 0  # version 1 or 2; 0: none
    mirostat_tau: float = 5.0  # aimed surprise of a token, in bits
    mirostat_eta: float = 0.1  # learning rate
    dry_multiplier: float = 0.0  # of the penalty for a token that goes on with a repetition; 0: none
    dry_base: float = 1.75  # by which it grows with each token of the repetition
    dry_allowed_length: int = 2  # tokens of a repetition with a penalty of `dry_multiplier`; shorter ones have none
    dry_penalty_last_n: int = -1  # tokens in which repetitions are looked for; -1: all, 0: none
    dry_sequence_breakers: tuple[str, ...] = DRY_BREAKERS  # a token with such a text ends a repetition
    fsd_alpha: float = 0.0  # weight of the penalty of n-grams against the probability; 0: no FSD
    fsd_k: int = 6  # likeliest tokens that are compared
    fsd_n: int = 3  # tokens of the longest n-grams
    fsd_beta: float = 0.9  # weight of longer n-grams against shorter ones
    fsd_random_tokens: int = 0  # of the completion's first, each is drawn with a probability of a half
    no_repeat_ngram_size: int = 0  # tokens of n-grams that come once only; 0: no rule

    @property
    def is_sampled(self) -> bool:
        """Whether it draws a token of a distribution."""
        return self.narrows or bool(self.mirostat or (self.fsd_alpha and self.fsd_random_tokens))

    @property
    def narrows(self) -> bool:
        """Whether it leaves tokens out of the distribution, by rules that leave out others than mirostat does."""
        return bool(self.top_n_sigma or self.max_k or self.xtc_probability) or self.tfs_z < 1.0

    @property
    def is_deterministic(self) -> bool:
        """Whether it chooses every token itself."""
        return bool(self.fsd_alpha) and not self.fsd_random_tokens

    @property
    def follows_tokens(self) -> bool:
        """Whether what it does depends on the tokens before."""
        return bool(self.mirostat or self.dry_multiplier or self.fsd_alpha)

    @property
    def greedy(self) -> "DecodingStrategy":
        """The same without what has no meaning where nothing is drawn."""
        return replace(self, top_n_sigma=0.0, max_k=0, tfs_z=1.0, xtc_probability=0.0, mirostat=0, fsd_random_tokens=0)

    def contradiction(self, filters: Mapping[str, object]) -> tuple[str, str, object, object] | None:
        """Two parameters that exclude each other, and their values: one leaves the other nothing to choose.

        `filters` are those of top_k, top_p, min_p and typical_p that are on.
        """
        if not (self.mirostat or self.is_deterministic):
            return None
        first = "mirostat" if self.mirostat else "fsd_alpha"
        others = [name for name in self.used if name in _NARROWING or name == "fsd_alpha" != first]
        given = dict(filters) | {name: getattr(self, name) for name in others}
        return next(((first, name, getattr(self, first), value) for name, value in given.items()), None)

    @property
    def used(self) -> tuple[str, ...]:
        """The fields that turn a strategy on, of those that are on."""
        return tuple(name for name, off in OFF.items() if getattr(self, name) != off)


OFF: dict[str, float] = {
    "top_n_sigma": 0.0,
    "max_k": 0,
    "tfs_z": 1.0,
    "xtc_probability": 0.0,
    "mirostat": 0,
    "dry_multiplier": 0.0,
    "fsd_alpha": 0.0,
    "no_repeat_ngram_size": 0,
}
"""The fields that turn strategies on, with the value that turns each off."""

_NARROWING = ("top_n_sigma", "max_k", "tfs_z", "xtc_probability")

BOUNDS: dict[str, tuple[float, float]] = {
    "top_n_sigma": (-1, 1000),  # up to 0 is off
    "max_k": (0, 2**31 - 1),
    "tfs_z": (0, 1),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "mirostat": (0, 2),
    "mirostat_tau": (0, 100),
    "mirostat_eta": (0, 1),
    "dry_multiplier": (0, 100),
    "dry_base": (1, 100),
    "dry_allowed_length": (1, 1024),
    "dry_penalty_last_n": (-1, 2**31 - 1),
    "fsd_alpha": (0, 1),
    "fsd_k": (1, 1024),
    "fsd_n": (1, 8),
    "fsd_beta": (0, 1),
    "fsd_random_tokens": (0, 2**31 - 1),
    "no_repeat_ngram_size": (0, 1024),
}
"""The least and the largest value of each number."""
MAX_BREAKERS, MAX_BREAKER = 64, 40  # texts across which DRY looks for nothing, and characters of one
