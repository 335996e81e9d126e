"""Steps launched ahead of the host against the executor that knows everything: every answer of every call is the same.

The device is the CPU here. A copy to the host is revealed when a test says so: who reads one before waits for a device.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from funitel.model_server.attention import TorchAttention
from funitel.model_server.checkpoint import read_json
from funitel.model_server.decoder import Decoder
from funitel.model_server.executor import Executor, ExecutorOptions
from funitel.model_server.families import spec_of
from funitel.model_server.gpu.feeding import FeedingExecutor
from funitel.model_server.kv_cache import SpecPools
from funitel.model_server.parallel import HeadSplit, TensorParallel
from funitel.model_server.text import TextCodec
from funitel.model_server.weights import Weights
from funitel.proto.step import CachedBatch, GrammarType, SequenceStart, StepResult, WarmupLimits
from funitel_testing.executors import BLOCK_SIZE, chunk, start
from funitel_testing.tiny import save_tiny

CPU = torch.device("cpu")
PROMPT = list(range(40, 60))
OTHER = list(range(100, 133))
EOS_IDS = frozenset(range(256, 288))  # one token in nine: sequences of a random model end by them now and then

PLAIN: tuple[dict[str, Any], ...] = (
    {},
    {"ignore_eos": False},
    {"ignore_eos": False, "do_sample": True, "temperature": 1.5},
    {"ignore_eos": False, "temperature": 0.8, "top_k": 9, "top_p": 0.9, "repetition_penalty": 1.3},
    {"ignore_eos": False, "presence_penalty": 0.5, "count_penalty": 0.3, "top_n_tokens": 3},
    {"stop_sequences": ("a", "e", "i"), "do_sample": True},
    {"prefill_logprobs": True, "top_n_tokens": 2},
    {"raw_logprobs": True, "logit_bias": ((5, 2.0), (9, -3.0)), "frequency_penalty": 0.4},
)
FOLLOWED: tuple[dict[str, Any], ...] = (
    {"watermark": True, "ignore_eos": False},
    {"grammar": "(yes|no), (certainly|never) [0-9]{2,4}", "grammar_type": GrammarType.REGEX, "ignore_eos": False},
    {"grammar": "[a-z ]{3,20}", "grammar_type": GrammarType.REGEX, "do_sample": True, "ignore_eos": False},
)

NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


class Watched:
    """A copy to the host. While it is hidden whoever reads it would wait for a device."""

    hides = False
    hidden: dict[int, "Watched"] = {}

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers.clone()
        if self.hides:
            self.hidden[id(self)] = self

    def wait(self) -> np.ndarray:
        assert id(self) not in self.hidden, "the host waits for a step under way"
        return self._numbers.numpy()

    @classmethod
    def reveal_oldest(cls) -> None:
        if cls.hidden:
            del cls.hidden[next(iter(cls.hidden))]


@pytest.fixture
def hidden_copies() -> Iterator[None]:
    """Copies hide until they are revealed."""
    Watched.hides = True
    yield
    Watched.hides = False
    Watched.hidden.clear()


@dataclass
class Both:
    """Two executors over one model: one that knows each step's result at once, one that launches ahead."""

    known: Executor
    ahead: FeedingExecutor


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = save_tiny("llama", tmp_path_factory.mktemp("tiny"))
    spec = spec_of(read_json(folder / "config.json"))
    parallel = TensorParallel()
    weights = Weights(folder, torch.float32, CPU, spec.names.prefix)
    options = ExecutorOptions(
        device=CPU,
        dtype=torch.float32,
        block_size=BLOCK_SIZE,
        memory_fraction=1.0,
        allow_prefill_logprobs=True,
        eos_token_ids=EOS_IDS,
    )
    parts: tuple[Any, ...] = (
        spec,
        Decoder(spec, weights, parallel, TorchAttention(BLOCK_SIZE, CPU)),
        SpecPools(spec, HeadSplit(0, spec.num_heads, 0, spec.num_kv_heads), BLOCK_SIZE, torch.float32, CPU),
        TextCodec(folder),
        parallel,
        options,
    )
    both = Both(Executor(*parts), FeedingExecutor(*parts, copy=Watched))
    for executor in (both.known, both.ahead):
        executor.warmup([start(0, PROMPT)], WarmupLimits(max_prefill_tokens=64, max_batch_total_tokens=2000))
    return both


@pytest.fixture
def both(loaded: Both) -> Both:
    for executor in (loaded.known, loaded.ahead):
        executor.clear()
        executor.max_prefill_tokens = 64
    return loaded


def said(answer: object) -> str:
    """An answer without its times; as text, for NaN is not equal to itself."""
    if isinstance(answer, StepResult):
        answer = replace(answer, forward_ns=0, decode_ns=0, total_ns=0, concat_ns=0 if answer.concat_ns else None)
    return repr(answer)


def assert_same(found: str, expected: str) -> None:
    """Equal but for rounding: rows of which the host has yet to learn that they have ended are more company."""
    assert NUMBER.sub("x", found) == NUMBER.sub("x", expected)
    assert list(map(float, NUMBER.findall(found))) == pytest.approx(
        list(map(float, NUMBER.findall(expected))), abs=1e-4
    )


@dataclass
class Known:
    """What a router knows of a sequence: tokens to compute, those planned, and whether it has seen its end."""

    start: SequenceStart
    num_planned: int = 0
    is_over: bool = False

    @property
    def missing(self) -> int:
        """Tokens of the prompt that no step was planned for yet."""
        return len(self.start.input_ids) - self.num_planned

    @property
    def ends_by_length(self) -> bool:
        """Whether the steps planned give it all it may have."""
        return self.num_planned >= len(self.start.input_ids) + self.start.stopping.max_new_tokens - 1


@dataclass
class Router:
    """Plans steps at random, up to two of them before it sees an answer, and makes each call on both executors."""

    both: Both
    rng: np.random.Generator
    kinds: tuple[dict[str, Any], ...]
    sequences: dict[int, Known] = field(default_factory=dict)
    batch: list[int] = field(default_factory=list)  # rows of batch 1
    answers: deque[tuple[str, Callable[[], object], bool]] = field(default_factory=deque)
    num_ended: int = 0
    _next_id: int = 1

    def call(self, make: Callable[[Any], Callable[[], object]], *, is_step: bool) -> None:
        """Make a call on both; one of them is asked for its answer when that is revealed."""
        expected = make(self.both.known)()
        self.answers.append((said(expected), make(self.both.ahead), is_step))
        if is_step:
            assert isinstance(expected, StepResult)
            self._results.append(expected)

    _results: deque[StepResult] = field(default_factory=deque)

    @property
    def num_steps(self) -> int:
        """Steps under way."""
        return sum(is_step for *_, is_step in self.answers)

    def settle(self) -> None:
        """See the oldest answer."""
        expected, answer, is_step = self.answers.popleft()
        if is_step:
            Watched.reveal_oldest()
        assert_same(said(answer()), expected)
        if not is_step:
            return
        result = self._results.popleft()
        for generation in result.generations:
            sequence = self.sequences.get(generation.request_id)
            if sequence is None:
                continue
            if generation.finished is not None:
                sequence.is_over = True
                self.num_ended += 1
        if result.batch is None:
            ended = {i for i in self.batch if i in self.sequences and self.sequences[i].is_over}
            self.batch = [i for i in self.batch if i not in ended]

    def turn(self) -> None:
        """See answers until there is room, drop who has left, plan a step and send it."""
        while self.num_steps == 2 or (self.answers and self.rng.random() < 0.3):
            self.settle()
        for i in list(self.sequences):
            if self.sequences[i].is_over or self.rng.random() < 0.03:
                del self.sequences[i]
        keep = [i for i in self.batch if i in self.sequences]
        if len(keep) < len(self.batch):
            self._drop_all_but(keep)
        self._send()

    def _drop_all_but(self, keep: list[int]) -> None:
        self.batch = keep
        if keep:
            self.call(lambda executor: executor.begin_filter(1, keep, is_ahead=True), is_step=False)
        else:
            for executor in (self.both.known, self.both.ahead):
                executor.clear(1)

    def _send(self) -> None:
        updates = []
        for i in self.batch:
            sequence = self.sequences[i]
            if sequence.missing > 1:
                count = min(sequence.missing, int(self.rng.integers(0, 12)))
                updates.append(chunk(i, count))
            else:
                count = 0 if sequence.ends_by_length else int(self.rng.random() < 0.9)
                if not count:
                    updates.append(chunk(i, 0))
            sequence.num_planned += count
        starts = [self._start() for _ in range(self.rng.integers(0, 3)) if len(self.sequences) < 6]
        cached = CachedBatch(1, tuple(self.batch)) if self.batch else None
        self.batch = [*self.batch, *(each.request_id for each in starts)]
        if starts:
            steps = lambda executor: executor.compute_prefill(1, starts, cached, updates, is_ahead=True)  # noqa: E731
        elif cached is not None:
            steps = lambda executor: executor.compute_decode([cached], updates, is_ahead=True)  # noqa: E731
        else:
            return
        self.call(lambda executor: steps(executor).describe, is_step=True)

    def _start(self) -> SequenceStart:
        request_id, self._next_id = self._next_id, self._next_id + 1
        prompt = self.rng.integers(0, 256, self.rng.integers(1, 34)).tolist()
        count = int(self.rng.integers(1, len(prompt) + 1))
        kind = self.kinds[self.rng.integers(len(self.kinds))]
        sequence = start(request_id, prompt, int(self.rng.integers(1, 20)), seed=request_id, chunk_len=count, **kind)
        self.sequences[request_id] = Known(sequence, num_planned=count)
        return sequence


def drive(both: Both, seed: int, kinds: tuple[dict[str, Any], ...], num_turns: int = 40) -> Router:
    router = Router(both, np.random.default_rng(seed), kinds)
    for _ in range(num_turns):
        router.turn()
    while router.answers:
        router.settle()
    return router


@pytest.mark.usefixtures("hidden_copies")
@pytest.mark.parametrize("seed", range(3))
def test_every_answer_is_the_same_and_no_step_waits_for_the_one_before_it(both: Both, seed: int) -> None:
    assert drive(both, seed, PLAIN).num_ended > 5


@pytest.mark.parametrize("seed", range(2))
def test_every_answer_is_the_same_where_the_host_follows_some_rows(both: Both, seed: int) -> None:
    assert drive(both, seed, (*PLAIN[:3], *FOLLOWED)).num_ended > 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 60))
def test_every_answer_is_the_same_over_many_schedules(both: Both, seed: int) -> None:
    drive(both, seed, PLAIN if seed % 2 else (*PLAIN, *FOLLOWED), num_turns=120)
