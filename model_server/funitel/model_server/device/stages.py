"""Pipeline stages: the ranks of a replica in groups, each of which has some layers and passes hidden states on.

Ranks of a stage split its tensors among them, in a group of their own. Rank i of a stage sends to rank i of the next
one, in the order of the steps, and a send does not wait until it is received.
"""

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from funitel.model_server.device.tensor_parallel import COLLECTIVE_TIMEOUT, TensorParallel, together
from funitel.proto.settings.partition import Partition

MAX_SENT = 8  # tensors on their way, which are kept until the next stage has them


@dataclass(frozen=True, slots=True)
class Stage:
    """This rank's place among the pipeline stages.

    Attributes:
        index: of the stage.
        num_stages: that there are.
        tensor: the ranks of the stage.
        whole: all ranks, on the host; its root is the rank that samples.
        link: to the stages before and behind.
    """

    index: int
    num_stages: int
    tensor: TensorParallel
    whole: TensorParallel
    link: "StageLink"

    @classmethod
    def join(cls, partition: Partition, rank: int, address: str, port: int, device: torch.device) -> "Stage":
        """Meet the other ranks at tcp://address:port; NCCL on a GPU, gloo on a CPU and for what the host exchanges.

        Raises:
            ShardFailed: another rank is gone or late.
        """
        TensorParallel.join(rank, partition.num_ranks, address, port, device)
        every, index = range(partition.num_ranks), partition.stage_of(rank)
        with together(rank):
            host = dist.new_group(every, timeout=COLLECTIVE_TIMEOUT, backend="gloo")
            groups = [dist.new_group(ranks, timeout=COLLECTIVE_TIMEOUT) for ranks in partition]
        mine = partition[index]
        place = mine.index(rank)
        tensor = TensorParallel(place, len(mine), device, group=groups[index], members=mine)
        whole = TensorParallel(rank, len(every), group=host, root=partition.root)
        before = partition[index - 1][place] if index > 0 else None
        behind = partition[index + 1][place] if index + 1 < len(partition) else None
        return cls(index, len(partition), tensor, whole, StageLink(rank, before, behind))


class StageLink:
    """Hidden states from the stage before and to the one behind; used on the compute thread alone."""

    def __init__(self, rank: int, before: int | None, behind: int | None) -> None:
        self._rank = rank
        self._before, self._behind = before, behind
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()  # with the work that is done once they were received
        self.waited_ns = 0  # for the stage before, since the start

    def receive(self, x: torch.Tensor) -> None:
        """Fill a contiguous tensor with what the stage before has sent.

        Raises:
            ShardFailed: it is gone, or sent nothing in time.
        """
        begin = time.perf_counter_ns()
        with together(self._rank):
            dist.recv(x, src=self._before)
        self.waited_ns += time.perf_counter_ns() - begin

    def send(self, x: torch.Tensor) -> None:
        """Send a tensor to the stage behind; it must not be changed any more.

        Raises:
            ShardFailed: that is gone, or received nothing in time.
        """
        assert self._behind is not None, "the last stage has none behind"
        with together(self._rank):
            while self._sent and (len(self._sent) >= MAX_SENT or self._sent[0][0].is_completed()):
                self._sent.popleft()[0].wait()
            x = x.contiguous()
            self._sent.append((dist.isend(x, dst=self._behind), x))


class Handover(StageLink):
    """Hidden states from one part of a model to the next one in the same process, of which the devices may differ."""

    def __init__(self) -> None:
        super().__init__(0, None, None)
        self._passed: torch.Tensor | None = None

    def receive(self, x: torch.Tensor) -> None:
        """Fill a contiguous tensor with what the part before has sent in this forward."""
        assert self._passed is not None, "the part before computes first"
        passed, self._passed = self._passed, None
        x.copy_(passed)

    def send(self, x: torch.Tensor) -> None:
        """Keep a tensor for the part behind; it must not be changed any more."""
        self._passed = x
