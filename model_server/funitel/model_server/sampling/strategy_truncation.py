"""Which tokens of one row stay, by strategies that look at the row's scores alone.

Each takes scores [vocab_size] float32, in which a token that is out is -inf and one at least is not, and returns which
tokens stay: [vocab_size] bool, at least one of those that were. Decisions are in double precision. Ties are broken by
the lower id. All work on every device.
"""

import math

import torch

_TINY = 1e-6  # a curvature of a whole distribution that is none
_MANY = 100  # tokens by which mirostat 1 measures the tail


def probabilities(scores: torch.Tensor) -> torch.Tensor:
    """The distribution of scores: [vocab_size] float64."""
    return scores.double().softmax(dim=0)


def best_ids(values: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the largest of some values [n], in descending order: [min(count, n)] int64."""
    last = values.topk(min(count, len(values))).values[-1]
    ids = (values >= last).nonzero()[:, 0]
    return ids[values[ids].argsort(descending=True, stable=True)][:count]


def keep_top_n_sigma(scores: torch.Tensor, num_sigma: float) -> torch.Tensor:
    """Keep scores within so many standard deviations, of those not out, of the best. Source: arXiv 2411.07641."""
    is_in = scores > -torch.inf
    values = scores.double()
    count = is_in.sum()
    mean = values.masked_fill(~is_in, 0.0).sum() / count
    variance = (values - mean).masked_fill(~is_in, 0.0).square().sum() / count
    return is_in & (values >= values.max() - num_sigma * variance.sqrt())


def keep_best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Keep so many best tokens, of ties the lower ids."""
    is_in = scores > -torch.inf
    if count >= len(scores):
        return is_in
    return is_in & torch.zeros_like(is_in).index_fill_(0, best_ids(scores, count), True)


def keep_tail_free(scores: torch.Tensor, z: float) -> torch.Tensor:
    """Keep the likeliest token, and the one ranked i behind it while the first i curvatures sum to z or less.

    A curvature is the absolute second difference of the probabilities in descending order, as a share of all of them;
    where their sum is next to nothing, all are alike. Of fewer than three tokens all stay. Source: Phoenix and Egan,
    "Tail Free Sampling".
    """
    is_in = scores > -torch.inf
    ids = is_in.nonzero()[:, 0]
    if len(ids) < 3:
        return is_in
    ids = ids[scores[ids].argsort(descending=True, stable=True)]
    curvature = probabilities(scores)[ids].diff().diff().abs()
    total = curvature.sum()
    shares = torch.where(total > _TINY, curvature / total, torch.full_like(curvature, 1 / len(curvature)))
    num_kept = 1 + int((shares.cumsum(dim=0) <= z).sum())
    return torch.zeros_like(is_in).index_fill_(0, ids[:num_kept], True)


def keep_below_top_choices(scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """XTC: of two tokens or more of this probability or more, keep only the least likely, with all less likely ones.

    Source: p-e-w, text-generation-webui pull request 6335.
    """
    probs = probabilities(scores)
    num_top = int((probs >= threshold).sum())
    is_kept = scores > -torch.inf
    if num_top > 1:
        is_kept[best_ids(probs, num_top)[:-1]] = False
    return is_kept


def keep_by_surprise(scores: torch.Tensor, mu: float) -> torch.Tensor:
    """Mirostat 2: keep tokens with a surprise of at most mu bits, or the likeliest. Source: arXiv 2007.14966."""
    kept = -probabilities(scores).log2() <= mu
    return torch.where(kept.any(), kept, keep_best(scores, 1))


def keep_by_zipf(scores: torch.Tensor, mu: float) -> torch.Tensor:
    """Mirostat 1: keep the k likeliest, k such that they aim at a surprise of mu bits under Zipf's law.

    The law's exponent is measured by the hundred likeliest tokens. Source: arXiv 2007.14966.
    """
    best = probabilities(scores).topk(min(_MANY, len(scores))).values
    count = zipf_count([p for p in best.tolist() if p > 0.0], mu, len(scores))
    return keep_best(scores, count)


def zipf_count(best: list[float], mu: float, vocab_size: int) -> int:
    """How many tokens mirostat 1 keeps, of the probabilities of the likeliest in descending order."""
    times = [math.log((i + 2) / (i + 1)) for i in range(len(best) - 1)]
    ratios = [math.log(one / other) for one, other in zip(best, best[1:], strict=False)]
    if sum(ratios) < _TINY or vocab_size < 2:
        return vocab_size  # a flat distribution has no tail
    exponent = sum(t * b for t, b in zip(times, ratios, strict=True)) / sum(t * t for t in times)
    epsilon = exponent - 1.0
    log_size = math.log(vocab_size)
    if abs(epsilon) < 1e-9:
        log_scale = -math.log(log_size)
    else:
        log_scale = math.log(epsilon / -math.expm1(-epsilon * log_size))
    log_count = (log_scale + mu * math.log(2.0)) / exponent
    return vocab_size if log_count >= log_size else max(1, int(math.exp(log_count)))
