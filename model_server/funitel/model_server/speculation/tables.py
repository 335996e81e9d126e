"""What is around the layers of a target, as drafters use it: embedding table, final norm and head."""

import copy
from dataclasses import dataclass

import torch

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.forward.batch import Forward
from funitel.model_server.layers.linear import NormLayer, VocabEmbedding, VocabHead
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.spec.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class VocabTables:
    """Tokens -> embeddings; hidden states -> those behind the final norm -> logits."""

    embedding: VocabEmbedding
    final_norm: NormLayer | None
    head: VocabHead
    scale: float  # of embeddings

    @classmethod
    def of(cls, spec: ModelSpec, target: Forward | None, weights: Weights, parallel: TensorParallel) -> "VocabTables":
        """The target's own where it is a torch decoder, else read from `weights`, its checkpoint.

        They are those of the base: adapters of the target's rows do not act on what drafters compute.
        """
        if isinstance(target, Decoder):
            embedding, head = copy.copy(target.token_embedding.embedding), copy.copy(target.head)
            assert embedding is not None and head is not None, "a pipeline stage makes no drafts"  # noqa: PT018
            embedding.delta = head.delta = None
            return cls(embedding, target.final_norm, head, spec.embedding_scale)
        names, prefix = spec.names, weights.prefix
        embedding = VocabEmbedding(spec, weights, prefix + names.embedding, parallel)
        norm = NormLayer(spec, weights, prefix + names.final_norm, spec.hidden_size) if names.final_norm else None
        return cls(embedding, norm, VocabHead(spec, weights, names.head, embedding, parallel), spec.embedding_scale)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [num_tokens, hidden_size]."""
        x = self.embedding(ids)
        return x if self.scale == 1.0 else x * self.scale

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Outputs of the last layer behind the final norm."""
        return hidden if self.final_norm is None else self.final_norm(hidden)


def likeliest(
    logits: torch.Tensor | None, num_rows: int, parallel: TensorParallel, device: torch.device
) -> torch.Tensor:
    """The likeliest token of each row, [num_rows] int64 on every rank; `logits` are on rank 0."""
    chosen = torch.zeros(num_rows, dtype=torch.int64, device=device) if logits is None else logits.argmax(dim=-1)
    return parallel.broadcast(chosen)
