"""From the hidden states of a packed batch to what is asked for: a vector, scores of classes, tokens behind a mask."""

from collections.abc import Callable

import torch

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.models.encoder.layers import Dense, LayerNorm, read_dense
from funitel.model_server.models.encoder.packed import Packed
from funitel.model_server.spec.encoder import EncoderSpec

Pool = Callable[[torch.Tensor, Packed], torch.Tensor]  # [num_tokens, size] -> [texts, size], by place in the batch


def _first(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    return x[packed.starts]


def _last(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    return x[packed.starts + packed.lengths - 1]


def _by_group(x: torch.Tensor, packed: Packed, reduce: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Reduce the tokens of each text; `reduce` takes [texts, length, size]."""
    parts = [
        reduce(x[group.start : group.start + group.num_tokens].view(group.count, group.length, -1))
        for group in packed.groups
    ]
    return torch.cat(parts)


def _sum(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    return _by_group(x, packed, lambda tokens: tokens.sum(1))


def _mean(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    return _sum(x, packed) / packed.lengths[:, None]


def _mean_by_root(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    return _sum(x, packed) / packed.lengths[:, None].sqrt()


def _max(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    return _by_group(x, packed, lambda tokens: tokens.amax(1))


def _weighted_mean(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    weights = (packed.positions + 1).to(x.dtype)
    totals = packed.lengths * (packed.lengths + 1) / 2
    return _sum(x * weights[:, None], packed) / totals[:, None]


POOLS: dict[str, Pool] = {
    "cls": _first,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_by_root,
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}
"""By sentence-transformers' names; where several are asked for, the vectors are laid end to end."""


class EmbeddingHead:
    """Pool the tokens of each text, in float32, and pass the result through dense layers."""

    def __init__(self, pools: tuple[str, ...], layers: list[Dense], width: int) -> None:
        self.pools = pools
        self.layers = layers
        self.width = width

    def __call__(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        pooled = torch.cat([POOLS[name](x.float(), packed) for name in self.pools], dim=1)
        for layer in self.layers:
            pooled = layer(pooled)
        return pooled


class ClassifierHead:
    """Scores of every class from the first token: [texts, labels]."""

    def __init__(self, spec: EncoderSpec, weights: Weights) -> None:
        names, size = spec.classifier, spec.hidden_size
        dense = (weights.prefix if names.has_base_dense else "") + names.dense
        self.dense = read_dense(weights, dense, size, size, spec.classifier_activation)
        self.output = read_dense(weights, names.output, len(spec.labels), size)

    def __call__(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        return self.output(self.dense(_first(x, packed))).float()


class FillHead:
    """The likeliest tokens in place of a token."""

    def __init__(self, spec: EncoderSpec, weights: Weights, embedding: torch.Tensor) -> None:
        names, size = spec.filler, spec.hidden_size
        assert names.norm is not None
        self.dense = read_dense(weights, names.dense, size, size, spec.filler_activation)
        self.norm = LayerNorm(weights, names.norm, size, spec.norm_eps)
        shape = [spec.vocab_size, size]
        own = f"{names.output}.weight"
        matrix = weights.read(own, shape) if weights.has(own) else embedding
        biases = [name for name in (f"{names.output}.bias", names.output_bias) if name and weights.has(name)]
        bias = weights.read(biases[0], [spec.vocab_size]) if biases else None
        self.output = Dense(matrix, bias)

    @staticmethod
    def is_in(spec: EncoderSpec, weights: Weights) -> bool:
        """Whether the checkpoint holds the head: one saved from a bare encoder does not."""
        return spec.is_filler and weights.has(f"{spec.filler.dense}.weight")

    def __call__(self, x: torch.Tensor, rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities and ids of the `count` likeliest tokens at rows of x: [rows, count] each, likeliest first."""
        scores = self.output(self.norm(self.dense(x[rows]))).float().softmax(-1)
        best = scores.topk(count, dim=-1)
        return best.values, best.indices
