"""The pool of a GPU: sized from what steps are measured to take, with made-up numbers in place of a card."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from funitel.model_server.device.memory import GpuState
from funitel.model_server.executor import prompt_scores, warmup
from funitel.model_server.executor.async_sampling import AsyncSampling
from funitel.model_server.executor.executor import Executor
from funitel.model_server.executor.pool_sizing import (
    MAX_DRIVER_BYTES,
    USABLE,
    GpuPoolMemory,
    HostPoolMemory,
    JoinedPoolMemory,
    PoolRoom,
    graph_bytes,
    pool_budget,
)
from funitel.model_server.forward.batch import ForwardBatch
from funitel.model_server.gpu_sampling.ops import TorchMaths
from funitel.model_server.kv_cache.pool import KVCache
from funitel.proto.errors import NotEnoughMemory
from funitel.proto.step import WarmupLimits
from funitel_testing.executors import ids_of, load_executor, run_alone, start
from funitel_testing.fake_gpus import FakeGpu
from funitel_testing.tiny import save_tiny

GIB = 1 << 30


def state(total: int, free: int, held: int) -> GpuState:
    return GpuState(total=total, free=free, held=held)


@pytest.mark.parametrize("fraction", [1.0, 0.7, 0.5])
def test_alone_on_a_card_tgis_rule_holds(fraction: float) -> None:
    total, held = 80 * GIB, 16 * GIB
    free = total - held
    tgi = free - int((1 - fraction * USABLE) * total)
    assert abs(pool_budget(state(total, free, held), fraction, 0) - tgi) <= 2


def test_what_is_set_aside_comes_off_the_pool() -> None:
    gpu = state(80 * GIB, 64 * GIB, 16 * GIB)
    assert pool_budget(gpu, 1.0, 3 * GIB) == pool_budget(gpu, 1.0, 0) - 3 * GIB
    assert pool_budget(gpu, 1.0, 70 * GIB) == 0


def test_two_replicas_on_one_card_get_the_same_whoever_is_first() -> None:
    total, weights = 80 * GIB, 16 * GIB
    first = pool_budget(state(total, total - 2 * weights, weights), 0.5, GIB)
    second = pool_budget(state(total, total - 2 * weights - first, weights), 0.5, GIB)
    assert first == second
    assert 2 * (first + weights + GIB) <= total


def test_what_other_processes_leave_bounds_the_pool() -> None:
    total, weights = 80 * GIB, 16 * GIB
    found = pool_budget(state(total, 20 * GIB, weights), 1.0, 0)
    assert found == 20 * GIB - (total - int(total * USABLE))


def test_recorded_steps_share_their_tensors_and_not_what_the_driver_keeps() -> None:
    before, after = state(80 * GIB, 50 * GIB, 20 * GIB), state(80 * GIB, 50 * GIB - 310, 20 * GIB + 300)
    assert graph_bytes(before, after, 35) == 2 * 300 + 35 * 10


def test_what_another_process_takes_while_a_step_is_recorded_does_not_count_for_every_graph() -> None:
    before, after = state(80 * GIB, 50 * GIB, 20 * GIB), state(80 * GIB, 30 * GIB, 20 * GIB + 300)
    assert graph_bytes(before, after, 35) == 2 * 300 + 35 * MAX_DRIVER_BYTES


class Recording:
    """A decoder's recordings, as far as they take memory."""

    num_recordings = 3

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self._is_loaded = False
        self.order: list[str] = []

    def __call__(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor | None:
        raise AssertionError("nothing is computed here")

    def record_largest(self, cache: KVCache) -> None:
        self.order.append("record")
        if not self._is_loaded:
            self._gpu.drive(10_000)  # kernels, loaded once
        self._is_loaded = True
        self._gpu.take(400)
        self._gpu.drive(7)

    def forget_recordings(self) -> None:
        self.order.append("forget")
        self._gpu.let_go(400)
        self._gpu.drive(-7)


def test_the_peak_of_a_step_and_recorded_steps_are_set_aside() -> None:
    gpu = FakeGpu(100_000)
    gpu.take(20_000)  # weights
    memory = GpuPoolMemory(gpu, 1.0)
    memory.profile(lambda: gpu.take(5_000, is_brief=True), "")
    recording = Recording(gpu)
    memory.profile_recording(recording, None)  # type: ignore[arg-type]
    assert recording.order == ["record", "forget"] * 2
    assert (memory.step_bytes, memory.graph_bytes) == (5_000, 2 * 400 + 3 * 7)
    usable = int(100_000 * USABLE)
    room = memory.room(0)
    assert room.most == room.usual == usable - 20_000 - 10_000 - 5_000 - 821


class FakeHost(HostPoolMemory):
    """The memory of a host of which pools may take so much."""

    def __init__(self, most: int, usual: int) -> None:
        self._found = PoolRoom(most, usual, 16, "a share of the host", "the host")

    def room(self, step_bytes: int) -> PoolRoom:
        return self._found.without(step_bytes)


@pytest.mark.parametrize(
    ("host", "total", "most", "usual", "limit"),
    [
        ((9_000, 6_000), 100_000, 12_000, 8_000, "a share of the host"),  # three quarters of a block are on the host
        ((900_000, 600_000), 10_000, 4 * 9_500, 4 * 9_500, "0 MB that the GPU leaves"),
        ((30_000, 6_000), 10_000, 4 * 9_500, 8_000, "a share of the host"),
    ],
)
def test_a_model_on_a_gpu_and_the_host_has_as_many_blocks_as_both_hold(
    host: tuple[int, int], total: int, most: int, usual: int, limit: str
) -> None:
    memory = JoinedPoolMemory(FakeHost(*host), GpuPoolMemory(FakeGpu(total), 1.0), 0.25)
    assert memory.is_measured
    room = memory.room(0)
    assert (room.most, room.usual, room.contexts, room.limit) == (most, usual, 16, limit)
    smaller = memory.room(3_000)
    assert smaller.most <= room.most
    gpu = FakeGpu(total)
    measured = JoinedPoolMemory(FakeHost(*host), GpuPoolMemory(gpu, 1.0), 0.25)
    measured.profile(lambda: gpu.take(2_000, is_brief=True), "")
    assert measured.room(0).most == min(int(host[0] / 0.75), 4 * (int(total * USABLE) - 2_000))


def test_a_largest_step_without_memory_is_one_line() -> None:
    def step() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    memory = GpuPoolMemory(FakeGpu(100), 1.0)
    with pytest.raises(NotEnoughMemory, match="no memory for the largest step, .* lower --max-batch-prefill-tokens 9"):
        memory.profile(step, "lower --max-batch-prefill-tokens 9")
    with pytest.raises(ZeroDivisionError):
        memory.profile(lambda: print(1 // 0), "")


class Watched:
    """A forward that takes memory of a card for each token and each logit, and notes what it was given."""

    def __init__(self, gpu: FakeGpu, forward: Any) -> None:
        self._gpu = gpu
        self._forward = forward
        self.steps: list[tuple[int, int, int]] = []

    def __call__(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor | None:
        logits: torch.Tensor | None = self._forward(batch, cache)
        assert logits is not None
        self.steps.append((batch.num_tokens, batch.num_decode, len(logits)))
        self._gpu.take(1000 * batch.num_tokens, is_brief=True)
        return logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))


def on_card(folder: Path, gpu: FakeGpu, **settings: Any) -> tuple[Executor, Watched]:
    """An executor on a CPU whose memory is counted as a card's."""
    executor = load_executor(folder, **settings)
    watched = Watched(gpu, executor.runner.decoder)
    executor.runner.decoder = watched
    executor.profiler.memory = GpuPoolMemory(gpu, executor.options.memory_fraction)
    return executor, watched


def test_the_pool_is_what_the_largest_step_leaves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(4_000_000)
    executor, watched = on_card(folder, gpu)
    monkeypatch.setattr(prompt_scores, "MAX_LOGITS_BYTES", 4 * executor.spec.vocab_size * 11)
    limits = WarmupLimits(max_prefill_tokens=50, max_batch_size=7, max_total_tokens=80)
    result = executor.warmup([start(0, range(40)), start(0, range(40))], limits)
    assert watched.steps == [(57, 7, 9), (11, 0, 11)], "the largest step, and the largest scores of a prompt"
    left = int(4_000_000 * USABLE) - 57_000
    assert result.pool_tokens == (left // executor.runner.pools.bytes_per_block - 1) * 4


def test_sampling_on_the_device_is_rehearsed_where_steps_do_it(folder: Path) -> None:
    gpu = FakeGpu(4_000_000)
    plain, _ = on_card(folder, gpu)
    parts = plain.spec, plain.runner.decoder, plain.runner.pools, plain.codec, plain.parallel, plain.options
    executor = Executor(*parts, partial(AsyncSampling, maths=TorchMaths()))
    executor.profiler.memory = plain.profiler.memory
    executor.warmup([start(0, range(20))], WarmupLimits(max_batch_size=9, max_batch_total_tokens=2000))
    assert isinstance(executor.sampling, AsyncSampling)
    assert len(executor.sampling.states.counts) >= 9  # they need not grow when sequences come
    plain.warmup([start(0, range(20))], WarmupLimits(max_batch_size=9, max_batch_total_tokens=2000))
    asked = start(1, list(range(40, 60)), 12, do_sample=True, repetition_penalty=1.2)
    assert ids_of(run_alone(executor, asked)) == ids_of(run_alone(plain, asked))


def test_a_pool_that_would_be_too_small_is_one_line(folder: Path) -> None:
    executor, _ = on_card(folder, FakeGpu(200_000))
    with pytest.raises(NotEnoughMemory, match=r"0 bytes are left for the KV pool, less than one block of 4 tokens"):
        executor.warmup([start(0, range(190))], WarmupLimits(max_prefill_tokens=200, max_batch_size=1))
    executor, _ = on_card(folder, FakeGpu(400_000))
    with pytest.raises(NotEnoughMemory, match="at most [0-9]+ tokens fit"):
        executor.warmup([start(0, range(20))], WarmupLimits(max_batch_total_tokens=2000, max_batch_size=1))


def test_the_share_of_a_card_bounds_the_pool(folder: Path) -> None:
    pools = []
    for fraction in (1.0, 0.5):
        executor, _ = on_card(folder, FakeGpu(4_000_000), cuda_memory_fraction=fraction)
        pools.append(executor.warmup([start(0, range(20))], WarmupLimits(max_batch_size=1)).pool_tokens)
    assert pools[0] is not None
    assert pools[1] is not None
    assert abs(pools[0] / 2 - pools[1]) < pools[0] * 0.02


def test_rows_of_a_rehearsal() -> None:
    assert [warmup.num_rows(asked) for asked in (None, 3, 10**9)] == [128, 3, 1024]
    assert warmup.prompts_within([[], [1, 2, 3], [4, 5], [6]], 4) == [[1, 2, 3], [4]]


def test_sizing_needs_no_triton() -> None:
    """It is imported by every shard, and Triton takes seconds."""
    code = "import sys, funitel.model_server.executor.executor; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
