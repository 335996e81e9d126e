"""flash-attn's two interfaces as documented, computed row by row in torch, for tests without a GPU."""

from types import ModuleType
from typing import Any

import torch


def fake_flash_2() -> ModuleType:
    """`flash_attn`, as far as it is used: blocks are of multiples of 256 tokens."""

    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert block_table is not None
        assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        contexts = cu_seqlens_k.diff()
        assert int(contexts.max()) <= max_seqlen_k
        assert alibi_slopes is None or alibi_slopes.dtype is torch.float32
        _check(q, k, cu_seqlens_q, cu_seqlens_k, block_table, max_seqlen_q)
        assert causal
        assert softmax_scale is not None
        return _attend(q, k, v, cu_seqlens_q, contexts, block_table, softmax_scale, window_size, softcap, alibi_slopes)

    return _module("flash_attn", flash_attn_varlen_func)


def fake_flash_3() -> ModuleType:
    """`flash_attn_interface`, as far as it is used."""

    def flash_attn_with_kvcache(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        cache_seqlens: torch.Tensor,
        page_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
        softmax_scale: float,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
    ) -> torch.Tensor:
        _check(q, k_cache, cu_seqlens_q, cache_seqlens, page_table, max_seqlen_q)
        assert causal
        return _attend(
            q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, window_size, softcap, None
        )

    return _module("flash_attn_interface", flash_attn_with_kvcache)


def _module(name: str, function: Any) -> ModuleType:
    module = ModuleType(name)
    setattr(module, function.__name__, function)
    return module


def _check(q: torch.Tensor, k: torch.Tensor, starts: torch.Tensor, *others: Any) -> None:
    tables, longest = others[-2:]
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert k.dtype is q.dtype
    assert k.stride(-1) == 1
    assert all(each.dtype is torch.int32 for each in (starts, *others[:-1]))
    assert int(starts.diff().max()) <= longest
    assert tables.stride(-1) == 1
    assert int(starts[-1]) == len(q)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    contexts: torch.Tensor,
    tables: torch.Tensor,
    scale: float,
    window: tuple[int, int],
    softcap: float,
    slopes: torch.Tensor | None,
) -> torch.Tensor:
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[2]
    for row, context in enumerate(contexts.tolist()):
        begin, end = int(starts[row]), int(starts[row + 1])
        blocks = tables[row].long()
        keys, values = (each[blocks].flatten(0, 1)[:context].float().repeat_interleave(group, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), keys) * scale
        if softcap > 0.0:
            scores = softcap * torch.tanh(scores / softcap)
        own = torch.arange(context - (end - begin), context)[:, None]
        seen = torch.arange(context)
        if slopes is not None:
            scores = scores - slopes[:, None, None] * (own - seen).abs()
        is_hidden = seen > own
        if window[0] >= 0:
            is_hidden |= seen < own - window[0]
        weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out
