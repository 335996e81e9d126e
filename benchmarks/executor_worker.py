"""Run the executor without HTTP, router and gRPC, for http_overhead.py.

Each line of stdin is a batch, `streams tokens`; its line of stdout has tokens, seconds and CPU seconds.
"""

import argparse
import sys
import time

from http_overhead import MAX_PROMPT_TOKENS, POOL_TOKENS, prompts_of

from funitel.model_server.hub.resolve import resolve
from funitel.model_server.loading.decoder import load
from funitel.model_server.settings import ModelServerSettings
from funitel.proto.step import SamplingParams, SequenceStart, StoppingParams, WarmupLimits


def work(arguments: argparse.Namespace) -> None:
    """Load the model, then run a batch for each line of stdin."""
    settings = ModelServerSettings(
        model_id=arguments.model,
        dtype=arguments.dtype,
        quantize=arguments.quantize,
        num_threads=arguments.threads,
    )
    executor, info = load(settings, resolve(arguments.model).folder)

    def start(number: int, prompt: str, tokens: int, room: int) -> SequenceStart:
        return SequenceStart(
            request_id=number,
            inputs=prompt,
            sampling=SamplingParams(),
            stopping=StoppingParams(max_new_tokens=tokens),
            blocks=tuple(range(1 + number * room, 1 + (number + 1) * room)),
        )

    warm = start(0, "a" * 64, 1, 0)
    executor.warmup([warm], WarmupLimits(max_batch_total_tokens=POOL_TOKENS))
    print("ready", flush=True)
    for line in sys.stdin:
        streams, tokens = map(int, line.split())
        room = -(-(MAX_PROMPT_TOKENS + tokens) // info.block_size)
        starts = [start(i, prompt, tokens, room) for i, prompt in enumerate(prompts_of(streams))]
        begin, cpu, count = time.monotonic(), time.process_time(), 0
        result = executor.compute_prefill(0, starts).describe()
        while True:
            count += sum(len(generation.tokens.ids) for generation in result.generations)
            if result.batch is None:
                break
            result = executor.compute_decode([result.batch]).describe()
        print(count, time.monotonic() - begin, time.process_time() - cpu, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype")
    parser.add_argument("--quantize")
    parser.add_argument("--threads", type=int, required=True)
    work(parser.parse_args())
