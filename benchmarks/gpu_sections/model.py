"""The model of a plan with random weights, made on the device; pools and steps for it."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from funitel.model_server.attention.triton_kernels import TritonAttention
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.forward.batch import Forward, ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.layers.elementwise_kernels import TritonElementwiseOps
from funitel.model_server.layers.experts.choice_kernels import choice_of
from funitel.model_server.layers.experts.kernels import TritonExpertOps
from funitel.model_server.layers.experts.stack import stack_experts
from funitel.model_server.models.cuda_graphs import CudaRecorder, GraphedDecoder, recorded
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.models.fuse_kernels import fuse_kernels
from funitel_testing.random_weights import RandomWeights
from gpu_sections.plan import BLOCK_SIZE, Plan

PROCESSORS = 132  # where there are none to count


def make_decoder(plan: Plan) -> Decoder:
    """The decoder, with the Triton kernels that a shard on a GPU computes with."""
    weights = RandomWeights(plan.dtype, plan.device, deviation=None)
    spec = plan.spec
    decoder = Decoder(spec, weights, TensorParallel(), make_attention(plan))
    if plan.is_gpu:
        heads = HeadSplit(0, spec.num_heads, 0, spec.num_kv_heads)
        fuse_kernels(decoder, heads, plan.device, plan.dtype, plan.dtype)
    else:
        decoder.adopt(TritonElementwiseOps(plan.dtype))
        for mixture in decoder.mixtures():
            stack_experts(mixture)
            mixture.ops, mixture.router.choice = TritonExpertOps(), choice_of(mixture.router)
    return decoder


def make_attention(plan: Plan) -> TritonAttention:
    """The kernels for the heads of the plan's model."""
    spec, num_processors = plan.spec, PROCESSORS
    if plan.is_gpu:
        num_processors = torch.cuda.get_device_properties(plan.device).multi_processor_count
    return TritonAttention(
        BLOCK_SIZE,
        plan.device,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=plan.dtype,
        num_processors=num_processors,
    )


def graphed(plan: Plan, decoder: Decoder, num_rows: int) -> Forward:
    """The decoder with steps of so many rows recorded; without a GPU a replay does the recorded work again."""
    if plan.is_gpu:
        return recorded(decoder, None)
    attention = decoder.attention
    assert isinstance(attention, TritonAttention)
    return GraphedDecoder(decoder, attention, [num_rows + 1], plan.context, lambda body: body)


def replayed(plan: Plan, work: Callable[[], torch.Tensor | None]) -> Callable[[], object]:
    """Work on fixed tensors as a replay of its CUDA graph; without a GPU the work itself."""
    return CudaRecorder()(work) if plan.is_gpu else work


def make_pool(plan: Plan, num_rows: int, context: int) -> tuple[KVCache, list[np.ndarray]]:
    """A pool of random numbers for so many rows, and their blocks, in no order."""
    spec = plan.spec
    width = -(-context // BLOCK_SIZE)
    heads = HeadSplit(0, spec.num_heads, 0, spec.num_kv_heads)
    cache = KVCache(spec, heads, num_rows * width + 1, BLOCK_SIZE, plan.dtype, plan.device)
    cache.pool.normal_(generator=torch.Generator(plan.device).manual_seed(0))
    blocks = np.random.default_rng(0).permutation(np.arange(1, num_rows * width + 1)).astype(np.int32)
    return cache, np.split(blocks, num_rows)


def decoding_step(plan: Plan, tables: Sequence[np.ndarray], context: int, num_drafts: int = 0) -> ForwardBatch:
    """A step of rows that all have that context after it: a token each and drafts, with logits behind all of them."""
    count = 1 + num_drafts
    rows = [RowSpan([i + 5] * count, context - count, table, logits="all") for i, table in enumerate(tables)]
    return ForwardBatch.build(rows, BLOCK_SIZE, plan.device)
