"""Logits -> log-likelihoods of tokens and distances to a reference, and the figures of all of them."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from funitel.proto.errors import BrokenScores

_MAX_LOSS = 700.0  # nats: exp of more is beyond a float
CHUNK_BYTES = 16 << 20  # of the float64 log-probabilities of some rows


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far a model is from a reference on the same tokens.

    Attributes:
        perplexity_ratio: perplexity of the model over that of the reference.
        perplexity_ratio_error: its standard error, of the differences token by token.
        kl_mean: Kullback-Leibler divergence KL(reference || model), in nats, mean over the predicted tokens.
        kl_p99: its 99th percentile.
        kl_max: its largest value.
        same_top_token: share of the tokens for which both have the same most likely token.
    """

    perplexity_ratio: float
    perplexity_ratio_error: float
    kl_mean: float
    kl_p99: float
    kl_max: float
    same_top_token: float


@dataclass(frozen=True, kw_only=True)
class Likelihood:
    """How well a model predicts a text.

    Attributes:
        perplexity: exp of the mean negative log-likelihood of a scored token.
        perplexity_error: its standard error, as if tokens were independent.
        bits_per_byte: negative log-likelihood of the scored tokens in bits, for each byte of theirs in the text; 0.0
            where they have none.
    """

    perplexity: float
    perplexity_error: float
    bits_per_byte: float


class Scores:
    """What the windows of a text have given so far: a few numbers for each scored token.

    They are Python's numbers: small tensors that stay, between large ones that come and go, make the heap grow.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.losses: list[float] = []
        self.divergences: list[float] = []
        self.agreements: list[bool] = []

    def add(self, logits: torch.Tensor, ids: torch.Tensor, against: torch.Tensor | None = None) -> None:
        """Score `ids` [rows] under `logits` [rows, vocab_size], and compare these with the logits of a reference.

        The reference must have scored the same rows by its own logits before.

        Raises:
            BrokenScores: logits are NaN, or make a token, or what the reference expects, impossible.
        """
        rows = max(1, CHUNK_BYTES // (8 * logits.shape[1]))
        for begin in range(0, len(ids), rows):
            part = slice(begin, begin + rows)
            self._add(logits[part], ids[part], None if against is None else against[part])

    def _add(self, logits: torch.Tensor, ids: torch.Tensor, against: torch.Tensor | None) -> None:
        logprobs = logits.double().log_softmax(dim=1)
        loss = -logprobs.gather(1, ids[:, None]).squeeze(1)
        if bool(logprobs.isnan().any()):
            raise BrokenScores(f"{self.name}: the logits are NaN or infinite, so the text has no perplexity")
        if bool(loss.isinf().any()):
            token_id = int(ids[loss.isinf()][0])
            raise BrokenScores(f"{self.name}: token {token_id} of the text has probability 0: perplexity is infinite")
        self.losses.extend(loss.tolist())
        if against is None:
            return
        expected = against.double().log_softmax(dim=1)
        terms = expected.exp() * (expected - logprobs)
        divergence = terms.masked_fill_(expected == -torch.inf, 0.0).sum(dim=1).clamp_min_(0.0)  # but for rounding
        if not bool(divergence.isfinite().all()):
            message = "a token that the reference holds possible has probability 0: the KL divergence is infinite"
            raise BrokenScores(f"{self.name}: {message}")
        self.divergences.extend(divergence.tolist())
        self.agreements.extend((logits.argmax(dim=1) == against.argmax(dim=1)).tolist())

    @property
    def num_tokens(self) -> int:
        """Tokens scored."""
        return len(self.losses)

    def likelihood(self, num_bytes: int) -> Likelihood:
        """Figures of the model alone; `num_bytes` are those of the scored tokens."""
        losses = np.array(self.losses)
        perplexity = self._exp(losses.mean())
        return Likelihood(
            perplexity=perplexity,
            perplexity_error=perplexity * _standard_error(losses),
            bits_per_byte=float(losses.sum()) / math.log(2) / num_bytes if num_bytes else 0.0,
        )

    def _exp(self, mean: float) -> float:
        if mean > _MAX_LOSS:
            raise BrokenScores(f"{self.name}: the mean negative log-likelihood of a token is {mean:.4g}: no number")
        return math.exp(mean)

    def distance(self, reference: "Scores") -> Distance:
        """Figures of the model beside the reference, which has scored the same tokens."""
        differences = np.array(self.losses) - np.array(reference.losses)
        divergences = np.array(self.divergences)
        ratio = self._exp(differences.mean())
        return Distance(
            perplexity_ratio=ratio,
            perplexity_ratio_error=ratio * _standard_error(differences),
            kl_mean=float(divergences.mean()),
            kl_p99=float(np.quantile(divergences, 0.99)),
            kl_max=float(divergences.max()),
            same_top_token=float(np.mean(self.agreements)),
        )


def _standard_error(values: np.ndarray) -> float:
    """Standard error of the mean; 0.0 for one value."""
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
