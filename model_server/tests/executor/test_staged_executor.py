"""Two pipeline stages, driven by hand: what one computes before it is told of the steps before, and the tokens."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch

from funitel.model_server.attention.torch_reference import TorchAttention
from funitel.model_server.checkpoint.weights import Weights
from funitel.model_server.device.tensor_parallel import HeadSplit, TensorParallel
from funitel.model_server.executor.executor import Executor
from funitel.model_server.executor.interface import ExecutorOptions, PendingStep
from funitel.model_server.executor.staged_sampling import StagedSampling
from funitel.model_server.files.integrity import read_json
from funitel.model_server.kv_cache.pool import SpecPools
from funitel.model_server.models.decoder import Decoder
from funitel.model_server.models.stage_boundary import StageBoundary
from funitel.model_server.registry.lookup import spec_of
from funitel.model_server.sequence.detokenizer import TextCodec
from funitel.model_server.spec.stage_spec import StageSpec, stages_of
from funitel.proto.errors import InvalidRequest, ShardFailed
from funitel.proto.step import CachedBatch, Generation, SequenceStart, StepResult, WarmupLimits
from funitel_testing.executors import BLOCK_SIZE, collect, ids_of, load_executor, run_alone, start
from funitel_testing.outputs import assert_recorded, keyed
from funitel_testing.stages import Hidden, QueueLink
from funitel_testing.threads import Meeting
from funitel_testing.tiny import save_tiny

CPU = torch.device("cpu")
SECONDS = 30.0


class TwoStages(TensorParallel):
    """Both ranks of a pipeline, of which the second samples: what it tells waits until the first asks for it."""

    def __init__(self, rank: int, meeting: Meeting, told: "Queue[torch.Tensor | None]") -> None:
        super().__init__(rank, 2, root=1)
        self.meeting, self.told = meeting, told

    def broadcast(self, x: torch.Tensor, source: int | None = None) -> torch.Tensor:
        if self.is_root:
            self.told.put(x.clone())
            return x
        received = self.told.get(timeout=SECONDS)
        if received is None:
            raise ShardFailed("rank 0 lost the other ranks")
        return x.copy_(received)

    def smallest(self, value: int) -> int:
        return min(int(each) for each in self.meeting.exchange(self.rank, torch.tensor([value])))

    def exchange(self, value: str) -> list[str]:
        return [value, value]


class Stages:
    """The executors of both stages, and what the second tells the first."""

    def __init__(self, folder: Path) -> None:
        self.told: Queue[torch.Tensor | None] = Queue()
        hidden: Hidden = Queue()
        meeting = Meeting(2)
        links = QueueLink(None, hidden), QueueLink(hidden, None)
        self.first, self.last = (
            self._executor(folder, rank, TwoStages(rank, meeting, self.told), links[rank]) for rank in range(2)
        )
        warm = start(0, [1, 2, 3], 1)
        limits = WarmupLimits(max_prefill_tokens=64, max_batch_total_tokens=2000)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda executor: executor.warmup([warm], limits), (self.first, self.last)))

    def _executor(self, folder: Path, rank: int, whole: TensorParallel, link: QueueLink) -> Executor:
        spec = spec_of(read_json(folder / "config.json"))
        stage = StageSpec.of(spec, stages_of(spec, 2)[rank])
        weights = Weights(folder, torch.float32, CPU, spec.names.prefix)
        boundary = StageBoundary(link, torch.float32, CPU)
        attention = TorchAttention(BLOCK_SIZE, CPU)
        decoder = Decoder(stage, weights, TensorParallel(), attention, boundary=boundary)
        heads = HeadSplit.of(spec.num_heads, spec.num_kv_heads, 1, 0)
        options = ExecutorOptions(
            device=CPU,
            dtype=torch.float32,
            block_size=BLOCK_SIZE,
            memory_fraction=1.0,
            allow_prefill_logprobs=True,
            eos_token_ids=frozenset({256}),
        )
        pools = SpecPools(stage, heads, BLOCK_SIZE, torch.float32, CPU)
        sampling = partial(StagedSampling, link=link, num_stages=2)
        return Executor(stage, decoder, pools, TextCodec(folder), whole, options, sampling)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def stages(folder: Path) -> Stages:
    return Stages(folder)


def sequences() -> list[SequenceStart]:
    return [
        start(1, range(40, 60), 8),  # type: ignore[arg-type]
        start(2, range(30, 37), 8, do_sample=True, seed=7, repetition_penalty=1.2),  # type: ignore[arg-type]
        start(3, range(50, 80), 8, top_n_tokens=2, prefill_logprobs=True),  # type: ignore[arg-type]
        start(4, range(20, 33), 5, do_sample=True, seed=1, temperature=1.5),  # type: ignore[arg-type]
    ]


def join(first: StepResult, last: StepResult) -> dict[int, list[Generation]]:
    """What both ranks say of a step: each describes its own requests, and both keep the same."""
    assert first.batch == last.batch
    found: dict[int, list[Generation]] = {}
    for result in (first, last):
        collect(result, found)
    return found


def test_a_stage_computes_the_next_batch_before_the_last_stage_begins_with_the_one_before(stages: Stages) -> None:
    one, other, *_ = sequences()
    ahead = [stages.first.compute_prefill(batch, [each], is_ahead=True) for batch, each in enumerate((one, other))]
    assert stages.told.empty()  # the last stage has computed nothing
    behind = [stages.last.compute_prefill(batch, [each], is_ahead=True) for batch, each in enumerate((one, other))]
    assert stages.told.qsize() == 2
    for step, known in zip(ahead, behind, strict=True):
        assert join(step.describe(), known.describe())


def test_a_stage_waits_for_the_tokens_of_the_batch_that_it_goes_on_with(stages: Stages) -> None:
    one, other, *_ = sequences()
    pending = stages.first.compute_prefill(0, [one], is_ahead=True)
    further = stages.first.compute_prefill(1, [other], is_ahead=True)
    with ThreadPoolExecutor(1) as compute:
        decoding = compute.submit(stages.first.compute_decode, [CachedBatch(0, (1,))], is_ahead=True)
        with pytest.raises(TimeoutError):
            decoding.result(timeout=0.2)
        known = [stages.last.compute_prefill(b, [each], is_ahead=True) for b, each in enumerate((one, other))]
        with pytest.raises(TimeoutError):
            decoding.result(timeout=0.2)  # the tokens are told, and nothing has asked for them
        join(pending.describe(), known[0].describe())
        step = decoding.result(timeout=SECONDS)
        after = stages.last.compute_decode([CachedBatch(0, (1,))], is_ahead=True)
    join(further.describe(), known[1].describe())
    found = join(step.describe(), after.describe())
    assert list(found) == [1]


def test_chunks_of_a_prompt_follow_one_another_without_waiting(stages: Stages) -> None:
    prompt = start(1, range(40, 60), 4, chunk_len=8)  # type: ignore[arg-type]
    steps = [stages.first.compute_prefill(0, [prompt], is_ahead=True)]
    steps.append(stages.first.compute_decode([CachedBatch(0, (1,))], is_ahead=True))
    assert stages.told.empty()
    assert steps[0].describe().generations == ()


@pytest.mark.parametrize("num_batches", [1, 2])
def test_tokens_are_those_of_one_process(stages: Stages, folder: Path, num_batches: int) -> None:
    expected = {each.request_id: run_alone(load_executor(folder), each) for each in sequences()}
    found: dict[int, list[Generation]] = {}
    running = {batch: list(map(keyed, sequences()[batch::num_batches])) for batch in range(num_batches)}
    steps = {batch: both(stages, "compute_prefill", batch, starts) for batch, starts in running.items()}
    while steps:
        following = {}
        for batch, (ahead, known) in steps.items():
            told, after = ahead.describe(), known.describe()
            generations = join(told, after)
            for request_id, got in generations.items():
                found.setdefault(request_id, []).extend(got)
            if after.batch is None:
                continue
            ended = {i for i, got in generations.items() if got[-1].finished is not None}
            left = [i for i in after.batch.request_ids if i not in ended]
            kept = after.batch
            if ended:
                kept, again = (each.begin_filter(batch, left, is_ahead=True)() for each in (stages.first, stages.last))
                assert kept == again
            following[batch] = both(stages, "compute_decode", [kept])
        steps = following
    assert {i: ids_of(each) for i, each in found.items()} == {i: ids_of(each) for i, each in expected.items()}
    assert_recorded([stages.first, stages.last], found)
    scored = found[3][0].prefill_tokens
    assert scored is not None
    assert scored.logprobs[1:] == pytest.approx(expected[3][0].prefill_tokens.logprobs[1:], abs=1e-4)  # type: ignore[union-attr]


def both(stages: Stages, call: str, *arguments: Any) -> tuple[PendingStep, PendingStep]:
    """A step on both stages."""
    first, last = (getattr(each, call)(*arguments, is_ahead=True) for each in (stages.first, stages.last))
    return first, last


def test_a_call_is_refused_by_both_alike_and_changes_nothing(stages: Stages) -> None:
    bad = start(1, [10_000], 4)
    for executor in (stages.first, stages.last):
        with pytest.raises(InvalidRequest, match="token ids within"):
            executor.compute_prefill(0, [bad], is_ahead=True)
    one = sequences()[0]
    ahead, known = both(stages, "compute_prefill", 0, [one])
    assert join(ahead.describe(), known.describe())


def test_a_stage_that_lost_the_last_one_fails_what_waits_for_it(stages: Stages) -> None:
    pending = stages.first.compute_prefill(0, [sequences()[0]], is_ahead=True)
    with ThreadPoolExecutor(1) as compute:
        decoding = compute.submit(stages.first.compute_decode, [CachedBatch(0, (1,))], is_ahead=True)
        stages.told.put(None)
        with pytest.raises(ShardFailed):
            pending.describe()
        with pytest.raises(ShardFailed):
            decoding.result(timeout=SECONDS)


def test_rows_are_told_once_steps_on_their_way_are_known(stages: Stages) -> None:
    one, other, *_ = sequences()
    ahead = [stages.first.compute_prefill(batch, [each], is_ahead=True) for batch, each in enumerate((one, other))]
    with ThreadPoolExecutor(1) as compute:
        holding = compute.submit(stages.first.hold)
        with pytest.raises(TimeoutError):
            holding.result(timeout=0.2)
        known = [stages.last.compute_prefill(b, [each], is_ahead=True) for b, each in enumerate((one, other))]
        for step, told in zip(ahead, known, strict=True):
            join(step.describe(), told.describe())
        held = holding.result(timeout=SECONDS)
    assert held == stages.last.hold()
    rows = [(row.request_id, row.num_computed, row.num_known) for batch in held for row in batch.rows]
    assert rows == [(1, 20, 21), (2, 7, 8)]
