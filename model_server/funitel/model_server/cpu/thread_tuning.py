"""Tune the number of threads of a step, and how long they spin before they sleep, on the model's own layers.

What is tried is first the number of threads, then the spin, each candidate in turns with the others and every other
round in reverse order. The least times count: a start is when other processes start too, and what they take away now
says nothing of later. A trial computes some rows and one row through a few layers, other ones each time, so that they
come from memory as they do in a step. Ranks try the same at the same time, as each waits for the others, and do what
rank 0 found.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from funitel.model_server.cpu.decoder import FusedDecoder
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.forward.batch import ForwardBatch, RowSpan
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.spec.model_spec import ModelSpec

logger = logging.getLogger(__name__)

DIVISORS = (1, 2, 4)  # of the maximum number of threads: all cores, one thread for each of two hyper-threads, and fewer
# Longer waits are not tried: 100 us win 6 % of a token alone, and lose a quarter beside a busy neighbour.
SPINS_US: tuple[int, ...] = (15, 0)
MARGIN = 0.9  # of the first candidate's time: what another must beat, in the geometric mean of both numbers of rows
ROUNDS, SECONDS = 15, 0.08  # maximum of each for threads, and again for spins; a round that has begun is ended
ROWS = 8
EXCERPT_BYTES = 8 << 20  # of the weights that a trial reads


@dataclass(frozen=True, slots=True)
class ThreadSettings:
    """How many threads compute a step, and how long they spin."""

    num_threads: int
    spin_us: int

    def __str__(self) -> str:
        return f"{self.num_threads}x{self.spin_us}us"


Trial = Callable[[ThreadSettings], tuple[float, float]]
"""Seconds of one row and of `ROWS` rows, with these threads."""


class ThreadTuner:
    """Tries candidates by `measure` and settles on one; every rank calls the same in the same order."""

    def __init__(self, measure: Trial, parallel: TensorParallel) -> None:
        self._measure = measure
        self._parallel = parallel
        self.tried: list[str] = []  # each with its times, in the order they were tried

    def best(self, candidates: Sequence[ThreadSettings]) -> int:
        """Which candidate is best: the first, unless another is clearly faster, by one row and some rows together."""
        if len(candidates) == 1:
            return 0
        times: list[list[tuple[float, float]]] = [[] for _ in candidates]
        begin = time.perf_counter()
        for number in range(ROUNDS):
            order = range(len(candidates)) if number % 2 == 0 else reversed(range(len(candidates)))
            for index in order:
                times[index].append(self._measure(candidates[index]))
            if not self._parallel.smallest(time.perf_counter() - begin < SECONDS):
                break
        both = [(min(one for one, _ in each), min(some for _, some in each)) for each in times]
        self.tried += [
            f"{c}: {one * 1e6:.0f}, {some * 1e6:.0f}" for c, (one, some) in zip(candidates, both, strict=True)
        ]
        found = _fastest(both)
        return int(json.loads(self._parallel.share(json.dumps(found))))


def _fastest(times: Sequence[tuple[float, float]]) -> int:
    """The first, unless a candidate that is slower by neither time has a smaller product of both, by the margin."""
    first = times[0]
    able = [i for i, (one, some) in enumerate(times) if one <= first[0] and some <= first[1]]
    best = min(able, key=lambda i: times[i][0] * times[i][1])
    return best if times[best][0] * times[best][1] < MARGIN**2 * first[0] * first[1] else 0


def choose(
    measure: Trial, parallel: TensorParallel, max_threads: int, num_threads: int | None, spin_us: int | None
) -> tuple[ThreadSettings, list[str]]:
    """Choose threads and spin where they are not given; also returns what was tried, in words with microseconds.

    Args:
        max_threads: that this rank may use; ranks may have different ones.
        num_threads, spin_us: as asked for, None to be found.
    """
    tuner = ThreadTuner(measure, parallel)
    # What one rank was told holds the others back too: all try together, or none.
    if not parallel.smallest(num_threads is None):
        num_threads = num_threads or max_threads
    spins = SPINS_US
    if not parallel.smallest(spin_us is None):
        spins = (SPINS_US[0] if spin_us is None else spin_us,)
    if num_threads is None:
        max_of_ranks = -parallel.smallest(-max_threads)
        counts = [max(1, max_threads // divisor) for divisor in DIVISORS if divisor <= max_of_ranks]
        num_threads = counts[tuner.best([ThreadSettings(count, spins[0]) for count in counts])]
    max_chosen = -parallel.smallest(-num_threads)
    if max_chosen == 1:
        return ThreadSettings(num_threads, spins[0]), tuner.tried
    candidates = [ThreadSettings(num_threads, spin) for spin in spins]
    return candidates[tuner.best(candidates)], tuner.tried


def settle_threads(
    decoder: FusedDecoder,
    spec: ModelSpec,
    parallel: TensorParallel,
    *,
    max_threads: int,
    num_threads: int | None,
    spin_us: int | None,
) -> None:
    """Let a loaded decoder compute on as many threads as is best here, and spin as long; what was tried is logged."""
    begin = time.perf_counter()
    with torch.inference_mode():
        measure = LayerExcerpts(decoder, spec, parallel).measure
        chosen, tried = choose(measure, parallel, max_threads, num_threads, spin_us)
    decoder.program.limit_to(None)
    decoder.program.engine.set_threads(chosen.num_threads, chosen.spin_us)
    logger.info(
        "threads num_threads=%d spin_us=%d probe_ms=%.0f tried=%s",
        chosen.num_threads,
        chosen.spin_us,
        (time.perf_counter() - begin) * 1e3,
        f"[{'; '.join(tried)}] (us of 1 and of {ROWS} rows)" if tried else "nothing",
    )


class LayerExcerpts:
    """A few layers of a loaded model at a time, computed for tokens of no meaning."""

    def __init__(self, decoder: FusedDecoder, spec: ModelSpec, parallel: TensorParallel) -> None:
        self._decoder = decoder
        self._num_layers = len(spec.held_layers)
        self._turn = 0
        layer_bytes = decoder.program.sharded_bytes // self._num_layers
        self._num_each = max(1, min(self._num_layers, EXCERPT_BYTES // max(1, layer_bytes)))
        heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, parallel.size, parallel.rank)
        cpu = torch.device("cpu")
        # One block for all rows: what is attended to does not matter.
        self._pool = KVCache(spec, heads, 1, decoder.block_size, decoder.kv_dtype, cpu)
        row = RowSpan([0], 0, np.zeros(1, dtype=np.int32), "none")
        self._batches = [ForwardBatch.build([row] * count, decoder.block_size, cpu) for count in (1, ROWS)]

    def measure(self, chosen: ThreadSettings) -> tuple[float, float]:
        """See `Trial`."""
        self._decoder.program.engine.set_threads(chosen.num_threads, chosen.spin_us)
        one, some = self._batches
        self._seconds(one)  # threads that have just begun
        some_seconds = self._seconds(some)
        return self._seconds(one), some_seconds

    def _seconds(self, batch: ForwardBatch) -> float:
        first = self._turn * self._num_each % (self._num_layers - self._num_each + 1)
        self._turn += 1
        self._decoder.program.limit_to(range(first, first + self._num_each))
        begin = time.perf_counter()
        self._decoder(batch, self._pool)
        return time.perf_counter() - begin
