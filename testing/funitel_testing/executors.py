"""An executor over a tiny model, and helpers to drive it as a router would."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from funitel.model_server.executor.executor import Executor
from funitel.model_server.loading.generator import load_generator
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.step import (
    CachedBatch,
    Generation,
    RowUpdate,
    SamplingParams,
    SequenceStart,
    StepResult,
    StoppingParams,
    WarmupLimits,
)

BLOCK_SIZE = 4
BLOCKS_EACH = 24  # 96 tokens


def load_executor(folder: Path, **settings: Any) -> Executor:
    """Load and warm up a one-rank executor, exact where nothing else is said, with a pool of 2,000 tokens."""
    chosen: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "num_threads": 1,
        "enable_prefill_logprobs": True,
    } | settings
    executor, _ = load_generator(ModelServerSettings(model_id=str(folder), **chosen), folder)
    warm = SequenceStart(
        request_id=0, sampling=SamplingParams(), stopping=StoppingParams(max_new_tokens=1), inputs="x" * 20
    )
    executor.warmup([warm], WarmupLimits(max_prefill_tokens=64, max_batch_total_tokens=2000))
    return executor


def start(
    request_id: int, input_ids: list[int] | tuple[int, ...], max_new_tokens: int = 8, **fields: Any
) -> SequenceStart:
    """A sequence with blocks of its own: 24 of them, picked by its id; sampling and stop settings may be given flat."""
    sampling = {k: fields.pop(k) for k in tuple(fields) if k in SamplingParams.__dataclass_fields__}
    stopping = {k: fields.pop(k) for k in tuple(fields) if k in ("stop_sequences", "ignore_eos")}
    first = 1 + BLOCKS_EACH * (request_id % 20)
    return SequenceStart(
        request_id=request_id,
        input_ids=tuple(input_ids),
        sampling=SamplingParams(**sampling),
        stopping=StoppingParams(max_new_tokens=max_new_tokens, **({"ignore_eos": True} | stopping)),
        **({"blocks": tuple(range(first, first + BLOCKS_EACH))} | fields),
    )


def prefill(executor: Executor, *arguments: Any) -> StepResult:
    """The described result of `Executor.compute_prefill`."""
    return executor.compute_prefill(*arguments).describe()


def decode(executor: Executor, *arguments: Any) -> StepResult:
    """The described result of `Executor.compute_decode`."""
    return executor.compute_decode(*arguments).describe()


def keep_rows(executor: Executor, batch_id: int, request_ids: Sequence[int], *, is_ahead: bool = False) -> CachedBatch:
    """The batch that `Executor.begin_filter` leaves."""
    return executor.begin_filter(batch_id, request_ids, is_ahead=is_ahead)()


def num_sequences(executor: Executor) -> int:
    """Rows that an executor holds, finished ones included."""
    return len(executor.batches.table)


def collect(result: StepResult, into: dict[int, list[Generation]]) -> None:
    """Sort a step's generations by request."""
    for generation in result.generations:
        into.setdefault(generation.request_id, []).append(generation)


def run_out(executor: Executor, result: StepResult, into: dict[int, list[Generation]]) -> None:
    """Decode a batch until it is gone, filtering finished rows as a router does."""
    collect(result, into)
    while result.batch is not None:
        finished = {g.request_id for g in result.generations if g.finished is not None}
        batch = result.batch
        if finished:
            batch = keep_rows(executor, batch.id, [i for i in batch.request_ids if i not in finished])
        result = decode(executor, [batch])
        collect(result, into)


def run_alone(executor: Executor, sequence: SequenceStart) -> list[Generation]:
    """All generations of one sequence by itself."""
    found: dict[int, list[Generation]] = {}
    run_out(executor, prefill(executor, 10_000 + sequence.request_id, [sequence]), found)
    return found[sequence.request_id]


def ids_of(generations: list[Generation]) -> list[int]:
    """Token ids of a sequence's generations."""
    return [token_id for generation in generations for token_id in generation.tokens.ids]


def chunk(request_id: int, num_tokens: int) -> RowUpdate:
    """Ask a row to compute so many known tokens."""
    return RowUpdate(request_id, (), num_tokens)
