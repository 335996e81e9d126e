"""Attention of a transformers model over our blocks, through its `AttentionInterface`.

The model hands over queries, keys and values that are rotated already, [1, heads, tokens, dim] of all rows of a step
back to back; keys and values go to their blocks, queries attend to those of their own sequence.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from transformers import AttentionInterface

from funitel.model_server.attention.backend import AttentionRule
from funitel.model_server.attention.torch_reference import TorchAttention, TorchPlan
from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.models.transformers_fallback.pool import AttentionSize
from funitel.proto.errors import Unsuited

_numbers = count()  # every model has a name of its own in the interface, for several may be in one process


@dataclass(frozen=True, slots=True)
class _Step:
    batch: ForwardBatch
    cache: KVCache
    plan: TorchPlan


class PagedInterface:
    """The attention function of one model. Each attention module has its layer in the pool, known once `recorded`."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self.name = f"funitel-{next(_numbers)}"
        self.sizes: list[AttentionSize] = []
        self.num_windows = 0  # layers that look back so far only
        self._backend = TorchAttention(block_size, device)
        self._layers: dict[torch.nn.Module, int] = {}
        self._step: _Step | None = None
        self._is_recording = False
        AttentionInterface.register(self.name, self._attend)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Note which attention modules a forward calls, and what they keep. Nothing is attended to."""
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    @contextmanager
    def over(self, batch: ForwardBatch, cache: KVCache) -> Iterator[None]:
        """Attend to the blocks of a step's rows."""
        self._step = _Step(batch, cache, self._backend.plan(batch))
        try:
            yield
        finally:
            self._step = None

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """What a model calls: attended [1, tokens, heads, value_dim], and no weights."""
        if self._is_recording:
            self._record(module, key, value, attention_mask, others)
            self.num_windows += bool(sliding_window)
            return value.new_zeros(*query.shape[:3], value.shape[3]).transpose(1, 2), None
        assert self._step is not None
        batch, cache = self._step.batch, self._step.cache
        layer = self._layers[module]
        cache.write(layer, batch.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        rule = AttentionRule(
            scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
            window=sliding_window or None,
            softcap=softcap or None,
            sinks=s_aux,
        )
        queries = query[0].transpose(0, 1).contiguous()
        return self._backend.attend(queries, cache, layer, self._step.plan, rule)[None], None

    def _record(
        self,
        module: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        others: Mapping[str, Any],
    ) -> None:
        if module in self._layers:
            raise Unsuited("one attention module serves several layers")
        if attention_mask is not None:
            raise Unsuited("its layers attend by a mask of their own")
        if others.get("position_bias") is not None:
            raise Unsuited("its layers add a bias of positions to scores")
        if not (others.get("is_causal", True) and getattr(module, "is_causal", True)):
            raise Unsuited("its layers look ahead")
        self._layers[module] = len(self.sizes)
        self.sizes.append(AttentionSize(key.shape[1], key.shape[3], value.shape[3]))
