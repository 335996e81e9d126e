"""What sampling does to whole rows of scores, and how torch does it: on every device, and as others must do it.

Scores are [rows, vocab_size] float32, contiguous. A token that cannot be chosen has a score of -inf.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from funitel.model_server.grammar import TokenMasks
from funitel.model_server.noise import gumbel
from funitel.proto.step import SamplingParams


class ScoreMath(Protocol):
    """The heavy part of sampling. Every row's result depends on that row alone."""

    def allow(self, scores: torch.Tensor, masks: TokenMasks | None) -> None:
        """Make -inf, in place, of what is not a number and of tokens that masks do not allow; +inf becomes finite."""

    def warp(self, scores: torch.Tensor, rows: Sequence[int], params: Sequence[SamplingParams]) -> None:
        """Temperature, top-k, top-p, min-p, typical-p on some rows, in place."""

    def best(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The best token of each row [rows] int64, and the log of the sum of exponentials [rows] float32."""

    def draw(self, scores: torch.Tensor, rows: Sequence[int], keys: Sequence[int]) -> torch.Tensor:
        """A token for some rows, [len(rows)] int64, drawn from their distributions by noise from 64-bit keys."""


class TorchScores:
    """By torch's operators."""

    def allow(self, scores: torch.Tensor, masks: TokenMasks | None) -> None:
        """See `ScoreMath`."""
        scores.nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
        if masks is not None:
            allowed = np.unpackbits(masks.bits.view(np.uint8), axis=1, count=scores.shape[1], bitorder="little")
            is_out = torch.from_numpy(allowed == 0).to(scores.device, non_blocking=True)
            scores[masks.rows] = scores[masks.rows].masked_fill(is_out, -torch.inf)

    def warp(self, scores: torch.Tensor, rows: Sequence[int], params: Sequence[SamplingParams]) -> None:
        """See `ScoreMath`."""
        scores[list(rows)] = _warp(scores[list(rows)], params)

    def best(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ScoreMath`."""
        return scores.argmax(dim=-1), scores.logsumexp(dim=-1)

    def draw(self, scores: torch.Tensor, rows: Sequence[int], keys: Sequence[int]) -> torch.Tensor:
        """See `ScoreMath`."""
        return (scores[list(rows)] + gumbel(keys, scores.shape[1], scores.device)).argmax(dim=-1)


def _warp(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Temperature, top-k, top-p, min-p, typical-p, each only on the rows that ask for it. Masked tokens become -inf."""
    temperatures = torch.tensor([p.temperature for p in params], device=scores.device)
    best = scores.max(dim=-1, keepdim=True).values
    scores = (scores - best) / temperatures[:, None]  # at most 0: the tiniest temperature cannot overflow
    for rows, warp in (
        ([i for i, p in enumerate(params) if p.top_k], _top_k),
        ([i for i, p in enumerate(params) if p.top_p < 1.0], _top_p),
        ([i for i, p in enumerate(params) if p.min_p > 0.0], _min_p),
        ([i for i, p in enumerate(params) if p.typical_p < 1.0], _typical_p),
    ):
        if rows:
            scores[rows] = warp(scores[rows], [params[i] for i in rows])
    return scores


def _top_k(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Keep the k best; ties with the k-th stay."""
    ks = torch.tensor([min(p.top_k, scores.shape[1]) for p in params], device=scores.device)
    best = scores.topk(int(ks.max()), dim=-1).values
    return scores.masked_fill(scores < best.gather(1, ks[:, None] - 1), -torch.inf)


def _top_p(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Keep the smallest set of tokens whose mass reaches p, at least one."""
    ps = torch.tensor([p.top_p for p in params], device=scores.device)
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    mass = ordered.softmax(dim=-1)
    before = mass.cumsum(dim=-1) - mass  # mass of the tokens ranked above
    is_out = before >= ps[:, None]
    is_out[:, 0] = False
    return scores.masked_fill(torch.zeros_like(is_out).scatter(1, ids, is_out), -torch.inf)


def _min_p(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Drop tokens less likely than p times the likeliest. Source: Nguyen et al., arXiv 2407.01082."""
    floors = torch.tensor([math.log(p.min_p) for p in params], device=scores.device)
    best = scores.max(dim=-1, keepdim=True).values
    return scores.masked_fill(scores - best < floors[:, None], -torch.inf)


def _typical_p(scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Keep the tokens whose surprise is nearest the entropy until their mass reaches p. Source: arXiv 2202.00666."""
    ps = torch.tensor([p.typical_p for p in params], device=scores.device)
    logprobs = scores.log_softmax(dim=-1)
    probs = logprobs.exp()
    entropy = -(probs * logprobs).nan_to_num().sum(dim=-1, keepdim=True)
    distance = (-logprobs - entropy).abs()
    ids = distance.argsort(dim=-1, stable=True)
    mass = probs.gather(1, ids)
    is_out = mass.cumsum(dim=-1) - mass >= ps[:, None]
    is_out[:, 0] = False
    return scores.masked_fill(torch.zeros_like(is_out).scatter(1, ids, is_out), -torch.inf)
