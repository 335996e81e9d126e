"""Decoding strategies as they are defined, one token after the other in double precision, to compare with.

`scores` are those of one row behind its masks, [vocab_size] float64, -inf for a token that is out. A rule returns which
tokens stay, as a set of ids.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from funitel.proto.strategy import DecodingStrategy


def likely(scores: np.ndarray) -> list[tuple[int, float]]:
    """The tokens that are not out with their probabilities, the likeliest first, of ties the lower id."""
    weights = np.exp(scores - scores.max())
    probs = weights / weights.sum()
    ids = sorted((i for i in range(len(scores)) if scores[i] > -math.inf), key=lambda i: (-scores[i], i))
    return [(i, float(probs[i])) for i in ids]


def top_k(scores: np.ndarray, count: int) -> set[int]:
    """The best so many, and ties with the last of them."""
    ranked = likely(scores)
    last = scores[ranked[min(count, len(ranked)) - 1][0]]
    return {i for i, _ in ranked if scores[i] >= last}


def top_p(scores: np.ndarray, mass: float) -> set[int]:
    """The likeliest until they have the mass."""
    return _until(likely(scores), mass)


def min_p(scores: np.ndarray, share: float) -> set[int]:
    """Tokens with a probability of at least this share of the likeliest one's."""
    ranked = likely(scores)
    return {i for i, p in ranked if p >= share * ranked[0][1]}


def typical_p(scores: np.ndarray, mass: float) -> set[int]:
    """Those with a surprise nearest the entropy, until they have the mass."""
    ranked = [(i, p) for i, p in likely(scores) if p > 0]
    entropy = -sum(p * math.log(p) for _, p in ranked)
    return _until(sorted(ranked, key=lambda one: abs(-math.log(one[1]) - entropy)), mass)


def _until(ranked: list[tuple[int, float]], mass: float) -> set[int]:
    kept, before = set[int](), 0.0
    for token_id, p in ranked:
        if kept and before >= mass:
            break
        kept.add(token_id)
        before += p
    return kept


def top_n_sigma(scores: np.ndarray, num_sigma: float) -> set[int]:
    """Scores within so many standard deviations of the best."""
    inside = [i for i in range(len(scores)) if scores[i] > -math.inf]
    sigma = np.std(scores[inside])
    return {i for i in inside if scores[i] >= scores.max() - num_sigma * sigma}


def max_k(scores: np.ndarray, count: int) -> set[int]:
    """The best so many."""
    return {i for i, _ in likely(scores)[:count]}


def tail_free(scores: np.ndarray, z: float) -> set[int]:
    """Tokens before the sum of the normalised second differences goes beyond z."""
    ranked = likely(scores)
    if len(ranked) < 3:
        return {i for i, _ in ranked}
    first = [one - other for (_, one), (_, other) in zip(ranked, ranked[1:], strict=False)]
    second = [abs(one - other) for one, other in zip(first, first[1:], strict=False)]
    total = sum(second)
    shares = [s / total if total > 1e-6 else 1 / len(second) for s in second]
    kept, mass = {ranked[0][0]}, 0.0
    for (token_id, _), share in zip(ranked[1:], shares, strict=False):
        mass += share
        if mass > z:
            break
        kept.add(token_id)
    return kept


def xtc(scores: np.ndarray, threshold: float) -> set[int]:
    """All tokens but the top choices, of which the least likely stays."""
    ranked = likely(scores)
    tops = [i for i, p in ranked if p >= threshold]
    return {i for i, _ in ranked} - set(tops[:-1])


def mirostat_2(scores: np.ndarray, mu: float) -> set[int]:
    """Tokens with a surprise of at most mu bits."""
    ranked = likely(scores)
    return {i for i, p in ranked if p > 0 and -math.log2(p) <= mu} or {ranked[0][0]}


def mirostat_1(scores: np.ndarray, mu: float) -> set[int]:
    """So many of the likeliest as Zipf's law says."""
    ranked = [p for _, p in likely(scores)[:100] if p > 0]
    above = below = 0.0
    for i in range(len(ranked) - 1):
        t, b = math.log((i + 2) / (i + 1)), math.log(ranked[i] / ranked[i + 1])
        above, below = above + t * b, below + t * t
    if below == 0 or above < 1e-6:
        return max_k(scores, len(scores))
    exponent = above / below
    epsilon = exponent - 1
    log_k = math.log(epsilon * 2**mu / (1 - len(scores) ** -epsilon)) / exponent
    return max_k(scores, max(1, int(math.exp(min(log_k, math.log(len(scores)) + 1)))))


def dry(strategy: DecodingStrategy, tokens: Sequence[int], is_breaker: Callable[[int], bool]) -> dict[int, float]:
    """By token, what its score loses."""
    n = strategy.dry_penalty_last_n
    tokens = list(tokens) if n < 0 else list(tokens)[max(0, len(tokens) - n) :]
    longest: dict[int, int] = {}
    for place in range(1, len(tokens)):  # of what followed
        length = 0
        while length < place and length < 50:
            one, other = tokens[place - 1 - length], tokens[len(tokens) - 1 - length]
            if one != other or is_breaker(one):
                break
            length += 1
        if not is_breaker(tokens[place]):
            longest[tokens[place]] = max(longest.get(tokens[place], 0), length)
    return {
        token_id: min(1e9, strategy.dry_multiplier * strategy.dry_base ** (length - strategy.dry_allowed_length))
        for token_id, length in longest.items()
        if length >= strategy.dry_allowed_length
    }


def fsd(strategy: DecodingStrategy, tokens: Sequence[int], scores: np.ndarray) -> int:
    """The token that is chosen."""
    tokens, ranked = list(tokens), likely(scores)[: strategy.fsd_k]
    tables: dict[tuple[int, ...], Counter[int]] = {}
    for order in range(strategy.fsd_n):
        for i in range(order, len(tokens)):
            tables.setdefault(tuple(tokens[i - order : i]), Counter())[tokens[i]] += 1

    def penalty(token_id: int) -> float:
        if not tokens or len(tokens) < strategy.fsd_n - 1:
            return 0.0
        rest, found = 1.0, 0.0
        for order in range(strategy.fsd_n - 1, 0, -1):
            table = tables.get(tuple(tokens[len(tokens) - order :]), Counter())
            if table[token_id]:
                found += rest * strategy.fsd_beta * table[token_id] / (table.total() + 1)
                rest *= 1 - strategy.fsd_beta
        return found + rest * tables[()][token_id] / len(tokens)

    alpha = strategy.fsd_alpha
    return max(ranked, key=lambda one: (1 - alpha) * one[1] - alpha * penalty(one[0]))[0]


def repeats_of_ngrams(tokens: Sequence[int], size: int) -> set[int]:
    """Tokens that would end an n-gram that was there before."""
    grams = {tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)}
    last = tuple(tokens[len(tokens) - size + 1 :])
    return {gram[-1] for gram in grams if gram[:-1] == last}
