"""fp8 weights and KV: what they gain on the plan's model, and what they cost on the demo model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.proto.errors import FunitelError
from gpu_sections import checkpoint, engine
from gpu_sections.equality import TEXT, demo_folder
from gpu_sections.figures import Facts, Line
from gpu_sections.plan import BLOCK_SIZE, Plan

MAX_CHARS = 80  # of why it was skipped
CHUNK = 512  # tokens of a step: what is before them is read from the pool, as precise as the pool is
ROUNDED: dict[str, dict[str, Any]] = {
    "fp8 weights": {"quantize": "fp8"},
    "fp8 KV": {"kv_cache_dtype": "fp8_e4m3fn"},
    "fp8 weights and KV": {"quantize": "fp8", "kv_cache_dtype": "fp8_e4m3fn"},
}


def measure(plan: Plan, facts: Facts) -> Iterator[Line]:
    """Each way against the weights and KV as they are."""
    large, (demo, model) = checkpoint.ensure(plan), demo_folder(plan)
    context = plan.context
    pace, perplexity = _pace(plan, large, context), perplexity_of(plan, demo)
    yield Line("plain_pace", f"the executor, {plan.streams} rows of {context} tokens", pace, "tokens/s")
    yield Line("plain_perplexity", f"perplexity of the {model}, {plan.dtype_name}", perplexity, "")
    for way, settings in ROUNDED.items():
        key = way.replace(" ", "_")
        try:
            there = _pace(plan, large, context, **settings)
            costs = perplexity_of(plan, demo, **settings)
        except FunitelError as error:  # this device does not have it
            yield Line(key, way, None, f"skipped: {str(error)[:MAX_CHARS]}")
            continue
        yield Line(f"{key}_pace", f"{way}: the same", there, "tokens/s, times as many", there / pace)
        yield Line(f"{key}_perplexity", f"{way}: perplexity", costs, "times as much", costs / perplexity)


def _pace(plan: Plan, folder: Path, context: int, **settings: Any) -> float:
    """Tokens a second of the executor, with a pool for the rows it is given."""
    executor = engine.load_executor(plan, folder, **settings)
    rows = engine.rows_of(plan.streams, context, plan.repeats + engine.SETTLING_STEPS)
    engine.warm_up(plan, executor, sum(len(row.blocks) for row in rows) * BLOCK_SIZE)
    return plan.streams / engine.decoding_seconds(plan, executor, plan.streams, context)


def perplexity_of(plan: Plan, folder: Path, **settings: Any) -> float:
    """Of the held-out text, computed in chunks."""
    executor = engine.load_executor(plan, folder, **settings)
    text = TEXT.read_text(encoding="utf-8")
    most = min(plan.text_tokens, executor.spec.max_position_embeddings)
    ids = TextCodec(folder).encode(text, add_special_tokens=False)[:most]
    table = np.arange(1, 2 + len(ids) // BLOCK_SIZE, dtype=np.int32)
    cache = executor.runner.pools.make(len(table) + 1)
    losses = []
    for first in range(0, len(ids) - 1, CHUNK):
        tokens = ids[first : min(first + CHUNK, len(ids) - 1)]
        batch = ForwardBatch.build([RowSpan(tokens, first, table, "all")], BLOCK_SIZE, executor.options.device)
        scores = engine.logits_of(executor, batch, cache).log_softmax(-1)
        following = torch.tensor(ids[first + 1 : first + 1 + len(tokens)])
        losses.append(-scores.gather(1, following[:, None])[:, 0])
    return float(torch.cat(losses).mean().exp())
