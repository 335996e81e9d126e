"""The coefficients of `StepCosts`, measured on steps of the real executor in this process. Needs torch."""

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np
from rich.console import Console
from rich.progress import track

from funitel.model_server.executor.executor import Executor
from funitel.model_server.hub.resolve import resolve
from funitel.model_server.loading.decoder import load
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.step import RowUpdate, SamplingParams, SequenceStart, StoppingParams, WarmupLimits
from replaying.costs import StepCosts

POOL_TOKENS = 16_384
BLOCK_SIZE = 16
FIRST_CHUNK = 16
SETTLING_STEPS = 2  # before the counted ones


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of step: rows that decode, and a chunk of another prompt of which `computed` tokens or more are there."""

    num_rows: int
    context: int = 0
    chunk: int = 0
    computed: int = FIRST_CHUNK


SHAPES = (
    *(Shape(num_rows, context) for num_rows in (1, 2, 4, 8, 16, 32) for context in (32, 256)),
    *(Shape(num_rows, 1000) for num_rows in (1, 4, 8)),
    *(Shape(0, chunk=chunk, computed=computed) for chunk in (8, 32, 128, 512) for computed in (FIRST_CHUNK, 1000)),
    *(Shape(num_rows, 128, chunk) for num_rows in (4, 16) for chunk in (16, 64, 256)),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """What a step computed, as the arguments of `StepCosts.seconds`, and the seconds it took."""

    prompt_tokens: float
    prompt_pairs: float
    decode_rows: float
    context_tokens: float
    seconds: float

    @property
    def features(self) -> tuple[float, ...]:
        """Factors of the coefficients, in the order of their names here."""
        return (1.0, self.prompt_tokens, self.prompt_pairs, self.decode_rows, self.context_tokens)


COEFFICIENTS = ("base", "prompt_token", "prompt_pair", "decode_row", "context_token")


def fit(samples: Sequence[Sample]) -> StepCosts:
    """Least squares of the relative error; a coefficient that would be negative is zero."""
    table = np.array([sample.features for sample in samples]) / np.array([[sample.seconds] for sample in samples])
    used = list(range(len(COEFFICIENTS)))
    while True:
        found = np.linalg.lstsq(table[:, used], np.ones(len(samples)), rcond=None)[0]
        if (found >= 0).all():
            break
        used.pop(int(found.argmin()))
    values = dict.fromkeys(COEFFICIENTS, 0.0)
    for index, value in zip(used, found, strict=True):
        values[COEFFICIENTS[index]] = float(value)
    return StepCosts(**values)


def relative_error(costs: StepCosts, samples: Sequence[Sample]) -> float:
    """Median over the samples of how far off `costs` are."""
    return median(
        abs(costs.seconds(s.prompt_tokens, s.prompt_pairs, s.decode_rows, s.context_tokens) / s.seconds - 1)
        for s in samples
    )


def measure(executor: Executor, shape: Shape, num_steps: int) -> Sample:
    """Time `num_steps` steps of one shape, each a little further on than the one before.

    The least of their times counts: other work on the machine only adds to it.
    """
    draw = random.Random(0)
    free_blocks = iter(range(1, POOL_TOKENS // BLOCK_SIZE + 1))
    num_steps_more = SETTLING_STEPS + num_steps

    def start(request_id: int, length: int, chunk: int, max_new_tokens: int) -> SequenceStart:
        num_blocks = -(-(length + max_new_tokens) // BLOCK_SIZE)
        return SequenceStart(
            request_id=request_id,
            input_ids=tuple(draw.randrange(executor.spec.vocab_size) for _ in range(length)),
            sampling=SamplingParams(),
            stopping=StoppingParams(max_new_tokens=max_new_tokens, ignore_eos=True),
            blocks=tuple(next(free_blocks) for _ in range(num_blocks)),
            chunk_len=chunk,
        )

    starts = [start(i, shape.context, shape.context, num_steps_more + 2) for i in range(shape.num_rows)]
    updates = []
    if shape.chunk:
        length = shape.computed + shape.chunk * num_steps_more + 1
        starts.append(start(shape.num_rows, length, shape.computed, 1))
        updates = [RowUpdate(shape.num_rows, (), shape.chunk)]
    batch = executor.compute_prefill(0, starts).describe().batch
    times = []
    for _ in range(num_steps_more):
        assert batch is not None
        begin = time.perf_counter()
        batch = executor.compute_decode([batch], updates).describe().batch
        times.append(time.perf_counter() - begin)
    executor.clear()
    middle = SETTLING_STEPS + (num_steps - 1) / 2  # steps that came before the middle one
    attended = shape.computed + shape.chunk * middle + (shape.chunk + 1) / 2  # by the middle token of its chunk
    return Sample(
        prompt_tokens=shape.chunk,
        prompt_pairs=shape.chunk * attended,
        decode_rows=shape.num_rows,
        context_tokens=shape.num_rows * (shape.context + 1 + middle),
        seconds=min(times[SETTLING_STEPS:]),
    )


def calibrate(
    model_id: str, dtype: str | None, quantize: str | None, num_threads: int | None, num_steps: int
) -> tuple[StepCosts, list[Sample]]:
    """Measure every shape that fits into the model's context, with a progress bar on stderr."""
    settings = ModelServerSettings(
        model_id=model_id, dtype=dtype, quantize=quantize, num_threads=num_threads, block_size=BLOCK_SIZE
    )
    executor, _ = load(settings, resolve(model_id).folder)
    warm = SequenceStart(
        request_id=0, sampling=SamplingParams(), stopping=StoppingParams(max_new_tokens=1), input_ids=(1,) * 64
    )
    executor.warmup([warm], WarmupLimits(max_batch_total_tokens=POOL_TOKENS))
    most = min(executor.spec.max_position_embeddings, POOL_TOKENS)
    shapes = [s for s in SHAPES if s.computed + s.chunk * (SETTLING_STEPS + num_steps) < most]
    console = Console(stderr=True)
    samples = [measure(executor, shape, num_steps) for shape in track(shapes, "measuring steps", console=console)]
    return fit(samples), samples


def as_record(costs: StepCosts, samples: Sequence[Sample]) -> dict[str, object]:
    """What `--calibrate` prints and `--costs` reads."""
    return {"costs": asdict(costs), "median_relative_error": relative_error(costs, samples), "samples": len(samples)}
