"""The embedding table and head of a target, as the layer of a drafter uses them: shared where torch computes both."""

from dataclasses import dataclass

import torch

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.forward.batch import Forward
from funitel.model_server.layers.linear import VocabEmbedding, VocabHead
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.spec.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class VocabTables:
    """Tokens -> embeddings, and hidden states behind the final norm -> logits."""

    embedding: VocabEmbedding
    head: VocabHead
    scale: float  # of embeddings

    @classmethod
    def of(cls, spec: ModelSpec, target: Forward, weights: Weights, parallel: TensorParallel) -> "VocabTables":
        """The target's own where it is a torch decoder, else read from `weights`, its checkpoint."""
        if isinstance(target, Decoder):
            return cls(target.token_embedding.embedding, target.head, spec.embedding_scale)
        embedding = VocabEmbedding(spec, weights, weights.prefix + spec.names.embedding, parallel)
        head = VocabHead(spec, weights, spec.names.head, embedding, parallel)
        return cls(embedding, head, spec.embedding_scale)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [num_tokens, hidden_size]."""
        x = self.embedding(ids)
        return x if self.scale == 1.0 else x * self.scale


def likeliest(
    logits: torch.Tensor | None, num_rows: int, parallel: TensorParallel, device: torch.device
) -> torch.Tensor:
    """The likeliest token of each row, [num_rows] int64 on every rank; `logits` are on rank 0."""
    chosen = torch.zeros(num_rows, dtype=torch.int64, device=device) if logits is None else logits.argmax(dim=-1)
    return parallel.broadcast(chosen)
