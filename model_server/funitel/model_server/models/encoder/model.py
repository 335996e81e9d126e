"""One encoder for every spec: tokens of a packed batch to their hidden states."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.models.encoder.layers import Dense, DistanceBias, LayerNorm, Linear, attend, read_linear
from funitel.model_server.models.encoder.packed import Packed
from funitel.model_server.spec.encoder import EncoderSpec


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer of the checkpoint: attention and a multilayer perceptron, each added to its input and normed."""

    qkv: Linear
    out: Linear
    attention_norm: LayerNorm
    up: Linear
    down: Linear
    mlp_norm: LayerNorm


def read_layer(spec: EncoderSpec, weights: Weights, number: int) -> LayerWeights:
    """Read one layer."""
    size, inner, names = spec.hidden_size, spec.intermediate_size, spec.names

    def name(template: str) -> str:
        return weights.prefix + template.format(i=number)

    parts = [read_linear(weights, name(template), size, size) for template in (names.q, names.k, names.v)]
    return LayerWeights(
        qkv=(torch.cat([weight for weight, _ in parts]), torch.cat([bias for _, bias in parts])),
        out=read_linear(weights, name(names.out), size, size),
        attention_norm=LayerNorm(weights, name(names.attention_norm), size, spec.norm_eps),
        up=read_linear(weights, name(names.up), inner, size),
        down=read_linear(weights, name(names.down), size, inner),
        mlp_norm=LayerNorm(weights, name(names.mlp_norm), size, spec.norm_eps),
    )


class Layers(Protocol):
    """All layers of an encoder, which are given their weights in order."""

    def take(self, weights: LayerWeights) -> None:
        """Add a layer."""

    def __call__(self, x: torch.Tensor, packed: Packed, bias: DistanceBias | None) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] behind the last layer; those given may be lost."""


class TorchLayers:
    """Layers in torch."""

    def __init__(self, spec: EncoderSpec) -> None:
        self._spec = spec
        self._layers: list[EncoderLayer] = []

    def take(self, weights: LayerWeights) -> None:
        """See Layers."""
        self._layers.append(EncoderLayer(self._spec, weights))

    def __call__(self, x: torch.Tensor, packed: Packed, bias: DistanceBias | None) -> torch.Tensor:
        """See Layers."""
        for layer in self._layers:
            x = layer(x, packed, bias)
        return x


class EncoderLayer:
    """One layer in torch."""

    def __init__(self, spec: EncoderSpec, weights: LayerWeights) -> None:
        self.qkv, self.out = Dense(*weights.qkv), Dense(*weights.out)
        self.up, self.down = Dense(*weights.up, spec.activation), Dense(*weights.down)
        self.attention_norm, self.mlp_norm = weights.attention_norm, weights.mlp_norm
        self.num_heads = spec.num_heads

    def __call__(self, x: torch.Tensor, packed: Packed, bias: DistanceBias | None) -> torch.Tensor:
        x = self.attention_norm(self.out.plus(attend(self.qkv(x), packed, self.num_heads, bias), x))
        return self.mlp_norm(self.down.plus(self.up(x), x))


class Encoder:
    """Embeddings and layers; [num_tokens] -> [num_tokens, hidden_size]."""

    def __init__(self, spec: EncoderSpec, weights: Weights, layers: Layers) -> None:
        size, prefix = spec.hidden_size, weights.prefix
        self.spec = spec
        self.tokens = weights.read(f"{prefix}embeddings.word_embeddings.weight", [spec.vocab_size, size])
        self.places = weights.read(
            f"{prefix}embeddings.position_embeddings.weight", [spec.max_position_embeddings, size]
        )
        self.types = None
        if spec.num_types:
            self.types = weights.read(f"{prefix}embeddings.token_type_embeddings.weight", [spec.num_types, size])
        self.norm = LayerNorm(weights, prefix + spec.names.embedding_norm, size, spec.norm_eps)
        self.bias = None
        if spec.num_buckets:
            name = f"{prefix}encoder.relative_attention_bias"
            self.bias = DistanceBias(weights, name, spec.num_buckets, spec.num_heads, spec.max_tokens)
        self.layers = layers
        for number in range(spec.num_layers):
            layers.take(read_layer(spec, weights, number))

    def __call__(self, packed: Packed) -> torch.Tensor:
        x = F.embedding(packed.input_ids, self.tokens)
        if self.types is not None:
            x = x + F.embedding(packed.type_ids, self.types)
        x = self.norm(x + F.embedding(self._places(packed), self.places))
        return self.layers(x, packed, self.bias)

    def _places(self, packed: Packed) -> torch.Tensor:
        """Where each token stands, as the family counts it: some leave padding out and begin behind its id."""
        padding = self.spec.padding_id
        if padding is None:
            return packed.positions
        is_text = packed.input_ids != padding
        seen = is_text.cumsum(0)
        before = F.pad(seen, (1, 0))[packed.starts].repeat_interleave(packed.lengths)
        return (seen - before) * is_text + padding
