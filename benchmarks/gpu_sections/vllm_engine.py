"""The process with vLLM's offline engine: times requests, and prints a JSON object for each part as it is done.

`peer_vllm.py` starts it with vLLM's packages alone on PYTHONPATH; it imports nothing else of this project. Its argument
is a JSON object of the settings that `Engine` reads.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

CAPTURED = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)  # sizes of steps that are recorded as CUDA graphs
ERROR_CHARS = 300
WARM_STREAMS, WARM_TOKENS = 4, 8
UNUSED_IDS = 300  # at the end of the vocabulary, where special tokens lie
MEMORY_SHARE = 0.85

Part = dict[str, Any]


@dataclass(frozen=True)
class Engine:
    """vLLM's engine, and what is asked of it: tokens of prompts and answers, numbers of streams."""

    llm: Any
    sampling: Callable[..., Any]  # makes vLLM's sampling parameters
    vocab_size: int
    prompt: int
    streams: int
    answer: int
    many_streams: int
    many_answer: int

    def prompts(self, count: int, seed: int) -> list[dict[str, list[int]]]:
        """Prompts of random tokens, others for each seed."""
        source = random.Random(seed)
        most = max(self.vocab_size - UNUSED_IDS, self.vocab_size // 2)
        ids = [[source.randrange(most) for _ in range(self.prompt)] for _ in range(count)]
        return [{"prompt_token_ids": each} for each in ids]

    def seconds_of(self, prompts: list[dict[str, list[int]]], answer: int) -> tuple[float, int]:
        """The time of all requests at once, and how many tokens of their prompts were cached.

        Raises:
            ValueError: there are fewer tokens than were asked for.
        """
        sampling = self.sampling(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        if made != answer * len(prompts):
            raise ValueError(f"{made} tokens came of {len(prompts)} streams of {answer}")
        return seconds, sum(output.num_cached_tokens or 0 for output in outputs)

    def warm(self) -> Iterator[Part]:
        """A few requests, which compile what is compiled at first use."""
        yield {"seconds": self.seconds_of(self.prompts(WARM_STREAMS, 1), WARM_TOKENS)[0]}

    def whole(self) -> Iterator[Part]:
        """Two rounds of new prompts; the second one counts."""
        for number in (2, 3):
            seconds, _ = self.seconds_of(self.prompts(self.streams, number), self.answer)
        yield {"tokens_per_s": self.streams * self.answer / seconds}

    def cached(self) -> Iterator[Part]:
        """Many streams: their prompts first, then the same ones from the cache with answers."""
        prompts = self.prompts(self.many_streams, 4)
        all_tokens = self.many_streams * self.prompt
        seconds, _ = self.seconds_of(prompts, 1)
        yield {"prompt_tokens_per_s": all_tokens / seconds}
        seconds, cached = self.seconds_of(prompts, self.many_answer)
        yield {"tokens_per_s": self.many_streams * self.many_answer / seconds, "cached_share": cached / all_tokens}

    def single(self) -> Iterator[Part]:
        """One stream: the difference of a long and a short answer to the same cached prompt."""
        prompts = self.prompts(1, 5)
        short = max(1, self.answer // 8)
        self.seconds_of(prompts, 1)
        few, many = (self.seconds_of(prompts, answer)[0] for answer in (short, short + self.answer))
        yield {"ms_per_token": (many - few) / self.answer * 1e3}


def compilation(way: str, streams: int) -> dict[str, Any]:
    """vLLM's compilation config: compiled with graphs, with graphs alone, with neither."""
    sizes = sorted({streams, *(size for size in CAPTURED if size < streams)})
    ways: dict[str, dict[str, Any]] = {
        "compile": {"cudagraph_capture_sizes": sizes},
        "graphs": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes},
        "eager": {"mode": 0, "cudagraph_mode": "NONE"},
    }
    return ways[way]


def start(vllm: Any, model: str, way: str, dtype: str, max_model_len: int, **asked: int) -> Engine:
    """Load the engine as it is configured best for these requests."""
    streams = max(asked["streams"], asked["many_streams"])
    llm = vllm.LLM(
        model=model,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=streams,
        gpu_memory_utilization=MEMORY_SHARE,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        load_format="safetensors",
        enforce_eager=way == "eager",
        compilation_config=compilation(way, streams),
        disable_log_stats=True,
        seed=1,
    )
    return Engine(llm, vllm.SamplingParams, **asked)


def run(settings: dict[str, Any], tell: Callable[[Part], None]) -> int:
    """Start the engine and time every part, whatever becomes of the others; returns the exit status."""
    if find_spec("vllm") is None:
        tell({"part": "skipped", "reason": "vLLM is not installed"})
        return 0
    begin = time.perf_counter()
    try:
        vllm = import_module("vllm")
        vllm.LLM  # noqa: B018 - imported when it is first read
    except ImportError as error:
        tell({"part": "skipped", "reason": f"vLLM cannot be imported: {_line_of(error)}"})
        return 0
    try:
        engine = start(vllm, **settings)
    except Exception as error:
        tell({"part": "start", "error": _line_of(error)})
        return 1
    tell({"part": "start", "seconds": time.perf_counter() - begin, "version": vllm.__version__})
    for part in (engine.warm, engine.whole, engine.cached, engine.single):
        try:
            for figures in part():
                tell({"part": part.__name__, **figures})
        except Exception as error:  # the next part may work
            tell({"part": part.__name__, "error": _line_of(error)})
    return 0


def _line_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:ERROR_CHARS]


def main() -> None:
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what vLLM prints is no figure
        code = run(json.loads(sys.argv[1]), lambda part: print(json.dumps(part), file=out, flush=True))
        print(json.dumps({"part": "end"}), file=out, flush=True)
    sys.stderr.flush()
    os._exit(code)  # the process of the engine core ends when its pipe closes; an orderly end takes seconds


if __name__ == "__main__":
    main()
