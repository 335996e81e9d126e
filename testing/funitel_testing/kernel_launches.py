"""Every Triton kernel, launched by name as serving launches it: what `compiled_kernels` compiles.

The tensors are on the CPU and their values mean nothing, as nothing is run. A new kernel, or a new way to compile one,
gets its row here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from funitel.model_server.gpu.attention import most_queries
from funitel.model_server.gpu.paged_attention import Tiles, attend

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A call that launches kernels."""

    call: Callable[[], object]
    kernels: tuple[str, ...]  # that it launches
    archs: tuple[int, ...] = (80, 90)
    is_quick: bool = False  # compiled by default
    spilled_bytes: int = 0  # of a thread, at most: what is known of, and little beside what the kernel does


def _attention(
    head_dim: int,
    dtype: torch.dtype = BFLOAT16,
    *,
    is_decode: bool = False,
    num_parts: int = 1,
    group: int = 4,
    cached: torch.dtype | None = None,
    has_slopes: bool = False,
    has_sinks: bool = False,
    **rule: Any,
) -> None:
    num_kv_heads, block_size = 2, 16
    num_heads = num_kv_heads * group
    pool = torch.zeros(2, 2, block_size, num_kv_heads, head_dim, dtype=cached or dtype)
    query = torch.zeros(64, num_heads, head_dim, dtype=dtype)
    tokens = 1 if is_decode else most_queries(head_dim, dtype) // group
    numbers = torch.zeros(8, dtype=torch.int32)
    tiles = Tiles(tokens, num_parts, *[numbers] * 5, torch.zeros(8, 8, dtype=torch.int32))
    slopes = torch.zeros(num_heads) if has_slopes else None
    sinks = torch.zeros(num_heads, dtype=dtype) if has_sinks else None
    attend(query, pool[:, 0], pool[:, 1], torch.empty_like(query), tiles, scale=0.1, slopes=slopes, sinks=sinks, **rule)


def _attention_launches() -> dict[str, Launch]:
    """Chunks and rows that decode, with whole and with cut keys, for every head size; then every rule."""
    whole, cut = ("_attend_tile",), ("_attend_tile", "_merge_parts")
    launches = {}
    for dim in (64, 96, 128, 256):
        for dtype in (BFLOAT16, FLOAT16, FLOAT32):
            name = f"{dim}-{str(dtype).removeprefix('torch.')}"
            launches |= {
                f"chunk-{name}": Launch(call=partial(_attention, dim, dtype), kernels=whole),
                f"decode-{name}": Launch(call=partial(_attention, dim, dtype, is_decode=True), kernels=whole),
                f"split-{name}": Launch(
                    call=partial(_attention, dim, dtype, is_decode=True, num_parts=8),
                    kernels=cut,
                    is_quick=dim == 128 and dtype is BFLOAT16,
                ),
            }
    rules: dict[str, dict[str, Any]] = {
        "window": {"window": 100},
        "softcap": {"softcap": 30.0},
        "window-softcap": {"window": 100, "softcap": 30.0},
        "slopes": {"has_slopes": True},
        "window-sinks": {"window": 100, "has_sinks": True},
        "all": {"window": 100, "softcap": 30.0, "has_slopes": True, "has_sinks": True},
    }
    for name, rule in rules.items():
        for dim in (64, 128, 256):
            call = partial(_attention, dim, **rule)
            launches[f"chunk-{dim}-{name}"] = Launch(call=call, kernels=whole, is_quick=name == "all" and dim == 128)
            call = partial(_attention, dim, is_decode=True, num_parts=8, **rule)
            launches[f"split-{dim}-{name}"] = Launch(call=call, kernels=cut)
    for dim in (64, 128, 256):
        call = partial(_attention, dim, cached=FLOAT8)
        launches[f"chunk-{dim}-float8"] = Launch(call=call, kernels=whole, archs=(90,))
        call = partial(_attention, dim, cached=FLOAT8, is_decode=True, num_parts=8)
        launches[f"split-{dim}-float8"] = Launch(call=call, kernels=cut, archs=(90,), spilled_bytes=16)
    # Groups of their own: no sharing of KV heads (16 queries of a tile are padding), and one KV head for all.
    for group in (1, 71):
        call = partial(_attention, 64, is_decode=True, num_parts=2, group=group)
        launches[f"split-64-group{group}"] = Launch(call=call, kernels=cut)
    return launches


LAUNCHES: dict[str, Launch] = _attention_launches()
