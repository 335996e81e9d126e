"""Paged attention: the interface of backends, which read keys and values through block tables.

`plan` runs once per step, `attend` once per layer.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.kv_cache.pool import KVCache


class AttentionBackend(Protocol):
    """How attention is computed; chosen once at start."""

    name: str

    def plan(self, batch: ForwardBatch) -> Any:
        """Prepare what every layer of a step shares."""

    def attend(self, query: torch.Tensor, cache: KVCache, layer: int, plan: Any, rule: "AttentionRule") -> torch.Tensor:
        """Attend queries [num_tokens, num_heads, head_dim] to the cache; back come as many heads of the values' size.

        Keys and values of the step's own tokens are already written.
        """


@runtime_checkable
class RecordableAttention(AttentionBackend, Protocol):
    """A backend with decoding steps that can be recorded as CUDA graphs."""

    block_size: int
    device: torch.device

    def plan_rows(self, contexts: torch.Tensor, tables: torch.Tensor) -> Any:
        """The plan of rows that all decode, in order, from tensors on the device; it holds when these are overwritten.

        Args:
            contexts: [num_rows] int32, tokens.
            tables: [num_rows, width] int32.
        """


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRule:
    """How the heads of one layer attend. The slopes are the same in all layers of a model."""

    scale: float  # of scores
    window: int | None = None  # in tokens, None for full
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    slopes: torch.Tensor | None = None  # [num_heads]: scores grow by slope * (key's position - query's position)
    sinks: torch.Tensor | None = None  # [num_heads]: the score of one key more, which has no value
    chunk: int | None = None  # tokens attend within chunks of so many; None: everywhere
    sees_spans: bool = False  # tokens of a span of `ForwardBatch.visible_ends` see those behind them in it
