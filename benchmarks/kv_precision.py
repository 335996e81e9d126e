"""Compare decode speed by the precision of the KV pool: many sequences with long contexts, without HTTP or router.

Each precision has a process of its own with the model and a pool; rounds alternate between them. One context is
computed and copied to the blocks of every other sequence. Printed are tokens/s, the median of the rounds with the
smallest and the largest, and the ratio to the first precision. The last line on stdout is one JSON object.

    python benchmarks/kv_precision.py
    python benchmarks/kv_precision.py --dtypes float16 int8 uint4 --streams 16 --context 4000 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from funitel.model_server.hub.resolve import resolve
from funitel.model_server.loading.decoder import load
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.step import SamplingParams, SequenceStart, StoppingParams, WarmupLimits

DTYPES = ("float16", "bfloat16", "int8", "uint4")
TEXT = Path(__file__).parent / "heldout_long.txt"
CHUNK_TOKENS = 512


def work(arguments: argparse.Namespace) -> None:
    """Load the model with one precision and prepare the contexts, then decode once for each line of stdin."""
    folder = resolve(arguments.model).folder
    settings = ModelServerSettings(
        model_id=arguments.model,
        kv_cache_dtype=arguments.worker,
        quantize=arguments.quantize,
        num_threads=arguments.threads,
    )
    executor, info = load(settings, folder)
    context, steps, streams = arguments.context, arguments.steps, arguments.streams
    room = -(-(context + steps) // info.block_size)
    blocks = [tuple(range(1 + i * room, 1 + (i + 1) * room)) for i in range(streams)]

    def start(index: int, num_tokens: int, cache_len: int, new_tokens: int) -> SequenceStart:
        return SequenceStart(
            request_id=index,
            input_ids=tuple(ids[:num_tokens]),
            sampling=SamplingParams(),
            stopping=StoppingParams(max_new_tokens=new_tokens, ignore_eos=True),
            blocks=blocks[index],
            cache_len=cache_len,
        )

    ids = [3 + ord(letter) % 200 for letter in TEXT.read_text()[:context]]
    capacity = (streams * room + 1) * info.block_size
    executor.warmup([start(0, CHUNK_TOKENS, 0, 1)], WarmupLimits(max_batch_total_tokens=capacity))
    for end in range(CHUNK_TOKENS, context, CHUNK_TOKENS):
        executor.compute_prefill(0, [start(0, end, end - CHUNK_TOKENS, 1)]).describe()
    pool = executor.runner.pool.pool
    for own in blocks[1:]:
        pool[own[0] : own[-1] + 1] = pool[blocks[0][0] : blocks[0][-1] + 1]
    print(json.dumps({"pool": pool.numel() * pool.element_size()}), flush=True)
    for _ in sys.stdin:
        cached = (context - 1) // CHUNK_TOKENS * CHUNK_TOKENS
        starts = [start(i, cached + 16, cached, steps) for i in range(streams)]
        result = executor.compute_prefill(0, starts).describe()
        began, count = time.monotonic(), 0
        while result.batch is not None:
            result = executor.compute_decode([result.batch]).describe()
            count += sum(len(generation.tokens.ids) for generation in result.generations)
        print(json.dumps({"tokens": count, "seconds": time.monotonic() - began}), flush=True)


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES)
    parser.add_argument("--quantize", default=None)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--context", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments)
        return
    workers = {}
    for dtype in arguments.dtypes:
        workers[dtype] = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--worker", dtype],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        print(f"{dtype}: pool of {_answer(workers[dtype])['pool'] / 1e6:,.0f} MB", flush=True)
    rates: dict[str, list[float]] = {dtype: [] for dtype in workers}
    for _ in range(arguments.rounds):
        for dtype, worker in workers.items():
            assert worker.stdin is not None
            print(file=worker.stdin, flush=True)
            answer = _answer(worker)
            rates[dtype].append(answer["tokens"] / answer["seconds"])
    for worker in workers.values():
        worker.communicate()
    first = statistics.median(rates[arguments.dtypes[0]])
    for dtype, own in rates.items():
        middle = statistics.median(own)
        print(f"{dtype}: {middle:.1f} tokens/s ({min(own):.1f}-{max(own):.1f}), ratio {middle / first:.2f}")
    print(json.dumps(rates))


def _answer(worker: subprocess.Popen[str]) -> dict[str, float]:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise SystemExit(f"a worker has ended with {worker.wait()}")
    answer: dict[str, float] = json.loads(line)
    return answer


if __name__ == "__main__":
    main()
