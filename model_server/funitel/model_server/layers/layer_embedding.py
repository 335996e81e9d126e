"""An embedding of the token for each layer, and its way into the hidden states. Source: Gemma 3n in transformers."""

from dataclasses import replace

import torch

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.layers.linear import ACTIVATIONS, Matmul, NormLayer, VocabEmbedding
from funitel.model_server.spec.layer_spec import LayerEmbeddingSpec
from funitel.model_server.spec.model_spec import ModelSpec


class LayerEmbeddings:
    """Tokens and the hidden states that enter the first layer -> what each layer has of them, for all layers at once.

    The table is split by vocabulary.
    """

    def __init__(
        self, spec: ModelSpec, embeddings: LayerEmbeddingSpec, weights: Weights, parallel: TensorParallel
    ) -> None:
        names, prefix = spec.names, weights.prefix
        width = spec.num_layers * embeddings.size
        self.shape = spec.num_layers, embeddings.size
        self.vocab_size = embeddings.vocab_size
        table = replace(spec, vocab_size=embeddings.vocab_size, embedding_size=width)
        self.embedding = VocabEmbedding(table, weights, prefix + names.layer_embedding, parallel)
        self.projection = Matmul(weights.read_linear(prefix + names.layer_projection, width, spec.hidden_size))
        self.norm = NormLayer(spec, weights, prefix + names.layer_projection_norm, embeddings.size)
        self.embedding_scale, self.projection_scale = embeddings.size**0.5, spec.hidden_size**-0.5

    def __call__(self, input_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """From [num_tokens, hidden_size] to [num_tokens, num_layers, size]."""
        known = input_ids.masked_fill(input_ids >= self.vocab_size, 0)
        embedded = self.embedding(known).view(-1, *self.shape) * self.embedding_scale
        projected = self.norm((self.projection(x) * self.projection_scale).view(-1, *self.shape))
        joined: torch.Tensor = (projected + embedded) * 2**-0.5
        return joined


class EmbeddingGate:
    """What a layer's embedding adds to the hidden states, gated by them. Every rank computes the same."""

    def __init__(self, spec: ModelSpec, embeddings: LayerEmbeddingSpec, weights: Weights, index: int) -> None:
        def name(template: str) -> str:
            return weights.prefix + template.format(i=index)

        names, hidden, size = spec.names, spec.hidden_size, embeddings.size
        self.activation = ACTIVATIONS[spec.activation]
        self.gate = Matmul(weights.read_linear(name(names.layer_embedding_gate), size, hidden))
        self.out = Matmul(weights.read_linear(name(names.layer_embedding_out), hidden, size))
        self.norm = NormLayer(spec, weights, name(names.layer_embedding_norm), hidden)

    def __call__(self, x: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Of hidden states [num_tokens, hidden_size] and the layer's embeddings [num_tokens, size]."""
        added: torch.Tensor = self.norm(self.out(self.activation(self.gate(x)) * embedded))
        return added
