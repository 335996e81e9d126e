"""The executor in process: at the pace of streams over HTTP, then with every block of the pool in use for minutes."""

import statistics
import time
from collections.abc import Iterator

import numpy as np
import torch

from funitel.model_server.executor.executor import Executor
from funitel.model_server.forward.batch import RecordingForward
from funitel.proto.step import SequenceStart
from gpu_sections import checkpoint, engine, timing
from gpu_sections.engine import PREFILL_TOKENS
from gpu_sections.figures import Facts, Line
from gpu_sections.model import decoding_step
from gpu_sections.plan import BLOCK_SIZE, Plan

OVER_HTTP = 0.95  # share of the pace in process
SLOW_DOWN = 1.05
ANSWER = 4 * BLOCK_SIZE  # tokens of a round: its rows end in the last slot of their last block


def measure(plan: Plan, facts: Facts) -> Iterator[Line]:
    """First as many rows as there were streams, then all that the pool holds."""
    executor = engine.load_executor(plan, checkpoint.ensure(plan))
    context = round(facts.get("http_context", plan.context))
    yield _forward(plan, executor, context, facts.get("http"))
    num_blocks = engine.warm_up(plan, executor, plan.pool_tokens) // BLOCK_SIZE
    num_rows = min(plan.streams, num_blocks * BLOCK_SIZE // (context + ANSWER))
    pace = num_rows / engine.decoding_seconds(plan, executor, num_rows, context)
    yield _against("executor", f"the executor, {num_rows} rows of {context} tokens", pace, facts.get("http"))
    yield from _filled(plan, executor, num_blocks)


def _forward(plan: Plan, executor: Executor, context: int, over_http: float | None) -> Line:
    """The decoder alone: no sampling, no text."""
    width = -(-context // BLOCK_SIZE)
    cache = executor.runner.pools.make(plan.streams * width + 1)
    tables = np.split(np.arange(1, cache.num_blocks, dtype=np.int32), plan.streams)
    batch = decoding_step(plan, tables, context)
    with torch.inference_mode():
        seconds = timing.seconds_of(plan, lambda: executor.runner.decoder(batch, cache))
    if isinstance(executor.runner.decoder, RecordingForward):
        executor.runner.decoder.forget_recordings()  # which hold the pool
    name = f"the decoder alone, {plan.streams} rows of {context} tokens"
    return _against("forward", name, plan.streams / seconds, over_http)


def _against(key: str, name: str, pace: float, over_http: float | None) -> Line:
    if over_http is None:
        return Line(key, name, pace, "tokens/s; nothing was measured over HTTP", aim=OVER_HTTP)
    return Line(key, name, pace, "tokens/s; HTTP's share of it", over_http / pace, OVER_HTTP)


def _filled(plan: Plan, executor: Executor, num_blocks: int) -> Iterator[Line]:
    """Rounds of rows that end in the last slot of the pool, for as long as the plan says.

    One row of a round computes its whole prompt, as new requests do while others hold all the rest.
    """
    begin, rounds, longest = time.perf_counter(), [], 0.0
    rows = rows_that_fill(num_blocks, plan.pool_context)
    while time.perf_counter() - begin < plan.pool_seconds or len(rounds) < 4:
        first, *others = engine.steps_of(executor, rows, len(rounds))
        longest = max(longest, first)
        rounds.append(statistics.median(others))
    rounds = rounds[1:]  # the first one records its graph
    part = max(1, len(rounds) // 5)
    early, late = statistics.median(rounds[:part]), statistics.median(rounds[-part:])
    name = f"pool of {num_blocks * BLOCK_SIZE} tokens filled by {len(rows)} rows for {plan.pool_seconds:.0f} s"
    unit = f"ms a step at last, times what it was at first ({len(rounds)} rounds)"
    yield Line("pool", name, late * 1e3, unit, late / early, SLOW_DOWN, is_most=True)
    yield Line("pool_prompt", "pool filled: a step with a prompt", longest * 1e3, "ms, the longest of all rounds")
    if plan.is_gpu:
        free, total = torch.cuda.mem_get_info(plan.device)
        yield Line("pool_free", "pool filled: memory left on the card", free / 1e9, f"of {total / 1e9:.1f} GB")


def rows_that_fill(num_blocks: int, context: int) -> list[SequenceStart]:
    """Rows of that context, the last one shorter, that use all blocks of a pool except the reserved block 0."""
    width = -(-context // BLOCK_SIZE)
    least = -(-ANSWER // BLOCK_SIZE) + 1
    rows = []
    for number, at in enumerate(range(1, num_blocks + 1, width)):
        blocks = range(at, min(at + width, num_blocks + 1))
        if len(blocks) < least and rows:  # too few for a row of their own
            last = rows.pop()
            blocks, number = range(last.blocks[0], num_blocks + 1), last.request_id
        prompt = len(blocks) * BLOCK_SIZE - ANSWER
        computed = max(0, prompt - PREFILL_TOKENS + num_blocks // width) if number == 0 else prompt - 1
        rows.append(engine.start(number, prompt, ANSWER, blocks, computed))
    return rows
