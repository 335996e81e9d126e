"""Count the machine instructions of the fused CPU step, on one thread, by single-stepping: no tool is needed.

What counts lies in the library of the step: libc picks its copies by the CPU. A bound belongs to an instruction set and
a compiler.

    python -m funitel_testing.guard.instructions avx512-vnni        prints a JSON object: counts by name
"""

import ctypes
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from funitel.model_server.cpu import compiler
from funitel.model_server.cpu.native import load_library
from funitel.model_server.cpu.precision import ActivationDtype, MatrixKind
from funitel.model_server.quantized.block_types import BlockType
from funitel.proto.step import CachedBatch, StepResult
from funitel_testing.cache import usual_cache
from funitel_testing.executors import BLOCK_SIZE, decode, load_executor, prefill, start
from funitel_testing.products import product
from funitel_testing.tiny import save_tiny

SOURCE = Path(__file__).parent / "single_step.cpp"
NUM_INPUTS, NUM_OUTPUTS = 256, 32
"""Of the matrix of each kind: one super-block of a K-quant wide."""
PROMPT_TOKENS = 32


class Counter:
    """Counts what calls of a library's `funitel_run` execute, while it is in place."""

    def __init__(self, library: Any, folder: Path) -> None:
        self.count = 0
        path = folder / "single_step.so"
        compiler.run_compiler([compiler.find_compiler(), "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(path)])
        self._step = ctypes.CDLL(str(path)).count_instructions
        self._step.restype = ctypes.c_uint64
        self._step.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int, *[ctypes.c_uint64] * 2, ctypes.c_void_p]
        self._library = library
        self._run = library.funitel_run
        self._range = code_of(library._name)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count every step in a `with`."""
        self.count, self._library.funitel_run = 0, self._counted
        try:
            yield
        finally:
            self._library.funitel_run = self._run

    def _counted(self, engine: int, batch: Any, at: int) -> int:
        result = ctypes.c_int()
        run = ctypes.cast(self._run, ctypes.c_void_p)
        self.count += self._step(
            run, engine, ctypes.cast(batch, ctypes.c_void_p), at, *self._range, ctypes.byref(result)
        )
        return result.value


def code_of(path: str) -> tuple[int, int]:
    """First address of a loaded library's code, and the one after the last."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    parts = [line[0].split("-") for line in lines if line[-1] == str(Path(path).resolve()) and "x" in line[1]]
    return int(parts[0][0], 16), int(parts[-1][1], 16)


def weight_of(kind: MatrixKind) -> torch.Tensor:
    """A weight of one kind as an engine takes it: any codes, with the smallest scales."""
    if not kind.has_blocks:
        return torch.ones(NUM_OUTPUTS, NUM_INPUTS)
    block = BlockType[kind.name]
    num_bytes = NUM_INPUTS // block.num_inputs * block.num_bytes
    return (torch.arange(NUM_OUTPUTS * num_bytes) % 4).to(torch.uint8).view(NUM_OUTPUTS, num_bytes)


def products(library: ctypes.CDLL, counter: Counter) -> dict[str, int]:
    """Instructions of one row by a matrix of each kind, its activations' levels of 8 bits included."""
    x = torch.linspace(-1, 1, NUM_INPUTS).unsqueeze(0)
    counts = {}
    for kind in MatrixKind:
        with counter.counting():
            product(library, kind, weight_of(kind), x, ActivationDtype.INT8)
        counts[f"1 row by {NUM_OUTPUTS}x{NUM_INPUTS} {kind.name}"] = counter.count
    return counts


def steps(folder: Path, make_counter: Callable[[ctypes.CDLL], Counter]) -> dict[str, int]:
    """Instructions of steps of a tiny model in int8: a prompt, one sequence's token, and a token of sixteen."""
    executor = load_executor(save_tiny("llama", folder, num_hidden_layers=1), dtype=None)
    counter = make_counter(executor.runner.decoder._engine._library)  # type: ignore[attr-defined]
    prompt, counts = tuple(40 + place % 50 for place in range(PROMPT_TOKENS)), {}

    def step(name: str, work: Callable[[], StepResult]) -> CachedBatch:
        with counter.counting():
            batch = work().batch
        counts[f"step: {name}"] = counter.count
        assert batch is not None
        return batch

    blocks = tuple(range(1, 1 + -(-(PROMPT_TOKENS + 2) // BLOCK_SIZE)))
    batch = step(f"prompt of {PROMPT_TOKENS} tokens", lambda: prefill(executor, 1, [start(1, prompt, blocks=blocks)]))
    step("1 row", lambda: decode(executor, [batch]))
    executor.clear()
    many = prefill(executor, 2, [start(number, prompt[:4]) for number in range(16)]).batch
    step("16 rows", lambda: decode(executor, [many]))
    return counts


def main() -> None:
    """Entry point."""
    compiler.INSTRUCTION_SETS = tuple(row for row in compiler.INSTRUCTION_SETS if row[0] == sys.argv[1])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = load_library(usual_cache())
        counts = products(library, Counter(library, folder))
        (folder / "model").mkdir()
        counts |= steps(folder / "model", lambda own: Counter(own, folder))
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
