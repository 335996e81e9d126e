"""Steps launched ahead of the host against the executor that knows everything: every answer of every call is the same.

The device is the CPU here. A copy to the host is revealed when a test says so: who reads one before waits for a device.
"""

import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.executor.async_sampling import AsyncSampling
from funitel.model_server.executor.executor import Executor
from funitel.model_server.executor.interface import ExecutorOptions
from funitel.model_server.executor.row_rules import NUM_OPENING_TOKENS
from funitel.model_server.files.integrity import read_json
from funitel.model_server.gpu_sampling.ops import TorchMaths
from funitel.model_server.kv_cache.pool import SpecPools
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.proto.errors import ResourceExhausted, UnknownBatch
from funitel.proto.step import CachedBatch, GrammarType, RowUpdate, SequenceStart, StepResult, WarmupLimits
from funitel.proto.strategy import DecodingStrategy
from funitel_testing.executors import BLOCK_SIZE, chunk, decode, load_executor, num_sequences, prefill, start
from funitel_testing.sampled_rows import STRATEGIES
from funitel_testing.tiny import save_tiny
from funitel_testing.tiny_seq2seq import OTHER_LANGUAGE_ID, save_tiny_seq2seq

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
    {"prompt_logprobs": 3},
    {"raw_logprobs": True, "logit_bias": ((5, 2.0), (9, -3.0)), "frequency_penalty": 0.4},
    {"stop_token_ids": tuple(range(60, 100)), "do_sample": True, "temperature": 1.5},
)
FOLLOWED: tuple[dict[str, Any], ...] = (
    {"watermark": True, "ignore_eos": False},
    {"min_new_tokens": 5, "stop_token_ids": (7, 8), "ignore_eos": False, "do_sample": True, "temperature": 1.5},
    {"banned_tokens": tuple((i, i + 1) for i in range(100)), "allowed_token_ids": tuple(range(30, 90))},
    {"grammar": "(yes|no), (certainly|never) [0-9]{2,4}", "grammar_type": GrammarType.REGEX, "ignore_eos": False},
    {"grammar": "[a-z ]{3,20}", "grammar_type": GrammarType.REGEX, "do_sample": True, "ignore_eos": False},
    *(
        {"strategy": DecodingStrategy(**STRATEGIES[name]), "temperature": 1.5, "top_n_tokens": 2}
        for name in ("max-k", "tail-free", "xtc", "top-n-sigma")
    ),
    *(
        {"strategy": DecodingStrategy(**STRATEGIES[name]), "temperature": 1.5, "raw_logprobs": name == "mirostat 1"}
        for name in ("mirostat 1", "mirostat 2", "dry", "fsd", "randomized fsd", "several")
    ),
    {"strategy": DecodingStrategy(no_repeat_ngram_size=2), "ignore_eos": False},
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

    @classmethod
    def reveal_all_but(cls, count: int) -> None:
        while len(cls.hidden) > count:
            cls.reveal_oldest()


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
    ahead: Executor
    num_opening: int = 0  # tokens of the model's own behind a prompt


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
    return warm(Both(Executor(*parts), Executor(*parts, partial(AsyncSampling, maths=TorchMaths(), copy=Watched))))


def warm(both: Both) -> Both:
    for executor in (both.known, both.ahead):
        executor.warmup([start(0, PROMPT)], WarmupLimits(max_prefill_tokens=64, max_batch_total_tokens=2000))
    return both


@pytest.fixture(scope="module", params=["t5", "bart", "mbart"])
def encoder_decoders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    """An encoder-decoder: mbart begins with a language that is forced, and it and bart end so."""
    loaded = load_executor(save_tiny_seq2seq(request.param, tmp_path_factory.mktemp(request.param)))
    runner, options = loaded.runner, replace(loaded.options, eos_token_ids=EOS_IDS)
    parts = loaded.spec, runner.decoder, runner.pools, loaded.codec, loaded.parallel, options
    on_device = partial(AsyncSampling, maths=TorchMaths(), copy=Watched)
    known, ahead = Executor(*parts, rules=runner.rules), Executor(*parts, on_device, runner.rules)
    return warm(Both(known, ahead, num_opening=NUM_OPENING_TOKENS))


@pytest.fixture
def both(loaded: Both) -> Both:
    for executor in (loaded.known, loaded.ahead):
        executor.clear()
        executor.batches.max_prefill_tokens = 64
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
    num_opening: int
    num_planned: int = 0
    is_over: bool = False

    @property
    def missing(self) -> int:
        """Tokens of the prompt that no step was planned for yet."""
        return len(self.start.input_ids) + self.num_opening - self.num_planned

    @property
    def ends_by_length(self) -> bool:
        """Whether the steps planned give it all it may have."""
        return self.start.stopping.max_new_tokens - 1 <= -self.missing


@dataclass
class Router:
    """Plans steps at random, up to `max_steps` before it sees an answer, and makes each call on both executors."""

    both: Both
    rng: np.random.Generator
    kinds: tuple[dict[str, Any], ...]
    max_steps: int
    sequences: dict[int, Known] = field(default_factory=dict)
    batch: list[int] = field(default_factory=list)  # rows of batch 1
    answers: deque[tuple[str, Callable[[], object], bool]] = field(default_factory=deque)
    num_ended: int = 0
    _next_id: int = 1

    def call(self, make: Callable[[Any], Callable[[], object]], *, is_step: bool) -> None:
        """Make a call on both; one of them is asked for its answer when that is revealed.

        A third step is launched once the device has computed the first, which the router has not heard of.
        """
        if is_step and self.num_steps == 2:
            Watched.reveal_all_but(1)
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
            Watched.reveal_all_but(self.num_steps)
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
        while self.num_steps == self.max_steps or (self.answers and self.rng.random() < 0.3):
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
        self.sequences[request_id] = Known(sequence, self.both.num_opening, num_planned=count)
        return sequence


def drive(both: Both, seed: int, kinds: tuple[dict[str, Any], ...], num_turns: int = 40, max_steps: int = 2) -> Router:
    router = Router(both, np.random.default_rng(seed), kinds, max_steps)
    for _ in range(num_turns):
        router.turn()
    while router.answers:
        router.settle()
    return router


@pytest.mark.usefixtures("hidden_copies")
@pytest.mark.parametrize("max_steps", [2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_every_answer_is_the_same_and_no_step_waits_for_the_one_before_it(
    both: Both, seed: int, max_steps: int
) -> None:
    assert drive(both, seed, PLAIN, max_steps=max_steps).num_ended > 5


@pytest.mark.parametrize("max_steps", [2, 3])
@pytest.mark.parametrize("seed", range(2))
def test_every_answer_is_the_same_where_the_host_follows_some_rows(both: Both, seed: int, max_steps: int) -> None:
    assert drive(both, seed, (*PLAIN[:3], *FOLLOWED), max_steps=max_steps).num_ended > 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 60))
def test_every_answer_is_the_same_over_many_schedules(both: Both, seed: int) -> None:
    kinds = PLAIN if seed % 2 else (*PLAIN, *FOLLOWED)
    drive(both, seed, kinds, num_turns=120, max_steps=2 + seed // 2 % 2)


@pytest.mark.usefixtures("hidden_copies")
@pytest.mark.parametrize("seed", range(2))
def test_every_answer_of_an_encoder_decoder_is_the_same_and_no_step_waits(encoder_decoders: Both, seed: int) -> None:
    """Tokens that must follow are on the device before the host has heard of those before them."""
    kinds = (*PLAIN, {"frequency_penalty": 0.7})
    if encoder_decoders.known.runner.rules.takes_first_token:
        kinds = (*kinds, {"first_token": OTHER_LANGUAGE_ID, "frequency_penalty": 0.7, "top_n_tokens": 2})
    assert drive(encoder_decoders, seed, kinds).num_ended > 5


@pytest.mark.parametrize("seed", range(2))
def test_every_answer_of_an_encoder_decoder_is_the_same_where_the_host_follows_some_rows(
    encoder_decoders: Both, seed: int
) -> None:
    assert drive(encoder_decoders, seed, (*PLAIN[:3], *FOLLOWED)).num_ended > 5


# What the device must never be waited for, and what must not change anything


class NoWaiting(TorchDispatchMode):
    """Refuses what makes a host wait for a device: values of tensors, and results whose size depends on them."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not any(each in name for each in self.WAITING), f"{name} waits for the device"
        if name == "index":
            assert all(at is None or at.dtype is not torch.bool for at in args[1]), "a mask's size is the device's"
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("hidden_copies")
def test_two_steps_are_queued_without_a_word_from_the_device(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = [start(i, PROMPT[i:], 8, seed=i, **kind) for i, kind in enumerate(PLAIN)]
    batch = CachedBatch(1, tuple(each.request_id for each in starts))
    steps = [both.ahead.compute_prefill(1, starts, is_ahead=True)]
    Watched.reveal_oldest()
    steps[0].describe()
    for method in ("tolist", "item", "cpu", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, method, pytest.fail)
    with NoWaiting():
        steps += [both.ahead.compute_decode([batch], is_ahead=True) for _ in range(2)]
    monkeypatch.undo()
    assert len(Watched.hidden) == 2
    prefill(both.known, 1, starts)
    for step in steps[1:]:
        Watched.reveal_oldest()
        assert_same(said(step.describe()), said(both.known.compute_decode([batch], is_ahead=True).describe()))


@pytest.mark.usefixtures("hidden_copies")
def test_steps_of_an_encoder_decoder_are_queued_without_a_word_from_the_device(encoder_decoders: Both) -> None:
    starts = [start(i, PROMPT[i:], 8, seed=i, **kind) for i, kind in enumerate(PLAIN)]
    batch = CachedBatch(1, tuple(each.request_id for each in starts))
    both = encoder_decoders
    prefill(both.known, 1, starts)
    steps = [both.ahead.compute_prefill(1, starts, is_ahead=True)]
    Watched.reveal_oldest()
    steps[0].describe()
    with NoWaiting():
        steps += [both.ahead.compute_decode([batch], is_ahead=True) for _ in range(2)]
    assert len(Watched.hidden) == 2
    for step in steps[1:]:
        Watched.reveal_oldest()
        assert_same(said(step.describe()), said(both.known.compute_decode([batch], is_ahead=True).describe()))


def test_a_caller_who_has_seen_every_answer_finds_all_as_it_is_without_a_device(both: Both) -> None:
    """Calls that are not numbered, one after the other: nothing is computed of a row that has ended."""
    for executor in (both.known, both.ahead):
        starts = [start(1, PROMPT, 3), start(2, OTHER, 9, ignore_eos=False, seed=3, do_sample=True, temperature=3.0)]
        result, rows = prefill(executor, 1, starts), []
        while result.batch is not None:
            rows.append((result.num_forward_rows, result.batch))
            result = decode(executor, [result.batch])
        if executor is both.known:
            expected = rows
    assert rows == expected


def test_a_batch_that_ended_in_the_step_before_is_empty_to_who_plans_ahead(both: Both) -> None:
    """Whether or not the host has heard of its end."""
    for executor in (both.known, both.ahead):
        executor.compute_prefill(1, [start(1, PROMPT, 1)]).describe()
        ended = CachedBatch(1, (1,))
        assert executor.begin_filter(1, [1], is_ahead=True)() == CachedBatch(1, ())
        step = executor.compute_decode([ended], [RowUpdate(1, (30,), 1)], is_ahead=True).describe()
        assert (step.generations, step.batch, step.num_forwards) == ((), None, 0)
        with pytest.raises(UnknownBatch, match="Batch ID 7 not found"):
            executor.compute_decode([CachedBatch(7, (7,))], is_ahead=True)


def test_a_row_that_has_ended_may_lack_the_blocks_of_a_step_that_was_planned_before(both: Both) -> None:
    """The step is launched once the end is known: then the row computes nothing, and needs no block."""
    known = prefill(both.known, 1, [start(1, PROMPT, 9)])
    token = known.generations[0].tokens.ids[0]
    both.known.clear()
    ends_at_once = frozenset([token])
    for executor in (both.known, both.ahead):
        former, executor.output.eos_token_ids = executor.output.eos_token_ids, ends_at_once
        try:
            blocks = tuple(range(1, 6))  # of 20 tokens, which the prompt has
            starts = [start(1, PROMPT, 9, ignore_eos=False, blocks=blocks), start(2, OTHER, 9)]
            executor.compute_prefill(1, starts, is_ahead=True).describe()
            step = executor.compute_decode([CachedBatch(1, (1, 2))], is_ahead=True).describe()
        finally:
            executor.output.eos_token_ids = former
        assert [generation.request_id for generation in step.generations] == [2]
        assert step.num_forward_rows == 1


def test_a_step_that_fails_leaves_the_one_under_way_its_answer(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [prefill(both.known, 1, [start(1, PROMPT, 9)])]
    step = both.ahead.compute_prefill(1, [start(1, PROMPT, 9)], is_ahead=True)

    def fails(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(both.ahead.runner, "decoder", fails)
        with pytest.raises(ResourceExhausted, match="no memory for a step of 1 tokens in 1 sequences"):
            both.ahead.compute_decode([CachedBatch(1, (1,))], is_ahead=True)
    assert num_sequences(both.ahead) == 0
    assert said(step.describe()) == said(expected[0])
    both.known.clear()
    assert said(prefill(both.ahead, 2, [start(1, PROMPT, 9)])) == said(prefill(both.known, 2, [start(1, PROMPT, 9)]))


def test_the_times_of_steps_do_not_count_each_other(both: Both) -> None:
    first = both.ahead.compute_prefill(1, [start(1, PROMPT, 9)], is_ahead=True)
    second = both.ahead.compute_decode([CachedBatch(1, (1,))], is_ahead=True)
    begin = time.perf_counter_ns()
    results = [first.describe(), second.describe()]
    assert all(0 <= result.forward_ns <= result.total_ns for result in results)
    assert results[1].forward_ns <= time.perf_counter_ns() - begin
