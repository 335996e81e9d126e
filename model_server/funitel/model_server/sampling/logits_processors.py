"""Logits processors on whole rows of scores: temperature, top-k, top-p, min-p, typical-p; torch's are the reference.

Scores are [rows, vocab_size] float32, contiguous. A token that cannot be chosen has a score of -inf.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from funitel.model_server.sampling.grammar import TokenMasks
from funitel.model_server.sampling.gumbel_noise import gumbel
from funitel.proto.step import SamplingParams


class LogitsProcessors(Protocol):
    """Logits processors and the choice of tokens. Every row's result depends on that row alone."""

    def allow(self, scores: torch.Tensor, masks: TokenMasks | None) -> None:
        """Make -inf, in place, of what is not a number and of tokens that masks do not allow; +inf becomes finite."""

    def warp(self, scores: torch.Tensor, rows: Sequence[int], params: Sequence[SamplingParams]) -> None:
        """Temperature, top-k, top-p, min-p, typical-p on some rows, in place."""

    def best(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The best token of each row [rows] int64, and the log of the sum of exponentials [rows] float32."""

    def likeliest(self, scores: torch.Tensor) -> tuple[list[int], list[float]]:
        """`allow` without masks, in place; then the best token of each row, and its log-probability.

        The log-probability of a row that was broken, as `are_broken` says, is NaN.
        """

    def draw(self, scores: torch.Tensor, rows: Sequence[int], keys: Sequence[int]) -> torch.Tensor:
        """A token for some rows, [len(rows)] int64, drawn from their distributions by noise from 64-bit keys."""


class TorchLogitsProcessors:
    """Logits processors by torch's operators, on every device."""

    def allow(self, scores: torch.Tensor, masks: TokenMasks | None) -> None:
        """See `LogitsProcessors`."""
        scores.nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
        if masks is not None:
            allowed = np.unpackbits(masks.bits.view(np.uint8), axis=1, count=scores.shape[1], bitorder="little")
            is_out = torch.from_numpy(allowed == 0).to(scores.device, non_blocking=True)
            scores[masks.rows] = scores[masks.rows].masked_fill(is_out, -torch.inf)

    def warp(self, scores: torch.Tensor, rows: Sequence[int], params: Sequence[SamplingParams]) -> None:
        """See `LogitsProcessors`."""
        scores[list(rows)] = _warp(scores[list(rows)], params)

    def best(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LogitsProcessors`."""
        return scores.argmax(dim=1), scores.logsumexp(dim=1)

    def likeliest(self, scores: torch.Tensor) -> tuple[list[int], list[float]]:
        """See `LogitsProcessors`."""
        is_broken = are_broken(scores)
        self.allow(scores, None)
        chosen, normaliser = self.best(scores)
        logprobs = logprobs_of(scores, chosen, normaliser, is_broken)
        return chosen.tolist(), logprobs.tolist()

    def draw(self, scores: torch.Tensor, rows: Sequence[int], keys: Sequence[int]) -> torch.Tensor:
        """See `LogitsProcessors`."""
        return (scores[list(rows)] + gumbel(keys, scores.shape[1], scores.device)).argmax(dim=1)


def are_broken(scores: torch.Tensor) -> torch.Tensor:
    """Which rows hold what is not a number, or +inf: [rows] bool. A token of -inf is one that cannot follow."""
    if scores.device.type != "cpu":
        return ~(scores.amax(dim=1) < torch.inf)
    return torch.from_numpy(~(scores.numpy().max(axis=1) < np.inf))  # torch would wake its threads for it


def logprobs_of(
    scores: torch.Tensor, chosen: torch.Tensor, normaliser: torch.Tensor, is_broken: torch.Tensor
) -> torch.Tensor:
    """Log-probabilities of a chosen token of each row, [rows] float32; NaN of broken rows."""
    return (scores.gather(1, chosen[:, None])[:, 0] - normaliser).masked_fill_(is_broken, torch.nan)


def _warp(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Temperature, top-k, top-p, min-p, typical-p, each only on the rows that ask for it. Masked tokens become -inf."""
    scores = apply_temperature(scores, _column([p.temperature for p in params], scores))
    for rows, keep, values in (
        ([i for i, p in enumerate(params) if p.top_k], keep_top_k, [p.top_k for p in params]),
        ([i for i, p in enumerate(params) if p.top_p < 1.0], keep_top_p, [p.top_p for p in params]),
        ([i for i, p in enumerate(params) if p.min_p > 0.0], keep_min_p, [log_of(p.min_p) for p in params]),
        ([i for i, p in enumerate(params) if p.typical_p < 1.0], keep_typical_p, [p.typical_p for p in params]),
    ):
        if rows:
            asked = [values[i] for i in rows]
            scores[rows] = keep(scores[rows], _column(asked, scores), max(asked))
    return scores


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, device=like.device)[:, None]


def log_of(probability: float) -> float:
    """The logarithm of a probability, which may be 0."""
    return math.log(probability) if probability else -math.inf


def apply_temperature(scores: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Scores [rows, vocab_size] at temperatures [rows, 1]: at most 0, so that the tiniest cannot overflow."""
    return (scores - scores.max(dim=1, keepdim=True).values) / temperatures


# Each of these takes scores [rows, vocab_size], the parameters of the rows [rows, 1] and their maximum, and returns
# scores that are -inf where a token is left out. None of them makes the host wait for a device.


def keep_top_k(scores: torch.Tensor, ks: torch.Tensor, largest: float) -> torch.Tensor:
    """Keep the k best; ties with the k-th stay."""
    size = scores.shape[1]
    best = scores.topk(min(int(largest), size), dim=1).values
    return scores.masked_fill(scores < best.gather(1, ks.clamp(max=size) - 1), -torch.inf)


def keep_top_p(scores: torch.Tensor, ps: torch.Tensor, _: float) -> torch.Tensor:
    """Keep the smallest set of tokens with a mass of p or more, at least one."""
    ordered, ids = scores.sort(dim=1, descending=True, stable=True)
    mass = ordered.softmax(dim=1)
    before = mass.cumsum(dim=1) - mass  # mass of the tokens ranked above
    is_out = before >= ps
    is_out[:, 0] = False
    return scores.masked_fill(torch.zeros_like(is_out).scatter(1, ids, is_out), -torch.inf)


def keep_min_p(scores: torch.Tensor, floors: torch.Tensor, _: float) -> torch.Tensor:
    """Drop tokens less likely than p times the likeliest, p as its logarithm. Source: arXiv 2407.01082."""
    best = scores.max(dim=1, keepdim=True).values
    return scores.masked_fill(scores - best < floors, -torch.inf)


def keep_typical_p(scores: torch.Tensor, ps: torch.Tensor, _: float) -> torch.Tensor:
    """Keep the tokens of a surprise nearest the entropy until their mass reaches p. Source: arXiv 2202.00666."""
    logprobs = scores.log_softmax(dim=1)
    probs = logprobs.exp()
    entropy = -(probs * logprobs).nan_to_num().sum(dim=1, keepdim=True)
    distance = (-logprobs - entropy).abs()
    ids = distance.argsort(dim=1, stable=True)
    mass = probs.gather(1, ids)
    is_out = mass.cumsum(dim=1) - mass >= ps
    is_out[:, 0] = False
    return scores.masked_fill(torch.zeros_like(is_out).scatter(1, ids, is_out), -torch.inf)
