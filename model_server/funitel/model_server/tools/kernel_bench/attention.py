"""Measure attention of one row over a long context: it reads the keys and values of every layer once."""

import ctypes
import time
from dataclasses import dataclass

import numpy as np
import torch

from funitel.model_server.cpu.native import Batch, Code, NativeEngine, NativeOperation, Shape
from funitel.model_server.spec.model_spec import ModelSpec

CONTEXT, BLOCK_SIZE, NO_SLOPES = 4096, 16, -1


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Of one layer."""

    seconds: float
    num_bytes: int
    num_products: int


def measure_attention(
    library: ctypes.CDLL, spec: ModelSpec, *, has_half_kv: bool, num_threads: int, footprint: int, seconds: float
) -> AttentionCost:
    """Time the attention of whole steps, for `seconds` at least; sequences that fill `footprint` bytes take turns."""
    dtype = torch.float16 if has_half_kv else torch.float32
    num_values = CONTEXT * 2 * spec.num_kv_heads * spec.head_dim
    num_bytes = num_values * dtype.itemsize
    num_sequences = -(-footprint // (num_bytes * spec.num_layers))
    pool = torch.ones(num_sequences * spec.num_layers * num_values, dtype=dtype)
    shape = Shape(
        hidden_size=spec.num_heads * spec.head_dim,
        head_dim=spec.head_dim,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        intermediate_size=1,
        num_layers=spec.num_layers,
        block_size=BLOCK_SIZE,
        has_half_kv=has_half_kv,
        num_threads=num_threads,
    )
    engine = NativeEngine(library, shape)
    engine.set_program([NativeOperation(Code.ATTEND, layer, 0, NO_SLOPES) for layer in range(spec.num_layers)])
    blocks = np.arange(num_sequences * CONTEXT // BLOCK_SIZE, dtype=np.int32).reshape(num_sequences, -1)
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
    return AttentionCost(min(times) / spec.num_layers, num_bytes, num_products)
