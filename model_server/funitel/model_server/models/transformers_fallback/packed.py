"""All rows of a step in one forward of a transformers model, without padding: attention keeps them apart.

For models with layers that see other tokens through `AttentionInterface` only.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.models.transformers_fallback.attention import PagedInterface
from funitel.model_server.models.transformers_fallback.dynamic_rope import DynamicRope
from funitel.model_server.models.transformers_fallback.pool import CacheLayout
from funitel.proto.errors import Unsuited

_PROBE_TOKENS = 3
_WINDOWED = "sliding_attention"  # as configurations call layers
_KINDS = {"full_attention", _WINDOWED}


class PackedModel:
    """A transformers model as a `Forward` with its attention over our blocks.

    Rows that `rope` says do not turn alike have forwards of their own.

    Raises:
        Unsuited: the model cannot be computed like this.
    """

    name = "packed"

    def __init__(self, model: Any, block_size: int, device: torch.device, rope: DynamicRope) -> None:
        self._model = model
        self._block_size = block_size
        self._device = device
        self._rope = rope
        self._interface = PagedInterface(block_size, device)
        if not model.is_backend_compatible():
            raise Unsuited("its code does not use AttentionInterface")
        former = model.config._attn_implementation
        with ExitStack() as undo:
            undo.callback(model.set_attn_implementation, former)
            model.set_attn_implementation(self._interface.name)
            self.kept = self._probe()
            undo.pop_all()
        self.takes_chunks = self.shares_prefixes = not rope.is_by_length

    def _probe(self) -> CacheLayout:
        positions = torch.arange(_PROBE_TOKENS, device=self._device)[None]
        with self._interface.recorded():
            self._model(input_ids=positions, position_ids=positions, use_cache=False)
        if not self._interface.sizes:
            raise Unsuited("its code does not use AttentionInterface")
        self._check_kinds(self._model.config.get_text_config(decoder=True))
        return CacheLayout(tuple(self._interface.sizes))

    def _check_kinds(self, config: Any) -> None:
        """Raise Unsuited where the configuration has layers of which the attention function was told nothing."""
        kinds = list(getattr(config, "layer_types", None) or ())
        unknown = sorted(set(kinds) - _KINDS)
        if unknown or getattr(config, "attention_chunk_size", None):
            raise Unsuited(f"it has layers of the kind {(*unknown, 'chunked_attention')[0]}")
        most = kinds.count(_WINDOWED) if kinds else bool(getattr(config, "sliding_window", None))
        if self._interface.num_windows < most:
            raise Unsuited("its code does not say which layers have a window")

    def __call__(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor | None:
        """See Forward."""
        pieces = self._pieces(batch)
        if len(pieces) == 1:
            return self._forward(batch, cache)
        logits: list[torch.Tensor] = []
        for piece in pieces:
            part = ForwardBatch.build([batch.rows[i] for i in piece], self._block_size, self._device)
            found = self._forward(part, cache)
            if found is not None:
                logits.append(found)
        if not logits:
            return None
        places = places_of(batch)
        order = np.argsort(np.concatenate([places[i] for piece in pieces for i in piece]))
        return torch.cat(logits)[torch.from_numpy(order).to(self._device)]

    def _pieces(self, batch: ForwardBatch) -> Sequence[Sequence[int]]:
        pieces: dict[int, list[int]] = {}
        for i, row in enumerate(batch.rows):
            pieces.setdefault(self._rope.kind(row.end), []).append(i)
        return list(pieces.values())

    def _forward(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor | None:
        self._rope.forget()
        with self._interface.over(batch, cache):
            output = self._model(
                input_ids=batch.input_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=batch.logit_indices,
            )
        logits: torch.Tensor = output.logits[0]
        return logits.float() if batch.logit_indices.numel() else None


def places_of(batch: ForwardBatch) -> list[np.ndarray]:
    """For each row, which of the batch's logits are its own."""
    ends = np.cumsum([len(row.tokens) for row in batch.rows])
    owners = np.searchsorted(ends, batch.logit_indices.cpu().numpy(), side="right")
    return [np.flatnonzero(owners == i) for i in range(len(batch.rows))]
