"""Ranks that reduce in shared memory: the same bits on all of them, and an error, in time, when one does not come."""

import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from funitel.model_server.cpu import shared_memory_ranks as module
from funitel.model_server.cpu.shared_memory_ranks import SharedMemoryRanks
from funitel.model_server.device.tensor_parallel import TensorParallel, split_evenly
from funitel.proto.errors import ShardFailed
from funitel_testing.forward_worker import fused_library

SLOT = (1 << 20) // 4  # floats that fit into one turn
SIZES = (1, 7, 576, SLOT - 1, SLOT + 1, 2 * SLOT + 3)
Work = Callable[[SharedMemoryRanks], Any]


def run_ranks(size: int, work: Work, timeout_ms: int = 20_000) -> list[Any]:
    """What `work` returns, or the message of its error, on each rank: a forked process, None where it was killed."""
    library = fused_library()
    fd, address = module._make(int(library.funitel_ranks_bytes(size)))
    assert fd is not None
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    has_joined = context.Barrier(size + 1)

    def serve(rank: int, answer: Connection) -> None:
        torch.set_num_threads(1)  # the threads of the process that was forked are not here, and would be waited for
        mine = module._open(address)
        ranks = SharedMemoryRanks(rank, size, library, library.funitel_ranks(mine, rank, size, timeout_ms))
        has_joined.wait(20)
        try:
            answer.send(work(ranks))
        except ShardFailed as error:
            answer.send(error.message)

    processes = [context.Process(target=serve, args=(rank, pipe[1])) for rank, pipe in enumerate(pipes)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forks beside torch's idle threads, which are not used
        for process in processes:
            process.start()
    has_joined.wait(20)
    os.close(fd)
    answers = []
    for process, (reader, writer) in zip(processes, pipes, strict=True):
        writer.close()
        try:
            answers.append(reader.recv())
        except EOFError:
            answers.append(None)
        process.join()
    return answers


def values_of(rank: int, count: int) -> torch.Tensor:
    """Numbers of very different magnitudes: their sum depends on the order of its terms."""
    generator = np.random.default_rng(rank)
    values = generator.standard_normal(count) * 10.0 ** generator.integers(-6, 6, count)
    return torch.from_numpy(values.astype(np.float32))


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_the_sum_in_the_order_of_the_ranks(size: int) -> None:
    def work(ranks: SharedMemoryRanks) -> list[bytes]:
        return [ranks.all_reduce(values_of(ranks.rank, count)).numpy().tobytes() for count in SIZES]

    found = run_ranks(size, work)
    expected = []
    for count in SIZES:
        total = values_of(0, count).numpy().copy()
        for rank in range(1, size):
            total += values_of(rank, count).numpy()
        expected.append(total.tobytes())
    assert all(answer == expected for answer in found)


@pytest.mark.parametrize(("size", "num_rows", "total"), [(2, 3, 7), (3, 5, 301), (2, 4, 2 * SLOT - 10), (3, 1, 3)])
def test_columns_are_gathered_on_the_first_rank(size: int, num_rows: int, total: int) -> None:
    whole = np.arange(num_rows * total, dtype=np.float32).reshape(num_rows, total)

    def work(ranks: SharedMemoryRanks) -> bool:
        start, end = split_evenly(total, size, ranks.rank)
        gathered = ranks.gather_columns(torch.from_numpy(whole[:, start:end]), total)
        return gathered is None if ranks.rank else np.array_equal(np.asarray(gathered), whole)

    assert run_ranks(size, work) == [True] * size


def test_any_rank_can_hand_out_values_of_any_kind() -> None:
    def work(ranks: SharedMemoryRanks) -> tuple[list[int], str, bool]:
        numbers = torch.tensor([ranks.rank, 1 << 40], dtype=torch.int64)
        text = ranks.share(f"grüße {ranks.rank}", source=2)
        large = values_of(ranks.rank, SLOT + 5)
        return ranks.broadcast(numbers, source=1).tolist(), text, ranks.broadcast(large).equal(values_of(0, SLOT + 5))

    assert run_ranks(3, work) == [([1, 1 << 40], "grüße 2", True)] * 3


def test_many_turns_keep_apart_however_unlike_the_ranks_are_in_speed() -> None:
    def work(ranks: SharedMemoryRanks) -> list[float]:
        generator = np.random.default_rng(ranks.rank)
        found = []
        for turn in range(300):
            if generator.random() < 0.03:
                time.sleep(0.002)  # long enough that the others sleep
            found.append(float(ranks.all_reduce(torch.tensor([float(turn)]))))
        return found

    assert run_ranks(3, work) == [[3.0 * turn for turn in range(300)]] * 3


def test_ranks_on_one_core_do_not_wait_for_each_other_by_spinning() -> None:
    core = min(os.sched_getaffinity(0))

    def work(ranks: SharedMemoryRanks) -> float:
        os.sched_setaffinity(0, {core})
        values = torch.zeros(8)
        ranks.all_reduce(values)
        begin = time.process_time()  # the core may have others to serve
        for _ in range(200):
            ranks.all_reduce(values)
        return time.process_time() - begin

    # Who spins to the end of a time slice of some milliseconds takes seconds for as many turns.
    assert max(run_ranks(2, work)) < 1.0


def test_a_rank_that_was_killed_is_an_error_of_the_others_and_leaves_nothing_behind() -> None:
    before = set(Path("/dev/shm").iterdir())

    def work(ranks: SharedMemoryRanks) -> float:
        ranks.all_reduce(torch.zeros(8))
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(ShardFailed) as failure:
            ranks.all_reduce(torch.zeros(8))
        begin = time.monotonic()
        with pytest.raises(ShardFailed):  # at once: the group is no more
            ranks.broadcast(torch.zeros(8))
        assert time.monotonic() - begin < 1
        raise failure.value

    begin = time.monotonic()
    expected = "rank {} lost the other ranks: rank 1 ended or is late"
    assert run_ranks(3, work) == [expected.format(0), None, expected.format(2)]
    assert time.monotonic() - begin < 20
    assert set(Path("/dev/shm").iterdir()) == before


def test_a_rank_that_lives_but_does_not_come_is_waited_for_so_long_and_no_longer() -> None:
    def work(ranks: SharedMemoryRanks) -> float:
        if ranks.rank == 1:
            time.sleep(0.6)
            return 0.0
        begin = time.monotonic()
        with pytest.raises(ShardFailed, match="rank 1 ended or is late"):
            ranks.all_reduce(torch.zeros(8))
        return time.monotonic() - begin

    waited, _ = run_ranks(2, work, timeout_ms=200)
    assert 0.2 <= waited < 0.5


def test_what_a_rank_gave_before_it_ended_counts() -> None:
    def work(ranks: SharedMemoryRanks) -> float:
        if ranks.rank == 1:
            signal.setitimer(signal.ITIMER_REAL, 0.1)  # ends it while it waits for rank 0
        else:
            time.sleep(0.2)
        return float(ranks.all_reduce(torch.ones(1)))

    assert run_ranks(2, work) == [2.0, None]


class Strangers(TensorParallel):
    """Two ranks as rank 0 sees them; the other says what it is told to."""

    def __init__(self, place: str | None, is_joined: bool) -> None:
        super().__init__(0, 2)
        self.place, self.is_joined = place, is_joined

    def exchange(self, value: str) -> list[str]:
        return [value, self.place or value]

    def share(self, text: str, source: int = 0) -> str:
        return text

    def smallest(self, value: int) -> int:
        return value * self.is_joined


def test_ranks_that_cannot_share_memory_say_why() -> None:
    library = fused_library()
    assert (
        SharedMemoryRanks.meet(Strangers("elsewhere 1", True), library) == "the ranks do not see each other's processes"
    )
    refused = SharedMemoryRanks.meet(Strangers(None, False), library)
    assert refused == "they cannot open each other's memory"
    assert isinstance(SharedMemoryRanks.meet(Strangers(None, True), library), SharedMemoryRanks)


def test_a_system_that_gives_no_memory_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(fd: int, length: int) -> None:
        raise OSError(27, "File too large")

    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", refused)
        assert module._make(4096) == (None, "")
    monkeypatch.delattr(os, "memfd_create")
    assert module._make(4096) == (None, "")


def test_only_the_memory_that_is_meant_is_opened(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"x" * 64)
    assert module._open(f"{other} {'00' * 32}") is None
    assert module._open(f"{tmp_path / 'none'} {'00' * 32}") is None
    fd, address = module._make(4096)
    assert fd is not None
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    mine = module._open(address)
    assert mine is not None
    os.close(mine)
    os.close(fd)
