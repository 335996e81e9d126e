"""A model in parts within one process: layers after layers, each part on a device and in a precision of its own.

Every part is a pipeline stage by its spec: the first has the embedding, the last the final norm and the head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from funitel.model_server.forward.batch import Forward, ForwardBatch
from funitel.model_server.kv_cache.joined_pools import JoinedCache
from funitel.model_server.kv_cache.pool import KVCache


@dataclass(frozen=True, slots=True)
class JoinedPart:
    """Some layers of a model, and the device that computes them."""

    decoder: Forward
    device: torch.device


class JoinedForward:
    """The parts of a model as one forward; batches come and logits go in the host's memory."""

    def __init__(self, parts: Sequence[JoinedPart]) -> None:
        self.parts = tuple(parts)

    def __call__(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor | None:
        """See Forward; the parts take hidden states from one another."""
        assert isinstance(cache, JoinedCache)
        batches = {batch.input_ids.device: batch}
        logits: torch.Tensor | None = None
        for part, pool in zip(self.parts, cache.parts, strict=True):
            if part.device not in batches:
                batches[part.device] = batch.on(part.device)
            logits = part.decoder(batches[part.device], pool)
        return None if logits is None else logits.to(batch.input_ids.device)
