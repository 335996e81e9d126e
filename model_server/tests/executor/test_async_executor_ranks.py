"""Two ranks that launch ahead, each on a thread: the same steps on both, and the answers of ranks that know everything.

One rank asks for each answer at once and the other as late as it may, so what they launch must not depend on that.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.executor.async_sampling import AsyncSampling
from funitel.model_server.executor.executor import Executor
from funitel.model_server.executor.interface import ExecutorOptions, PendingStep
from funitel.model_server.files.integrity import read_json
from funitel.model_server.gpu_sampling.ops import TorchMaths
from funitel.model_server.kv_cache.pool import SpecPools
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.proto.step import CachedBatch, GrammarType, SequenceStart, StepResult, WarmupLimits
from funitel.proto.strategy import DecodingStrategy
from funitel_testing.executors import BLOCK_SIZE, start
from funitel_testing.tiny import save_tiny

CPU = torch.device("cpu")
PROMPT = list(range(40, 60))
EOS_IDS = frozenset(range(256, 288))
NUM_STEPS = 14

PLAIN: tuple[dict[str, Any], ...] = (
    {},
    {"ignore_eos": False, "do_sample": True, "temperature": 2.0},
    {"ignore_eos": False, "temperature": 1.8, "repetition_penalty": 1.3},
    {"stop_sequences": ("a", "e", "i"), "do_sample": True},
    {"watermark": True, "ignore_eos": False},
)
IN_WORDS: tuple[dict[str, Any], ...] = (
    {"top_n_tokens": 2, "prefill_logprobs": True},
    {"prompt_logprobs": 3},
    {"grammar": "(yes|no), (certainly|never)", "grammar_type": GrammarType.REGEX, "ignore_eos": False},
    {"strategy": DecodingStrategy(mirostat=2, mirostat_tau=3.0)},
    {"strategy": DecodingStrategy(dry_multiplier=2.0, fsd_alpha=0.5, no_repeat_ngram_size=2)},
)


class Meeting:
    """Where the threads of ranks exchange tensors: all bring one, all see all."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.brought: list[torch.Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self.brought[rank] = x
        self.barrier.wait()
        seen = [each.clone() for each in self.brought]
        self.barrier.wait()
        assert len({each.dtype for each in seen}) == 1, "ranks are in different calls"
        return seen


class ThreadRanks(TensorParallel):
    """A rank that is a thread."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, 2)
        self.meeting = meeting

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.meeting.exchange(self.rank, x)
        assert parts[0].shape == parts[1].shape, "ranks compute different rows"
        return x.copy_(parts[0] + parts[1])

    def gather_columns(self, x: torch.Tensor, total: int) -> torch.Tensor | None:
        parts = self.meeting.exchange(self.rank, x)
        return None if self.rank else torch.cat(parts, dim=1)

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        parts = self.meeting.exchange(self.rank, x)
        assert parts[0].shape == parts[1].shape, "ranks share different rows"
        return x.copy_(parts[source])

    def smallest(self, value: int) -> int:
        return min(int(each) for each in self.meeting.exchange(self.rank, torch.tensor([value])))


Make = Callable[[Path, ThreadRanks], Executor]


def make_known(folder: Path, parallel: ThreadRanks) -> Executor:
    return Executor(*parts_of(folder, parallel))


def make_ahead(folder: Path, parallel: ThreadRanks) -> Executor:
    return Executor(*parts_of(folder, parallel), partial(AsyncSampling, maths=TorchMaths()))


def parts_of(folder: Path, parallel: ThreadRanks) -> tuple[Any, ...]:
    spec = spec_of(read_json(folder / "config.json"))
    heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, 2, parallel.rank)
    decoder = Decoder(
        spec, Weights(folder, torch.float32, CPU, spec.names.prefix), parallel, TorchAttention(BLOCK_SIZE, CPU)
    )
    options = ExecutorOptions(
        device=CPU,
        dtype=torch.float32,
        block_size=BLOCK_SIZE,
        memory_fraction=1.0,
        allow_prefill_logprobs=True,
        eos_token_ids=EOS_IDS,
    )
    pools = SpecPools(spec, heads, BLOCK_SIZE, torch.float32, CPU)
    return spec, decoder, pools, TextCodec(folder), parallel, options


def run(executor: Executor, starts: list[SequenceStart], most_unseen: int) -> list[StepResult]:
    """What a rank describes, step by step; it asks for an answer when more than `most_unseen` are under way."""
    executor.warmup([start(0, PROMPT)], WarmupLimits(max_prefill_tokens=64, max_batch_total_tokens=2000))
    batch = CachedBatch(1, tuple(each.request_id for each in starts))
    answers = []
    steps: deque[PendingStep] = deque([executor.compute_prefill(1, starts, is_ahead=True)])
    for _ in range(NUM_STEPS):
        while len(steps) > most_unseen:
            answers.append(steps.popleft().describe())
        steps.append(executor.compute_decode([batch], is_ahead=True))
    answers += [step.describe() for step in steps]
    return answers


def together(make: Make, folder: Path, starts: list[SequenceStart], most_unseen: tuple[int, int]) -> list[Any]:
    """What both ranks describe, step by step, by request."""
    meeting = Meeting(2)

    def serve(rank: int) -> list[StepResult]:
        return run(make(folder, ThreadRanks(rank, meeting)), starts, most_unseen[rank])

    with ThreadPoolExecutor(2) as threads:
        by_rank = list(threads.map(serve, range(2)))
    first, second = ([step.memories for step in steps] for steps in by_rank)
    assert first == second
    by_step = [[*one.generations, *other.generations] for one, other in zip(*by_rank, strict=True)]
    described = [
        sorted((g.request_id, g.tokens.ids, g.tokens.texts, g.finished, len(g.top_tokens)) for g in step)
        for step in by_step
    ]
    return [described, [[(i, round(mu, 3)) for i, mu in memories] for memories in first]]


@pytest.mark.parametrize("kinds", [PLAIN, (*PLAIN, *IN_WORDS)], ids=["plain", "in words"])
def test_ranks_launch_the_same_steps_whenever_they_learn_of_the_last(
    kinds: tuple[dict[str, Any], ...], tmp_path: Path
) -> None:
    folder = save_tiny("llama", tmp_path)
    starts = [start(i, PROMPT[i:], 5 if i == 3 else 30, seed=i, **kind) for i, kind in enumerate(kinds)]
    expected = together(make_known, folder, starts, (0, 0))
    assert sum(len(step) for step in expected[0]) < (NUM_STEPS + 1) * len(starts), "no sequence ended"
    for most_unseen in ((1, 0), (0, 1)):
        assert together(make_ahead, folder, starts, most_unseen) == expected
