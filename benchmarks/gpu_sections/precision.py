"""Weights of 4 and 8 bits and fp8 KV: what they gain on the plan's model, and what fp8 costs on the demo model.

Many rows show the rate, where products have much to compute; one row shows the time of a token, which is the reading of
weights.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
FLOAT8_KV = {"kv_cache_dtype": "fp8_e4m3fn"}


@dataclass(frozen=True)
class Way:
    """Weights and KV in fewer bits: the settings, the folder of the plan's model, and whether text is measured too."""

    name: str
    settings: dict[str, Any]
    folder: Callable[[Plan], Path] = checkpoint.ensure
    has_perplexity: bool = True

    @property
    def key(self) -> str:
        """What the keys of its lines begin with."""
        return self.name.replace(" ", "_").replace("-", "_")


WAYS = (
    Way("4-bit weights", {}, checkpoint.ensure_four_bits, has_perplexity=False),  # random codes say nothing of texts
    Way("int8 weights", {"quantize": "int8"}, has_perplexity=False),
    Way("fp8 weights", {"quantize": "fp8"}),
    Way("fp8 KV", FLOAT8_KV),
    Way("fp8 weights and KV", {"quantize": "fp8"} | FLOAT8_KV),
)


@dataclass(frozen=True)
class Speed:
    """Of the executor: `rate` in tokens a second with many rows, `step` in seconds with one."""

    rate: float
    step: float


def measure(plan: Plan, facts: Facts) -> Iterator[Line]:
    """Each way against the weights and KV as they are."""
    demo, model = demo_folder(plan)
    plain = _speed(plan, checkpoint.ensure(plan))
    rows = f"{plan.streams} rows of {plan.context} tokens"
    yield Line("plain_pace", f"the executor, {rows}, {plan.dtype_name}", plain.rate, "tokens/s")
    yield Line("plain_step_1", f"the executor, 1 row, {plan.dtype_name}", plain.step * 1e3, "ms")
    perplexity = perplexity_of(plan, demo)
    yield Line("plain_perplexity", f"perplexity of the {model}, {plan.dtype_name}", perplexity, "")
    failed: list[str] = []
    for way in WAYS:
        try:
            yield from _lines(plan, way, plain, demo, perplexity)
        except FunitelError as error:  # this device does not have it
            yield Line(way.key, way.name, None, f"skipped: {str(error)[:MAX_CHARS]}")
        except Exception as error:  # others may work
            failed.append(f"{way.name}: {type(error).__name__}: {error}")
            yield Line(way.key, way.name, None, f"failed: {type(error).__name__}")
    if failed:
        raise RuntimeError("; ".join(failed))


def _lines(plan: Plan, way: Way, plain: Speed, demo: Path, perplexity: float) -> Iterator[Line]:
    found = _speed(plan, way.folder(plan), **way.settings)
    name, times = f"{way.name}: {plan.streams} rows", found.rate / plain.rate
    yield Line(f"{way.key}_pace", name, found.rate, "tokens/s, times as many", times)
    yield Line(
        f"{way.key}_step_1", f"{way.name}: 1 row", found.step * 1e3, "ms, times as long", found.step / plain.step
    )
    if way.has_perplexity:
        costs = perplexity_of(plan, demo, **way.settings)
        yield Line(f"{way.key}_perplexity", f"{way.name}: perplexity", costs, "times as much", costs / perplexity)


def _speed(plan: Plan, folder: Path, **settings: Any) -> Speed:
    executor = engine.load_executor(plan, folder, **settings)
    engine.warm_up_for(plan, executor, plan.streams, plan.context)
    many, one = (engine.decoding_seconds(plan, executor, rows, plan.context) for rows in (plan.streams, 1))
    return Speed(plan.streams / many, one)


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
