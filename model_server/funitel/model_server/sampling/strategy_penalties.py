"""Strategies that look at repetitions in the text: DRY and FSD."""

from collections.abc import Callable, Sequence

import numpy as np

from funitel.model_server.sampling.token_history import TokenHistory
from funitel.proto.strategy import DecodingStrategy

MAX_MATCH = 50
"""Tokens of the longest repetition that DRY knows; longer ones count as this."""
MAX_PENALTY = 1e9

IsBreaker = Callable[[int], bool]


def dry_penalties(
    strategy: DecodingStrategy, history: TokenHistory, is_breaker: IsBreaker
) -> tuple[np.ndarray, np.ndarray]:
    """DRY: the tokens that would go on with a repetition, and what their scores lose: [n] int64, [n] float64.

    A token that follows an earlier occurrence of the text's last L tokens, L as large as can be and without a breaker
    among them, loses multiplier * base ** (L - allowed_length) from L = allowed_length on. Breakers lose nothing.

    Source: p-e-w, text-generation-webui pull request 5677.
    """
    last_n = strategy.dry_penalty_last_n
    ids = history.ids if last_n < 0 else history.ids[max(0, len(history) - last_n) :]
    most = _most_match(ids, is_breaker)
    places = np.arange(len(ids) - 1)  # where an occurrence ends
    lengths = np.zeros(len(places), dtype=np.int64)
    for back in range(most):
        places = places[places >= back]
        places = places[ids[places - back] == ids[len(ids) - 1 - back]]
        lengths[places] = back + 1
    places = np.flatnonzero(lengths >= max(1, strategy.dry_allowed_length))
    tokens, at = np.unique(ids[places + 1], return_inverse=True)
    longest = np.zeros(len(tokens), dtype=np.int64)
    np.maximum.at(longest, at, lengths[places])
    is_free = np.array([not is_breaker(token_id) for token_id in tokens.tolist()], dtype=bool)
    tokens, longest = tokens[is_free], longest[is_free]
    with np.errstate(over="ignore"):
        grown = strategy.dry_multiplier * strategy.dry_base ** (longest - strategy.dry_allowed_length)
    return tokens, np.minimum(grown, MAX_PENALTY)


def _most_match(ids: np.ndarray, is_breaker: IsBreaker) -> int:
    """How many of the last tokens are no breakers, at most MAX_MATCH."""
    for count, token_id in enumerate(ids[: -MAX_MATCH - 1 : -1].tolist()):
        if is_breaker(token_id):
            return count
    return min(len(ids), MAX_MATCH)


def fsd_penalties(strategy: DecodingStrategy, history: TokenHistory, candidates: Sequence[int]) -> list[float]:
    """FSD: how much each candidate is like what followed the text's last tokens before, by a smoothed n-gram model.

    From the longest context, of n - 1 tokens, to that of one: where a candidate followed the context, it gets
    r * beta * count / (total + 1), and r, at first 1, becomes r * (1 - beta). Last, r * its share of all tokens. Zero
    for all while there are fewer than n - 1 tokens.

    Source: Yang et al., "A Frustratingly Simple Decoding Method for Neural Text Generation" (arXiv 2305.12675), with
    Inferflow's smoothing.
    """
    if len(history) < strategy.fsd_n - 1 or not len(history):
        return [0.0] * len(candidates)
    ids = np.array(candidates, dtype=np.int64)
    penalties, rest = np.zeros(len(ids)), np.ones(len(ids))
    for length in range(strategy.fsd_n - 1, 0, -1):
        followers = history.followers(length)
        counts = _counts(followers, ids)
        penalties += rest * strategy.fsd_beta * counts / (len(followers) + 1)
        rest = np.where(counts > 0, rest * (1 - strategy.fsd_beta), rest)
    penalties += rest * _counts(history.ids, ids) / len(history)
    found: list[float] = penalties.tolist()
    return found


def _counts(tokens: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """How often each id is among some tokens: [len(ids)] int64."""
    counts: np.ndarray = np.bincount(tokens, minlength=int(ids.max()) + 1)[ids]
    return counts
