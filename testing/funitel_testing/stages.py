"""Pipeline stages in one process: each rank a thread, hidden states handed over by queues."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import TypeVar

import torch

from funitel.model_server.device.stages import StageLink
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.spec.model_spec import ModelSpec
from funitel.model_server.spec.stage_spec import StageSpec, stages_of
from funitel_testing.threads import Meeting, ThreadParallel

T = TypeVar("T")
TIMEOUT_SECONDS = 60.0

Hidden = Queue[torch.Tensor]
Part = Callable[[ModelSpec], ModelSpec]


class QueueLink(StageLink):
    """See StageLink."""

    def __init__(self, before: Hidden | None, behind: Hidden | None) -> None:
        super().__init__(0, None, None)
        self.before, self.behind = before, behind

    def receive(self, x: torch.Tensor) -> None:
        """See StageLink."""
        assert self.before is not None
        received = self.before.get(timeout=TIMEOUT_SECONDS)
        assert received.shape == x.shape
        assert received.dtype is x.dtype
        x.copy_(received)

    def send(self, x: torch.Tensor) -> None:
        """See StageLink."""
        assert self.behind is not None
        self.behind.put(x)


def on_stages(
    num_stages: int,
    num_ranks: int,
    work: Callable[[TensorParallel, Part, StageLink], T],
    layers: Sequence[int] | None = None,
) -> T:
    """The result of the first rank of the last stage, of work that all ranks of all stages do together."""
    links: list[list[Hidden]] = [[Queue() for _ in range(num_ranks)] for _ in range(num_stages - 1)]
    groups = [Meeting(num_ranks) for _ in range(num_stages)]

    def one(stage: int, rank: int) -> T:
        def part(spec: ModelSpec) -> ModelSpec:
            return StageSpec.of(spec, stages_of(spec, num_stages, layers)[stage])

        before = links[stage - 1][rank] if stage else None
        behind = links[stage][rank] if stage < num_stages - 1 else None
        parallel = TensorParallel() if num_ranks == 1 else ThreadParallel(rank, num_ranks, groups[stage])
        try:
            return work(parallel, part, QueueLink(before, behind))
        except BaseException:
            for group in groups:
                group.barrier.abort()
            raise

    with ThreadPoolExecutor(num_stages * num_ranks) as pool:
        results = [[pool.submit(one, stage, rank) for rank in range(num_ranks)] for stage in range(num_stages)]
    failed = [error for stage in results for each in stage if (error := each.exception()) is not None]
    if failed:
        raise failed[0]
    return results[-1][0].result()
