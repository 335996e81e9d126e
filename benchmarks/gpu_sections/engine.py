"""A shard's executor in this process: loaded as a shard loads it, and given rows as a router gives them.

A row's prompt may count as computed before, so that rows of any context are there at once; what their keys and values
are is no matter for time.
"""

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from funitel.model_server.device.memory import release_memory
from funitel.model_server.executor.executor import Executor
from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.loading.decoder import load
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.step import CachedBatch, SamplingParams, SequenceStart, StoppingParams, WarmupLimits
from gpu_sections import checkpoint
from gpu_sections.plan import BLOCK_SIZE, Plan

PREFILL_TOKENS = 4096  # of a step, as a router's default has it
SETTLING_STEPS = 3  # that do not count: graphs are recorded, kernels compiled


def load_executor(plan: Plan, folder: Path, **settings: Any) -> Executor:
    """The model in `folder`, without a pool yet. Raises: `FunitelError` where the settings cannot be had."""
    chosen: dict[str, Any] = {"device": plan.device.type, "dtype": plan.dtype_name, "block_size": BLOCK_SIZE}
    release_memory(plan.device)  # of one loaded before
    executor, _ = load(ModelServerSettings(model_id=str(folder), **(chosen | settings)), folder)
    return executor


def warm_up(plan: Plan, executor: Executor, pool_tokens: int | None) -> int:
    """Size the pool as a shard does; returns its tokens."""
    longest = min(PREFILL_TOKENS, executor.spec.max_position_embeddings - 1)
    limits = WarmupLimits(max_prefill_tokens=PREFILL_TOKENS, max_batch_total_tokens=pool_tokens)
    result = executor.warmup([start(0, longest, 1, ())], limits)
    assert result.pool_tokens is not None
    return result.pool_tokens


def start(number: int, context: int, answer: int, blocks: Iterable[int], num_computed: int = 0) -> SequenceStart:
    """A row with a prompt of `context` tokens, the first of which count as computed."""
    return SequenceStart(
        request_id=number,
        sampling=SamplingParams(),
        stopping=StoppingParams(max_new_tokens=answer, ignore_eos=True),
        input_ids=(checkpoint.NUM_BYTES + number % 16,) * context,
        blocks=tuple(blocks),
        cache_len=num_computed,
    )


def rows_of(num_rows: int, context: int, answer: int) -> list[SequenceStart]:
    """Rows that decode from their first step on."""
    width = -(-(context + answer) // BLOCK_SIZE)
    first = [1 + number * width for number in range(num_rows)]
    return [start(i, context, answer, range(at, at + width), context - 1) for i, at in enumerate(first)]


def steps_of(executor: Executor, rows: list[SequenceStart], batch_id: int = 0) -> Iterator[float]:
    """Seconds of each step until all rows have ended; the first takes them in. As a router does, two are under way."""
    batch = CachedBatch(batch_id, tuple(row.request_id for row in rows))
    begin = time.perf_counter()
    step = executor.compute_prefill(batch_id, rows, is_ahead=True)
    while True:
        following = executor.compute_decode([batch], is_ahead=True)
        result = step.describe()
        yield time.perf_counter() - begin
        begin, step = time.perf_counter(), following
        if result.batch is None:
            step.describe()
            return


def warm_up_for(plan: Plan, executor: Executor, num_rows: int, context: int) -> None:
    """Give the executor a pool for the rows of `decoding_seconds`."""
    rows = rows_of(num_rows, context, plan.repeats + SETTLING_STEPS)
    warm_up(plan, executor, sum(len(row.blocks) for row in rows) * BLOCK_SIZE)


def decoding_seconds(
    plan: Plan, executor: Executor, num_rows: int, context: int, adapters: Sequence[str] = ()
) -> float:
    """Median time of a step with rows of about that context, which have the `adapters` in turn."""
    rows = rows_of(num_rows, context, plan.repeats + SETTLING_STEPS)
    if adapters:
        rows = [replace(row, adapter_id=adapters[i % len(adapters)]) for i, row in enumerate(rows)]
    taken = list(steps_of(executor, rows))
    return statistics.median(taken[SETTLING_STEPS:])


@torch.inference_mode()
def logits_of(executor: Executor, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
    """What the model says of a step, in float32 on the CPU."""
    logits = executor.runner.decoder(batch, cache)
    assert logits is not None
    return logits.float().cpu()
