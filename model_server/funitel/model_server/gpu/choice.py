"""Which attention a shard computes with: the fastest that device and model allow and that a probe finds right."""

import logging
from dataclasses import replace

import numpy as np
import torch

from funitel.model_server.attention import AttentionBackend, AttentionRule, TorchAttention
from funitel.model_server.batch import ForwardBatch, RowSpan
from funitel.model_server.decoder import Decoder, Forward
from funitel.model_server.kv_cache import KVCache
from funitel.model_server.parallel import HeadSplit
from funitel.model_server.spec import ModelSpec
from funitel.proto.batch_sizes import BatchSizes

logger = logging.getLogger(__name__)

FAST = "triton"
_PROBE_CONTEXTS = ((0, 5), (40, 1), (300, 1))  # (computed before, computed now) of the probe's rows, in tokens
_PROBE_BOUND = 2e-2  # relative error: what is wrong is off by far more, and bfloat16 by half of it


def choose_attention(
    spec: ModelSpec, heads: HeadSplit, block_size: int, device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    """The backend for this rank's heads, with the reason logged where it is not the fast one of a GPU."""
    reference = TorchAttention(block_size, device)
    if device.type != "cuda":
        return reference
    try:
        # Triton: seconds to import, and there with torch's builds for GPUs only
        from funitel.model_server.gpu.attention import TritonAttention
        from funitel.model_server.gpu.paged_attention import MOST_HEAD_DIM

        if spec.cached_dim > MOST_HEAD_DIM:
            raise ValueError(f"heads of {spec.cached_dim} elements, at most {MOST_HEAD_DIM} are supported")
        fast = TritonAttention(
            block_size,
            device,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            num_processors=torch.cuda.get_device_properties(device).multi_processor_count,
        )
        _check(fast, reference, spec, heads, block_size, device, dtype)
    except Exception as error:  # a compiler, a driver, a card: a shard that is slow is better than none
        logger.warning("attention runs in torch, without the Triton kernels: %s: %s", type(error).__name__, error)
        return reference
    logger.info("attention runs in Triton kernels")
    return fast


def recorded(decoder: Decoder, cuda_graphs: BatchSizes | None) -> Forward:
    """The decoder with its decoding steps recorded as CUDA graphs, where every operation of them can be.

    `cuda_graphs` are the rows of those steps; None: as many as are usual.
    """
    spec, attention = decoder.spec, decoder.attention
    if attention.name != FAST or cuda_graphs == frozenset():
        return decoder
    is_fixed = not any(spec.experts_of(i) for i in range(spec.num_layers))  # tokens are sorted by expert on the host
    if not is_fixed or any(rotary.needs_reaches for rotary in decoder.entrance.rotaries):
        logger.info("decoding is not recorded as CUDA graphs: what %s computes depends on tokens", spec.architecture)
        return decoder
    from funitel.model_server.gpu.attention import TritonAttention
    from funitel.model_server.gpu.graphs import CudaRecorder, GraphedDecoder, default_buckets

    assert isinstance(attention, TritonAttention)
    buckets = sorted(cuda_graphs or default_buckets())
    logger.info("decoding steps of up to %d rows are recorded as CUDA graphs, each when it first comes", buckets[-1])
    return GraphedDecoder(decoder, attention, buckets, spec.max_position_embeddings, CudaRecorder())


def _check(
    fast: AttentionBackend,
    reference: AttentionBackend,
    spec: ModelSpec,
    heads: HeadSplit,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Raise ValueError unless both give the same for rows drawn at random.

    The kernels of the model's widths are compiled on the way, so that no request waits for them.
    """
    needed = [-(-sum(row) // block_size) for row in _PROBE_CONTEXTS]
    tables = np.split(np.arange(1, sum(needed) + 1, dtype=np.int32), np.cumsum(needed)[:-1])
    spans = [RowSpan([0] * n, start, table) for (start, n), table in zip(_PROBE_CONTEXTS, tables, strict=True)]
    batch = ForwardBatch.build(spans, block_size, device)
    cache = KVCache(replace(spec, num_layers=1), heads, sum(needed) + 1, block_size, dtype, device)
    generator = torch.Generator(device).manual_seed(0)
    cache.pool.normal_(generator=generator)
    shape = (batch.num_tokens, heads.num_heads, spec.cached_dim)
    query = torch.randn(shape, device=device, generator=generator).to(dtype)
    rule = AttentionRule(spec.score_scale, spec.window(0), spec.attention_softcap)
    found, expected = (each.attend(query, cache, 0, each.plan(batch), rule).float() for each in (fast, reference))
    error = float((found - expected).norm() / expected.norm())
    if not error <= _PROBE_BOUND:
        raise ValueError(f"a probe is off by {error:.2g} of what torch computes, at most {_PROBE_BOUND:g} is right")
