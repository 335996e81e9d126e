"""Attention backends put to the test at start: are they right on this model's shapes, and how fast?"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from funitel.model_server.attention.backend import AttentionBackend, AttentionRule
from funitel.model_server.device.tensor_parallel import HeadSplit
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.spec.model_spec import ModelSpec

Rows = Sequence[tuple[int, int]]  # (computed before, computed now), in tokens
Stopwatch = Callable[[Callable[[], object]], float]  # work -> seconds

PROBE: Rows = ((0, 5), (40, 1), (300, 1), (0, 17), (30, 6))  # every way in which a row can lie in a step
FRESH: Rows = ((0, 5), (0, 17))
PROMPT: Rows = ((0, 2048),)
_BOUND = 2e-2  # relative error: what is wrong is off by far more, and bfloat16 by half of it
_DECODE_CONTEXT = 4096
_MAX_TIMED_BYTES = 512 << 20  # of keys and values: long enough for what a launch costs the host not to count


class KernelCheck:
    """Steps of random rows over one layer of a model."""

    def __init__(
        self,
        spec: ModelSpec,
        heads: HeadSplit,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self._spec = replace(spec, num_layers=1)
        self._heads = heads
        self._block_size = block_size
        self._device = device
        self._dtype = dtype
        self._kv_dtype = kv_dtype or dtype
        self._rule = AttentionRule(spec.score_scale, spec.window(0), spec.attention_softcap)

    @property
    def decode(self) -> Rows:
        """Rows that decode behind long contexts, as many as fill what may be timed."""
        bytes_each = KVCache.bytes_per_block(self._spec, self._heads.num_kv_heads, _DECODE_CONTEXT, self._kv_dtype)
        return [(_DECODE_CONTEXT - 1, 1)] * max(1, min(64, _MAX_TIMED_BYTES // bytes_each))

    def check(self, backend: AttentionBackend, reference: AttentionBackend, rows: Rows = PROBE) -> None:
        """Raise ValueError unless both give the same.

        The kernels of the model's widths are compiled on the way, so that no request waits for them.
        """
        attend = self._step(rows)
        found, expected = attend(backend).float(), attend(reference).float()
        error = float((found - expected).norm() / expected.norm())
        if not error <= _BOUND:
            raise ValueError(f"a probe is off by {error:.2g} of what torch computes, at most {_BOUND:g} is right")

    def seconds(self, backends: Sequence[AttentionBackend], rows: Rows, stopwatch: Stopwatch) -> list[float]:
        """How long each takes for a step of these rows."""
        attend = self._step(rows)
        return [stopwatch(lambda backend=backend: attend(backend)) for backend in backends]  # type: ignore[misc]

    def _step(self, rows: Rows) -> Callable[[AttentionBackend], torch.Tensor]:
        needed = [-(-sum(row) // self._block_size) for row in rows]
        tables = np.split(np.arange(1, sum(needed) + 1, dtype=np.int32), np.cumsum(needed)[:-1])
        spans = [RowSpan([0] * n, start, table) for (start, n), table in zip(rows, tables, strict=True)]
        batch = ForwardBatch.build(spans, self._block_size, self._device)
        cache = KVCache(self._spec, self._heads, sum(needed) + 1, self._block_size, self._kv_dtype, self._device)
        generator = torch.Generator(self._device).manual_seed(0)
        cache.pool.copy_(torch.empty_like(cache.pool, dtype=self._dtype).normal_(generator=generator))
        shape = (batch.num_tokens, self._heads.num_heads, self._spec.cached_dim)
        query = torch.randn(shape, device=self._device, generator=generator).to(self._dtype)
        return lambda backend: backend.attend(query, cache, 0, backend.plan(batch), self._rule)


def on_device(work: Callable[[], object]) -> float:
    """Seconds that work takes a GPU, of several times in a row after one that does not count."""
    times = 5
    work()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / times
