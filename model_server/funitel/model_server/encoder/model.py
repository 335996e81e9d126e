"""One encoder for every spec: tokens of a packed batch to their hidden states."""

import torch
import torch.nn.functional as F

from funitel.model_server.encoder.layers import Dense, DistanceBias, Norm, attend, read_dense
from funitel.model_server.encoder.packed import Packed
from funitel.model_server.encoder.spec import EncoderSpec
from funitel.model_server.weights import Weights


class Layer:
    """Attention and a multilayer perceptron, each added to its input and normed."""

    def __init__(self, spec: EncoderSpec, weights: Weights, number: int) -> None:
        size, inner, names = spec.hidden_size, spec.intermediate_size, spec.names

        def name(template: str) -> str:
            return weights.prefix + template.format(i=number)

        parts = [name(template) for template in (names.q, names.k, names.v)]
        self.qkv = Dense(
            torch.cat([weights.read(f"{part}.weight", [size, size]) for part in parts]),
            torch.cat([weights.read(f"{part}.bias", [size]) for part in parts]),
        )
        self.out = read_dense(weights, name(names.out), size, size)
        self.attention_norm = Norm(weights, name(names.attention_norm), size, spec.norm_eps)
        self.up = read_dense(weights, name(names.up), inner, size, spec.activation)
        self.down = read_dense(weights, name(names.down), size, inner)
        self.mlp_norm = Norm(weights, name(names.mlp_norm), size, spec.norm_eps)
        self.num_heads = spec.num_heads

    def __call__(self, x: torch.Tensor, packed: Packed, bias: DistanceBias | None) -> torch.Tensor:
        x = self.attention_norm(self.out.plus(attend(self.qkv(x), packed, self.num_heads, bias), x))
        return self.mlp_norm(self.down.plus(self.up(x), x))


class Encoder:
    """Embeddings and layers; [num_tokens] -> [num_tokens, hidden_size]."""

    def __init__(self, spec: EncoderSpec, weights: Weights) -> None:
        size, prefix = spec.hidden_size, weights.prefix
        self.spec = spec
        self.tokens = weights.read(f"{prefix}embeddings.word_embeddings.weight", [spec.vocab_size, size])
        self.places = weights.read(
            f"{prefix}embeddings.position_embeddings.weight", [spec.max_position_embeddings, size]
        )
        self.types = None
        if spec.num_types:
            self.types = weights.read(f"{prefix}embeddings.token_type_embeddings.weight", [spec.num_types, size])
        self.norm = Norm(weights, prefix + spec.names.embedding_norm, size, spec.norm_eps)
        self.bias = None
        if spec.num_buckets:
            name = f"{prefix}encoder.relative_attention_bias"
            self.bias = DistanceBias(weights, name, spec.num_buckets, spec.num_heads, spec.max_tokens)
        self.layers = [Layer(spec, weights, number) for number in range(spec.num_layers)]

    def __call__(self, packed: Packed) -> torch.Tensor:
        x = F.embedding(packed.input_ids, self.tokens)
        if self.types is not None:
            x = x + F.embedding(packed.type_ids, self.types)
        x = self.norm(x + F.embedding(self._places(packed), self.places))
        for layer in self.layers:
            x = layer(x, packed, self.bias)
        return x

    def _places(self, packed: Packed) -> torch.Tensor:
        """Where each token stands, as the family counts it: some leave padding out and begin behind its id."""
        padding = self.spec.padding_id
        if padding is None:
            return packed.positions
        is_text = packed.input_ids != padding
        seen = is_text.cumsum(0)
        before = F.pad(seen, (1, 0))[packed.starts].repeat_interleave(packed.lengths)
        return (seen - before) * is_text + padding
