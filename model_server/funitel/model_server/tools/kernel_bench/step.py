"""Measure one row through the whole model, as a server computes it: every weight is read, and its context."""

import ctypes
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.cpu.decoder import FusedDecoder
from funitel.model_server.cpu.footprint import matrix_bytes
from funitel.model_server.cpu.precision import Tier
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.spec.model_spec import ModelSpec

CONTEXT, BLOCK_SIZE = 200, 16
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of one row with `CONTEXT` tokens, its logits included: the least time and the usual one, and what is read."""

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
    num_blocks = -(-CONTEXT // BLOCK_SIZE)
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0)
    pool = KVCache(spec, heads, num_blocks, BLOCK_SIZE, decoder.kv_dtype, CPU)
    batch = ForwardBatch.build([RowSpan([0], CONTEXT - 1, np.arange(num_blocks, dtype=np.int32))], BLOCK_SIZE, CPU)
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
    token_bytes = KVCache.bytes_per_block(spec, spec.num_kv_heads, 1, decoder.kv_dtype)
    return StepCost(min(times), median(times), weight_bytes, CONTEXT * token_bytes)
