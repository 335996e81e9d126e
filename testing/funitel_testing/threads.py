"""Several tensor-parallel ranks in one process: each a thread, their collectives over shared memory."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from funitel.model_server.device.tensor_parallel import TensorParallel, split_evenly

T = TypeVar("T")


class Meeting:
    """Where the ranks of one group hand each other tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.places: list[torch.Tensor | None] = [None] * size

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in rank order."""
        self.places[rank] = x.clone()
        self.barrier.wait()
        found = [place for place in self.places if place is not None]
        self.barrier.wait()
        return found


class ThreadParallel(TensorParallel):
    """One rank among threads. Has the collectives that a forward needs."""

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        super().__init__(rank, size)
        self.meeting = meeting

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See TensorParallel."""
        return x.copy_(torch.stack(self.meeting.exchange(self.rank, x)).sum(dim=0))

    def gather_columns(self, x: torch.Tensor, total: int) -> torch.Tensor | None:
        """See TensorParallel."""
        parts = self.meeting.exchange(self.rank, x)
        assert [p.shape[1] for p in parts] == [
            b - a for a, b in (split_evenly(total, self.size, r) for r in range(self.size))
        ]
        return torch.cat(parts, dim=1) if self.rank == 0 else None


def on_ranks(size: int, work: Callable[[TensorParallel], T]) -> T:
    """Rank 0's result of work that `size` ranks do together."""
    if size == 1:
        return work(TensorParallel())
    meeting = Meeting(size)

    def one(rank: int) -> T:
        try:
            return work(ThreadParallel(rank, size, meeting))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        results = [pool.submit(one, rank) for rank in range(size)]
    failed = [r.exception() for r in results if r.exception() is not None]
    for error in failed:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return results[0].result()


def one_at_a_time(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """For ranks that are threads: Triton's interpreter is not for several."""
    lock = threading.Lock()

    def locked(*arguments: Any) -> torch.Tensor:
        with lock:
            return call(*arguments)

    return locked
