"""Measure one row: attention over a long context, and the whole model as a server computes it.

Attention reads the keys and values of every layer once; a step reads every weight too.
"""

import ctypes
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu.decoder import KV_DTYPES, FusedDecoder
from funitel.model_server.cpu.footprint import matrix_bytes
from funitel.model_server.cpu.native import Batch, Code, NativeEngine, NativeOperation, Shape
from funitel.model_server.cpu.precision import KvKind, Tier
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.spec.model_spec import ModelSpec

CONTEXT, STEP_CONTEXT, BLOCK_SIZE, NO_SLOPES = 4096, 200, 16, -1


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Of one layer."""

    seconds: float
    num_bytes: int
    num_products: int


def measure_attention(
    library: ctypes.CDLL, spec: ModelSpec, *, kv_kind: KvKind, num_threads: int, footprint: int, seconds: float
) -> AttentionCost:
    """Time the attention of whole steps, for `seconds` at least; sequences that fill `footprint` bytes take turns."""
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0)
    blocks_each = CONTEXT // BLOCK_SIZE
    block_bytes = KVCache.bytes_per_block(spec, heads, BLOCK_SIZE, KV_DTYPES[kv_kind])
    num_sequences = -(-footprint // (block_bytes * blocks_each))
    pool = torch.ones(num_sequences * blocks_each * block_bytes // 2, dtype=torch.float16)
    shape = Shape(
        hidden_size=spec.num_heads * spec.head_dim,
        head_dim=spec.head_dim,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        intermediate_size=1,
        num_layers=spec.num_layers,
        block_size=BLOCK_SIZE,
        kv_kind=kv_kind,
        num_threads=num_threads,
    )
    engine = NativeEngine(library, shape)
    engine.set_program([NativeOperation(Code.ATTEND, layer, 0, NO_SLOPES) for layer in range(spec.num_layers)])
    blocks = np.arange(num_sequences * blocks_each, dtype=np.int32).reshape(num_sequences, -1)
    start, length, first = (np.array([value], dtype=np.int32) for value in (CONTEXT - 1, 1, 0))
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 2 * num_sequences:
        batch = Batch(
            num_tokens=1,
            num_rows=1,
            starts=start.ctypes.data,
            lengths=length.ctypes.data,
            blocks=blocks[len(times) % num_sequences].ctypes.data,
            table_starts=first.ctypes.data,
            pool=pool.data_ptr(),
        )
        begin = time.perf_counter()
        engine.run(batch, 0)
        times.append(time.perf_counter() - begin)
    num_products = 2 * CONTEXT * spec.num_heads * spec.head_dim
    return AttentionCost(min(times) / spec.num_layers, block_bytes * blocks_each // spec.num_layers, num_products)


CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of one row with `STEP_CONTEXT` tokens and its logits: the least time and the usual one, and what is read."""

    seconds: float
    median_seconds: float
    weight_bytes: int
    kv_bytes: int


def measure_step(
    library: ctypes.CDLL, folder: Path, spec: ModelSpec, tier: Tier, num_threads: int, seconds: float
) -> StepCost:
    """Load the model in `folder` and time steps for so long."""
    weights = Weights(folder, torch.float32, CPU, spec.names.prefix, is_shown=False)
    alone = TensorParallel()
    decoder = FusedDecoder(spec, weights, alone, library, tier=tier, block_size=BLOCK_SIZE, num_threads=num_threads)
    num_blocks = -(-STEP_CONTEXT // BLOCK_SIZE)
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0)
    pool = KVCache(spec, heads, num_blocks, BLOCK_SIZE, decoder.kv_dtype, CPU)
    batch = ForwardBatch.build([RowSpan([0], STEP_CONTEXT - 1, np.arange(num_blocks, dtype=np.int32))], BLOCK_SIZE, CPU)
    times: list[float] = []
    end = time.perf_counter() + seconds
    with torch.inference_mode():
        while time.perf_counter() < end or len(times) < 3:
            begin = time.perf_counter()
            decoder(batch, pool)
            times.append(time.perf_counter() - begin)
    weight_bytes = decoder.program.held_bytes
    if not spec.is_tied:  # of the embedding a single row is read
        kind = next(iter(decoder.program.kinds.values()))
        weight_bytes -= matrix_bytes(kind, spec.vocab_size, spec.hidden_size)
    token_bytes = KVCache.bytes_per_block(spec, heads, 1, decoder.kv_dtype)
    return StepCost(min(times), median(times), weight_bytes, STEP_CONTEXT * token_bytes)
