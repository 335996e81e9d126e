"""flash-attn behind `AttentionBackend`, where it is installed: its second version, or its third on Hopper.

Both read keys and values through block tables. Sources: https://github.com/Dao-AILab/flash-attention,
flash_attn/flash_attn_interface.py and hopper/flash_attn_interface.py.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from funitel.model_server.attention.backend import AttentionRule
from funitel.model_server.forward.batch import ForwardBatch, block_tables
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.spec.model_spec import ModelSpec, Position, WholeSpans

MAX_HEAD_DIM = 256
PAGE = 256  # tokens: blocks of flash-attn 2 are multiples of it; its third version takes any


@dataclass(frozen=True, slots=True)
class FlashPlan:
    """The rows of one step, in order; tensors int32 on the device, numbers bounds of what they hold."""

    query_starts: torch.Tensor  # [num_rows + 1]: where each row's queries begin, and where the last's end
    contexts: torch.Tensor  # [num_rows]
    tables: torch.Tensor  # [num_rows, width]
    longest: int  # tokens of a row
    longest_context: int


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, FlashPlan, AttentionRule], torch.Tensor]


class FlashAttention:
    """One call a layer over all rows of a step."""

    def __init__(self, name: str, kernel: Kernel, block_size: int, device: torch.device) -> None:
        self.name = name
        self.block_size = block_size
        self.device = device
        self._kernel = kernel

    def plan(self, batch: ForwardBatch) -> FlashPlan:
        """See AttentionBackend."""
        lengths = [len(row.tokens) for row in batch.rows]
        contexts = [row.end for row in batch.rows]
        return FlashPlan(
            query_starts=self._upload(np.cumsum([0, *lengths])),
            contexts=self._upload(np.array(contexts)),
            tables=self._upload(block_tables(batch.rows, self.block_size)),
            longest=max(lengths),
            longest_context=max(contexts),
        )

    def plan_rows(self, contexts: torch.Tensor, tables: torch.Tensor) -> FlashPlan:
        """See RecordableAttention."""
        num_rows, width = tables.shape
        starts = torch.arange(num_rows + 1, dtype=torch.int32, device=self.device)
        return FlashPlan(starts, contexts, tables, longest=1, longest_context=width * self.block_size)

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        there = torch.from_numpy(array.astype(np.int32))
        return (there.pin_memory() if self.device.type == "cuda" else there).to(self.device, non_blocking=True)

    def attend(
        self, query: torch.Tensor, cache: KVCache, layer: int, plan: FlashPlan, rule: AttentionRule
    ) -> torch.Tensor:
        """See AttentionBackend."""
        assert rule.sinks is None, "flash-attn has no sinks"
        assert rule.chunk is None, "flash-attn has no chunks"
        assert not rule.sees_spans, "flash-attn has no spans seen whole"
        return self._kernel(query, cache.keys[layer], cache.values[layer], plan, rule)


def flash_2(spec: ModelSpec, block_size: int, device: torch.device, dtype: torch.dtype) -> FlashAttention:
    """flash-attn's second version.

    Raises:
        ImportError: it is not installed.
        ValueError: it cannot do what the model needs.
    """
    module = importlib.import_module("flash_attn")
    _check(spec, dtype)
    if block_size % PAGE:
        raise ValueError(f"--block-size must be a multiple of {PAGE} for it, given {block_size}")

    def kernel(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: FlashPlan, rule: AttentionRule
    ) -> torch.Tensor:
        key_starts = F.pad(plan.contexts.cumsum(0, dtype=torch.int32), (1, 0))  # of blocks only their differences count
        out: torch.Tensor = module.flash_attn_varlen_func(
            query,
            keys,
            values,
            plan.query_starts,
            key_starts,
            plan.longest,
            plan.longest_context,
            softmax_scale=rule.scale,
            causal=True,
            window_size=_window(rule),
            softcap=rule.softcap or 0.0,
            alibi_slopes=None if rule.slopes is None else rule.slopes.float(),
            block_table=plan.tables,
        )
        return out

    return FlashAttention("flash-attn 2", kernel, block_size, device)


def flash_3(spec: ModelSpec, block_size: int, device: torch.device, dtype: torch.dtype) -> FlashAttention:
    """flash-attn's third version, for Hopper.

    Raises:
        ImportError: it is not installed.
        ValueError: it cannot do what the model needs.
    """
    module: Any = importlib.import_module("flash_attn_interface")
    _check(spec, dtype)
    if spec.position is Position.ALIBI:
        raise ValueError("it has no slopes (ALiBi)")

    def kernel(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: FlashPlan, rule: AttentionRule
    ) -> torch.Tensor:
        out: torch.Tensor = module.flash_attn_with_kvcache(
            query,
            keys,
            values,
            cache_seqlens=plan.contexts,
            page_table=plan.tables,
            cu_seqlens_q=plan.query_starts,
            max_seqlen_q=plan.longest,
            softmax_scale=rule.scale,
            causal=True,
            window_size=_window(rule),
            softcap=rule.softcap or 0.0,
        )
        return out

    return FlashAttention("flash-attn 3", kernel, block_size, device)


def _window(rule: AttentionRule) -> tuple[int, int]:
    """Tokens seen to the left and to the right of a query; -1 for all."""
    return (-1, -1) if rule.window is None else (rule.window - 1, 0)


def _check(spec: ModelSpec, dtype: torch.dtype) -> None:
    """Raise ValueError for what neither version can do."""
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"it takes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}")
    if spec.latent is not None:
        raise ValueError("it does not attend to latents")
    if spec.whole_spans is not WholeSpans.NONE:
        raise ValueError("it does not let tokens of an image see those behind them")
    if spec.has_sinks or any(spec.chunk_sizes):
        raise ValueError("it has no sinks" if spec.has_sinks else "it does not attend within chunks")
    if spec.cached_dim > MAX_HEAD_DIM or spec.cached_dim % 8:
        raise ValueError(f"heads of {spec.cached_dim} elements, multiples of 8 up to {MAX_HEAD_DIM} are supported")
