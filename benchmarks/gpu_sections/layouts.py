"""Measure attention of a decoding step over two layouts of the pool: blocks of all layers, and a pool per layer.

A layer reads a part of every block, so with blocks of all layers it touches many more pages of memory.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from funitel.model_server.attention.backend import AttentionRule
from funitel.model_server.kv_cache.pool import KVCache
from gpu_sections import roofs, timing
from gpu_sections.figures import Line
from gpu_sections.model import decoding_step, make_attention, make_pool, replayed
from gpu_sections.plan import Plan


@dataclass(frozen=True)
class _LayerPools:
    """A pool for each layer."""

    keys: Mapping[int, torch.Tensor]
    values: Mapping[int, torch.Tensor]

    @classmethod
    def of(cls, cache: KVCache) -> "_LayerPools":
        """The same numbers."""
        keys, values = ({i: each.contiguous() for i, each in kept.items()} for kept in (cache.keys, cache.values))
        return cls(keys, values)


def measure(plan: Plan, num_rows: int, bytes_a_second: float) -> Iterator[Line]:
    """All layers' attention, as one recorded step."""
    cache, tables = make_pool(plan, num_rows, plan.context)
    attention, spec = make_attention(plan), plan.spec
    laid_out = attention.plan(decoding_step(plan, tables, plan.context))
    query = torch.randn(num_rows, spec.num_heads, spec.head_dim, device=plan.device).to(plan.dtype)
    rule = AttentionRule(spec.score_scale)
    read = num_rows * roofs.kv_bytes(spec, plan.context, plan.dtype.itemsize)
    for name, pools in (("blocks of all layers", cache), ("a pool a layer", _LayerPools.of(cache))):

        def attend() -> torch.Tensor:
            outs = [attention.attend(query, pools, layer, laid_out, rule) for layer in range(spec.num_layers)]  # noqa: B023
            return outs[-1]

        seconds = timing.seconds_of(plan, replayed(plan, attend))
        share = roofs.share_of_roof(read, seconds, bytes_a_second)
        label = f"attention alone, {num_rows} rows of {plan.context} tokens, {name}"
        yield Line(f"{name.replace(' ', '_')}_{num_rows}", label, seconds * 1e3, "ms, share of its roof", share)
