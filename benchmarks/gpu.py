"""How near is a GPU's own limit? Kernels checked, then decoding and prompts timed against ceilings of the same run.

Ceilings are what this card does: a copy within its memory, a product of large bfloat16 matrices. The model has the
shape of Llama-3.1-8B and random weights made on the device, so nothing is fetched. One call does everything in some
minutes, prints a table and, as the last line, a JSON object; the exit status is 1 where an aim is missed.

    python benchmarks/gpu.py                 # all of it, on cuda:0
    python benchmarks/gpu.py --rehearse      # the same code without a GPU, on a tiny shape; its figures mean nothing

Needs torch, triton, numpy, safetensors and this project's sources on PYTHONPATH (model_server, proto, testing).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import numpy as np
import torch

from funitel.model_server.attention import TorchAttention
from funitel.model_server.batch import ForwardBatch, RowSpan
from funitel.model_server.decoder import Decoder, Forward
from funitel.model_server.gpu.attention import TritonAttention
from funitel.model_server.gpu.choice import recorded
from funitel.model_server.gpu.graphs import GraphedDecoder
from funitel.model_server.kv_cache import KVCache
from funitel.model_server.parallel import HeadSplit, TensorParallel
from funitel.model_server.spec import ModelSpec, RotaryScaling, RotarySpec
from funitel_testing.attention_cases import BOUNDS, draw, error_of
from funitel_testing.random_weights import RandomWeights

BLOCK_SIZE = 16
LLAMA_8B = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14_336,
    max_position_embeddings=131_072,
    rotary=RotarySpec(
        base=500_000.0,
        scaling=RotaryScaling(kind="llama3", factor=8.0, original_max_position=8192),
    ),
)
TINY = replace(
    LLAMA_8B,
    vocab_size=300,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    max_position_embeddings=256,
)


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    batches: tuple[int, ...] = (1, 64, 256)
    context: int = 1024
    prompt: int = 8192
    matrix: int = 8192  # width of the product that is a ceiling
    copied: int = 1 << 32  # bytes of the copy that is a ceiling
    num_cases: int = 300
    repeats: int = 20


FULL = Plan(LLAMA_8B, torch.device("cuda", 0), torch.bfloat16)
REHEARSAL = Plan(TINY, torch.device("cpu"), torch.float32, (1, 3), 20, 24, 64, 1 << 16, 3, 2)


@dataclass(frozen=True)
class Line:
    """One figure: what it is of a ceiling, and what it should be at least (or, `is_most`, at most)."""

    name: str
    measured: float
    unit: str
    ratio: float | None = None
    aim: float | None = None
    is_most: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the aim, if there is one, is reached."""
        if self.aim is None or self.ratio is None:
            return True
        return self.ratio <= self.aim if self.is_most else self.ratio >= self.aim


class Bench:
    """The measurements of one plan on one device."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.is_gpu = plan.device.type == "cuda"

    def lines(self) -> Iterator[Line]:
        """Every figure, as it is measured."""
        copy, matmul = self._copy_rate(), self._matmul_rate()
        yield Line("copy within memory", copy / 1e9, "GB/s")
        yield Line("matrix product", matmul / 1e12, "TFLOP/s")
        yield from self._kernels()
        decoder, weight_bytes = self._decoder()
        for batch in self.plan.batches:
            yield from self._decoding(decoder, batch, weight_bytes, copy)
        yield self._prompt(decoder, matmul)

    # Ceilings ---------------------------------------------------------------------------------------------------------

    def _copy_rate(self) -> float:
        """Bytes a second, those read and those written counted."""
        source = torch.ones(self.plan.copied // 2, dtype=torch.uint8, device=self.plan.device)
        target = torch.empty_like(source)
        return 2 * source.numel() / self._seconds(lambda: target.copy_(source))

    def _matmul_rate(self) -> float:
        """Floating-point operations a second."""
        n = self.plan.matrix
        a, b = (torch.randn(n, n, device=self.plan.device).to(self.plan.dtype) for _ in range(2))
        return 2 * n**3 / self._seconds(lambda: a @ b)

    def _seconds(self, work: Callable[[], object]) -> float:
        """Median time of some work, after two runs that do not count."""
        taken = []
        for number in range(self.plan.repeats + 2):
            self._wait()
            begin = time.perf_counter()
            work()
            self._wait()
            if number >= 2:
                taken.append(time.perf_counter() - begin)
        return statistics.median(taken)

    def _wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.plan.device)

    # Kernels ----------------------------------------------------------------------------------------------------------

    def _kernels(self) -> Iterator[Line]:
        """The largest error of random steps, as a share of what is allowed."""
        worst: dict[torch.dtype, float] = dict.fromkeys(BOUNDS, 0.0)
        for seed in range(self.plan.num_cases):
            case = draw(seed, is_short=not self.is_gpu)
            worst[case.dtype] = max(worst[case.dtype], error_of(case, self.plan.device))
        for dtype, error in worst.items():
            name = f"largest error of attention, {str(dtype).removeprefix('torch.')}"
            yield Line(name, error, f"in {self.plan.num_cases} cases", error / BOUNDS[dtype], 1.0, is_most=True)

    # The model --------------------------------------------------------------------------------------------------------

    def _decoder(self) -> tuple[Decoder, int]:
        """The decoder, and the bytes of its weights that a step reads: all but the table of embeddings."""
        plan, spec = self.plan, self.plan.spec
        weights = RandomWeights(plan.dtype, plan.device, deviation=None)
        decoder = Decoder(spec, weights, TensorParallel(), self._attention())
        return decoder, weights.held_bytes - spec.vocab_size * spec.hidden_size * plan.dtype.itemsize

    def _attention(self) -> TritonAttention:
        spec, num_processors = self.plan.spec, 132
        if self.is_gpu:
            num_processors = torch.cuda.get_device_properties(self.plan.device).multi_processor_count
        return TritonAttention(
            BLOCK_SIZE,
            self.plan.device,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=self.plan.dtype,
            num_processors=num_processors,
        )

    def _cache(self, num_rows: int, context: int) -> tuple[KVCache, list[np.ndarray]]:
        """A pool for so many rows, and their blocks, in no order."""
        plan, spec = self.plan, self.plan.spec
        width = -(-context // BLOCK_SIZE)
        heads = HeadSplit(0, spec.num_heads, 0, spec.num_kv_heads)
        cache = KVCache(spec, heads, num_rows * width + 1, BLOCK_SIZE, plan.dtype, plan.device)
        cache.pool.normal_(generator=torch.Generator(plan.device).manual_seed(0))
        blocks = np.random.default_rng(0).permutation(np.arange(1, num_rows * width + 1)).astype(np.int32)
        return cache, np.split(blocks, num_rows)

    def _decoding(self, decoder: Decoder, num_rows: int, weight_bytes: int, copy_rate: float) -> Iterator[Line]:
        plan, spec = self.plan, self.plan.spec
        cache, tables = self._cache(num_rows, plan.context)
        rows = [RowSpan([i + 5], plan.context - 1, table) for i, table in enumerate(tables)]
        batch = ForwardBatch.build(rows, BLOCK_SIZE, plan.device)
        graphed = self._graphed(decoder, num_rows)
        kv_bytes = KVCache.bytes_per_block(spec, spec.num_kv_heads, BLOCK_SIZE, plan.dtype) * num_rows * len(tables[0])
        name = f"decoding, {num_rows} rows of {plan.context} tokens"
        with torch.inference_mode():
            seconds = self._seconds(lambda: graphed(batch, cache))
            launched = self._seconds(lambda: decoder(batch, cache))
            same = self._agreement(decoder, graphed, batch, cache)
        yield Line(f"{name}, without graphs", launched * 1e3, "ms")
        yield Line(f"{name}, likeliest tokens as in torch's attention", same * 100, "%", same, 0.98)
        if num_rows == 1:
            times = seconds * copy_rate / weight_bytes
            yield Line(name, seconds * 1e3, "ms, times its weights' reading", times, 1.33, is_most=True)
        else:
            share = (weight_bytes + kv_bytes) / copy_rate / seconds
            yield Line(name, seconds * 1e3, "ms, share of its roof", share, 0.65)

    def _graphed(self, decoder: Decoder, num_rows: int) -> Forward:
        if self.is_gpu:
            return recorded(decoder, None)
        attention = decoder.attention
        assert isinstance(attention, TritonAttention)
        return GraphedDecoder(decoder, attention, [num_rows + 1], self.plan.context, lambda body: body)

    def _agreement(self, decoder: Decoder, graphed: Forward, batch: ForwardBatch, cache: KVCache) -> float:
        """Share of rows whose likeliest token is that of the reference attention."""
        found = graphed(batch, cache)
        reference = TorchAttention(BLOCK_SIZE, self.plan.device)
        for layer in decoder.layers:
            layer.attention.backend = reference
        expected = decoder.run(batch, cache, reference.plan(batch))
        for layer in decoder.layers:
            layer.attention.backend = decoder.attention
        assert found is not None
        assert expected is not None
        return float((found.argmax(-1) == expected.argmax(-1)).float().mean())

    def _prompt(self, decoder: Decoder, matmul_rate: float) -> Line:
        plan, spec = self.plan, self.plan.spec
        cache, tables = self._cache(1, plan.prompt)
        tokens = np.random.default_rng(1).integers(5, 250, plan.prompt).tolist()
        batch = ForwardBatch.build([RowSpan(tokens, 0, tables[0])], BLOCK_SIZE, plan.device)
        with torch.inference_mode():
            seconds = self._seconds(lambda: decoder(batch, cache))
        rate = plan.prompt * _operations(spec, plan.prompt / 2) / seconds
        name = f"prompt of {plan.prompt} tokens"
        return Line(name, plan.prompt / seconds, "tokens/s, share of the product's rate", rate / matmul_rate, 0.5)


def _operations(spec: ModelSpec, context: float) -> float:
    """Floating-point operations of a token, that sees so many others on average, without the head."""
    heads = spec.num_heads + 2 * spec.num_kv_heads
    matrices = spec.hidden_size * (heads * spec.head_dim + 3 * spec.intermediate_size)
    matrices += spec.num_heads * spec.head_dim * spec.hidden_size
    return spec.num_layers * (2 * matrices + 4 * context * spec.num_heads * spec.head_dim)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="run without a GPU, on a tiny shape")
    plan = REHEARSAL if parser.parse_args().rehearse else FULL
    if plan is FULL and not torch.cuda.is_available():
        raise SystemExit("error: there is no CUDA device; --rehearse runs without one")
    print(f"{'':66} {'measured':>10} {'of ceiling':>10} {'aim':>8}")
    lines = []
    for line in Bench(plan).lines():
        lines.append(line)
        ratio = "" if line.ratio is None else f"{line.ratio:.3g}"
        aim = "" if line.aim is None else ("<= " if line.is_most else ">= ") + f"{line.aim:g}"
        verdict = "" if line.is_met or plan is REHEARSAL else "  MISSED"
        print(f"{line.name:66} {line.measured:10.4g} {ratio:>10} {aim:>8}  {line.unit}{verdict}", flush=True)
    print(
        json.dumps(
            {"is_rehearsal": plan is REHEARSAL, "lines": [asdict(line) | {"is_met": line.is_met} for line in lines]}
        )
    )
    sys.exit(0 if plan is REHEARSAL or all(line.is_met for line in lines) else 1)


if __name__ == "__main__":
    main()
