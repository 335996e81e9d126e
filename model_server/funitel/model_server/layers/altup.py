"""Several hidden states of a token, of which each layer computes one, and a residual of low rank beside attention.

Sources: AltUp, arXiv 2301.13310; LAuReL, arXiv 2411.07501; Gemma 3n in transformers. Every rank computes the same.
"""

import torch

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.layers.linear import Matmul, NormLayer
from funitel.model_server.spec.layer_spec import AltUpSpec
from funitel.model_server.spec.model_spec import ModelSpec

_MIN_SQUARE = 1e-5  # mean square of hidden states that are brought to the size of others, at least


class Streams:
    """From the hidden states [num_tokens, hidden_size] of the embedding to several of a token, and back.

    The first pipeline stage has the way there, the last one the way back.
    """

    def __init__(self, spec: ModelSpec, altup: AltUpSpec, weights: Weights) -> None:
        def matrices(template: str) -> list[Matmul]:
            stems = [weights.prefix + template.format(j=j) for j in range(altup.num_streams - 1)]
            return [Matmul(weights.read_linear(stem, spec.hidden_size, spec.hidden_size)) for stem in stems]

        self.into = matrices(spec.names.altup_in) if spec.is_first else []
        self.back = matrices(spec.names.altup_out) if spec.is_last else []

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """The streams [num_tokens, num_streams, hidden_size] of hidden states."""
        return torch.stack([x, *(_as_large(matrix(x), x) for matrix in self.into)], dim=1)

    def merge(self, streams: torch.Tensor) -> torch.Tensor:
        """Hidden states of streams."""
        x, *others = streams.unbind(1)
        found = [_as_large(matrix(other.contiguous()), x) for matrix, other in zip(self.back, others, strict=True)]
        return torch.stack([x, *found]).mean(dim=0)


def _as_large(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Hidden states with the root mean square of others."""
    size = x.square().mean(dim=-1, keepdim=True).clamp(min=_MIN_SQUARE).sqrt()
    return x * other.square().mean(dim=-1, keepdim=True).sqrt() / size


class AltUp:
    """Predicts all streams before a layer, and corrects them by what the layer made of its own."""

    def __init__(self, spec: ModelSpec, altup: AltUpSpec, weights: Weights, index: int) -> None:
        stem, count = weights.prefix + spec.names.altup.format(i=index), altup.num_streams
        self.active = altup.active
        self.router = Matmul(weights.read_linear(f"{stem}.modality_router", count, spec.hidden_size))
        self.router_norm = NormLayer(spec, weights, f"{stem}.router_norm", spec.hidden_size)
        self.prediction = Matmul(weights.read_linear(f"{stem}.prediction_coefs", count * count, count))
        self.correction = Matmul(weights.read_linear(f"{stem}.correction_coefs", count, count))
        self.output_scale = weights.read(f"{stem}.correct_output_scale", [spec.hidden_size])
        self.is_output_scaled = altup.is_output_scaled

    def predict(self, streams: torch.Tensor) -> torch.Tensor:
        """The streams [num_tokens, num_streams, hidden_size], each with a share of every other."""
        num_tokens, count, _ = streams.shape
        shares = self.prediction(self._routed(streams[:, self.active])).view(num_tokens, count, count, 1)
        return streams + sum(shares[:, :, j] * streams[:, j, None] for j in range(count))

    def correct(self, predicted: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """The predicted streams, each with a share of what the layer's result has beyond its prediction."""
        shares = self.correction(self._routed(result)) + 1.0
        return predicted + shares[..., None] * (result - predicted[:, self.active])[:, None]

    def output(self, streams: torch.Tensor) -> torch.Tensor:
        """What gates the embedding of the layer, [num_tokens, hidden_size]."""
        active = streams[:, self.active].contiguous()
        return active * self.output_scale if self.is_output_scaled else active

    def _routed(self, x: torch.Tensor) -> torch.Tensor:
        """Numbers [num_tokens, num_streams] within +-1 that the shares are made of."""
        routed = self.router(self.router_norm(x.contiguous()) / x.shape[-1])
        return torch.tanh(routed.float()).to(x.dtype)


class Laurel:
    """A residual that is learnt: what enters attention, and a product of low rank of it."""

    def __init__(self, spec: ModelSpec, rank: int, weights: Weights, index: int) -> None:
        def name(template: str) -> str:
            return weights.prefix + template.format(i=index)

        names, hidden = spec.names, spec.hidden_size
        self.left = Matmul(weights.read_linear(name(names.laurel_left), rank, hidden))
        self.right = Matmul(weights.read_linear(name(names.laurel_right), hidden, rank))
        self.norm = NormLayer(spec, weights, name(names.laurel_norm), hidden)

    def join(self, x: torch.Tensor, entered: torch.Tensor) -> torch.Tensor:
        """The residual `x` behind attention and what `entered` it, together."""
        return (x + entered + self.norm(self.right(self.left(entered)))) * 2**-0.5
