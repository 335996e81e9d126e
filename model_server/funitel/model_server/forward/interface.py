"""The interface of a model's forward, and of one that records its decoding steps as CUDA graphs."""

from typing import Protocol, runtime_checkable

import torch

from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.kv_cache.pool import KVCache


class Forward(Protocol):
    """One forward of this rank's share of a model; all ranks call it with the same batch."""

    def __call__(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor | None:
        """Run one forward; logits [len(batch.logit_indices), vocab_size] float32 on rank 0, None elsewhere."""


@runtime_checkable
class RecordingForward(Forward, Protocol):
    """A forward that keeps a recording of its decoding steps, one for each of some numbers of rows."""

    @property
    def num_recordings(self) -> int:
        """How many there will be at most."""

    def record_largest(self, cache: KVCache) -> None:
        """Record the step of most rows over this cache; recordings over another are dropped."""

    def forget_recordings(self) -> None:
        """Let go of all recordings, and of the memory they use."""
