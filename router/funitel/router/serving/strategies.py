"""Decoding strategies of a request: those that have a name, and those that exclude each other. Pure."""

from dataclasses import fields, replace
from typing import Any

from funitel.proto.strategy import OFF, DecodingStrategy
from funitel.router.serving.sampling_request import GREEDY, BrokenRule, SamplingRequest

ALGORITHMS: dict[str, dict[str, Any]] = {
    "std": {"top_p": 0.9, "max_k": 8},
    "greedy": {},
    "top_k": {"top_k": 8},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "tfs": {"tfs_z": 0.95},
    "typical": {"typical_p": 0.95},
    "mirostat": {"mirostat": 2},
    "fsd": {"fsd_alpha": 0.5},
    "random_fsd": {"fsd_alpha": 0.5, "fsd_random_tokens": 10, "top_p": 0.93, "max_k": 8},
}
"""Inferflow's names, and what each sets of the fields that are not given."""

_OF_STRATEGY = frozenset(DecodingStrategy.__slots__)
_OF_REQUEST = frozenset(field.name for field in fields(SamplingRequest)) - _OF_STRATEGY
_FILTERS = ("top_k", "top_p", "min_p", "typical_p")


def with_algorithm(sampling: SamplingRequest, name: str) -> SamplingRequest:
    """The same with the parameters of a strategy by its name."""
    if name == "greedy":
        strategy = None if sampling.strategy is None else sampling.strategy.greedy
        return replace(sampling, do_sample=False, strategy=strategy, **GREEDY)
    values = ALGORITHMS[name]
    strategy = sampling.strategy or DecodingStrategy()
    shared = {k: v for k, v in values.items() if k in _OF_REQUEST and getattr(sampling, k) is None}
    own: dict[str, Any] = {
        k: v for k, v in values.items() if k in _OF_STRATEGY and getattr(strategy, k) == OFF.get(k, 0)
    }
    return replace(sampling, strategy=replace(strategy, **own), **shared)


def check_strategy(sampling: SamplingRequest, strategy: DecodingStrategy) -> None:
    """Raise BrokenRule for two strategies that exclude each other."""
    found = strategy.contradiction({name: value for name in _FILTERS if (value := getattr(sampling, name))})
    if found is not None:
        first, second, one, other = found
        raise BrokenRule(second, f"`${first}` and `${second}` exclude each other", f"{one} and {other}")
