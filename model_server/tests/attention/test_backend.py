"""Paged attention equals that over contiguous keys and values: any block table, chunk, group, window, with sinks."""

import numpy as np
import pytest
import torch

from funitel.model_server.attention.backend import AttentionRule
from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.device.tensor_parallel import HeadSplit
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.spec.model_spec import ModelSpec

CPU = torch.device("cpu")
BLOCK = 4
DIM = 8


def naive(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, rule: AttentionRule
) -> torch.Tensor:
    """Attention of one row written out: [tokens, heads, dim] over [context, kv_heads, dim]."""
    out = torch.empty_like(query)
    group = query.shape[1] // keys.shape[1]
    for t in range(query.shape[0]):
        position = start + t
        first = 0 if rule.window is None else max(0, position - rule.window + 1)
        if rule.chunk is not None:
            first = max(first, position - position % rule.chunk)
        for head in range(query.shape[1]):
            k, v = keys[first : position + 1, head // group], values[first : position + 1, head // group]
            scores = k @ query[t, head] / DIM**0.5
            if rule.sinks is not None:
                scores = torch.cat((scores, rule.sinks[head : head + 1]))
            out[t, head] = scores.softmax(-1)[: len(v)] @ v
    return out


@pytest.mark.parametrize("num_heads", [3, 6])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("seed", range(4))
def test_paged_equals_contiguous(seed: int, chunk: int | None, window: int | None, num_heads: int) -> None:
    generator = np.random.default_rng(seed)
    num_kv = 3
    spec = ModelSpec(
        architecture="test",
        vocab_size=1,
        hidden_size=1,
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv,
        head_dim=DIM,
        intermediate_size=1,
        max_position_embeddings=100,
    )
    cache = KVCache(spec, HeadSplit(0, num_heads, 0, num_kv), 120, BLOCK, torch.float32, CPU)
    blocks = generator.permutation(np.arange(1, 120)).astype(np.int32)
    spans, contexts = [], []
    for i in range(9):
        start = int(generator.integers(0, 30))
        count = 1 if i % 3 else int(generator.integers(2, 12))
        table = blocks[i * 12 : i * 12 + 12]
        context = torch.from_numpy(generator.standard_normal((2, start + count, num_kv, DIM)).astype(np.float32))
        positions = torch.arange(start + count)
        slots = torch.from_numpy(table.astype(np.int64))[positions // BLOCK], positions % BLOCK
        cache.write(0, slots, context[0], context[1])
        spans.append(RowSpan([0] * count, start, table, "all"))
        contexts.append(context)
    batch = ForwardBatch.build(spans, BLOCK, CPU)
    query = torch.randn(batch.num_tokens, num_heads, DIM, generator=torch.Generator().manual_seed(seed))
    backend = TorchAttention(BLOCK, CPU)
    sinks = torch.randn(num_heads, generator=torch.Generator().manual_seed(seed)) if seed % 2 else None
    rule = AttentionRule(DIM**-0.5, window, chunk=chunk, sinks=sinks)
    found = backend.attend(query, cache, 0, backend.plan(batch), rule)[batch.logit_indices]
    mine = query[batch.logit_indices]
    at = 0
    for span, context in zip(spans, contexts, strict=True):
        rows = slice(at, at + len(span.tokens))
        expected = naive(mine[rows], context[0], context[1], span.start, rule)
        assert torch.allclose(found[rows], expected, atol=1e-5)
        at = rows.stop


def test_decode_rows_of_like_context_share_a_group() -> None:
    table = np.arange(1, 30, dtype=np.int32)
    spans = [RowSpan([0], start, table) for start in (3, 100, 90, 4, 3)]
    batch = ForwardBatch.build(spans, BLOCK, CPU)
    plan = TorchAttention(BLOCK, CPU).plan(batch)
    assert batch.num_decode == 5
    assert [group.end - group.start for group in plan.groups] == [2, 1, 2]
    assert plan.chunks == ()
