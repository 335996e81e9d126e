"""Tensor parallelism: what each rank holds, and the few collectives the decoder needs. Identity for one rank."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from funitel.proto.errors import SettingsError, ShardFailed

COLLECTIVE_TIMEOUT = timedelta(seconds=120)  # TGI's


def split_evenly(total: int, parts: int, index: int) -> tuple[int, int]:
    """Range [start, end) of part `index` when `total` units go to `parts`; the first parts take one unit more."""
    size, extra = divmod(total, parts)
    start = index * size + min(index, extra)
    return start, start + size + (index < extra)


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """Query heads [q_start, q_end) of one rank and the KV heads [kv_start, kv_end) they attend to."""

    q_start: int
    q_end: int
    kv_start: int
    kv_end: int
    size: int = field(default=1, compare=False)  # ranks that there are
    rank: int = field(default=0, compare=False)

    @property
    def num_heads(self) -> int:
        """Query heads of this rank."""
        return self.q_end - self.q_start

    @property
    def num_kv_heads(self) -> int:
        """KV heads of this rank."""
        return self.kv_end - self.kv_start

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, size: int, rank: int) -> "HeadSplit":
        """Give a rank its share: query heads travel with their KV head, unevenly where groups do not divide.

        With more ranks than KV heads each KV head is replicated over several ranks, which share its query heads.

        Raises:
            SettingsError: more ranks than query heads.
        """
        if size > num_heads:
            raise SettingsError(f"--num-shard {size} is larger than the model's {num_heads} query heads")
        group = num_heads // num_kv_heads
        if size <= num_kv_heads:
            start, end = split_evenly(num_kv_heads, size, rank)
            return cls(start * group, end * group, start, end, size, rank)
        for kv_head in range(num_kv_heads):
            first, last = split_evenly(size, num_kv_heads, kv_head)
            if first <= rank < last:
                start, end = split_evenly(group, last - first, rank - first)
                return cls(kv_head * group + start, kv_head * group + end, kv_head, kv_head + 1, size, rank)
        raise AssertionError("every rank below size has a KV head")

    @classmethod
    def num_holders(cls, num_heads: int, num_kv_heads: int, size: int, rank: int) -> int:
        """How many ranks hold the KV heads of a rank."""
        firsts = [cls.of(num_heads, num_kv_heads, size, each).kv_start for each in range(size)]
        return firsts.count(firsts[rank])


class TensorParallel:
    """One rank's view of its group. All ranks call the same methods in the same order.

    Args:
        rank: this rank's place in the group.
        size: ranks of the group.
        device: of tensors that are exchanged.
        group: of torch.distributed; None: all processes.
        members: processes of the group by rank; None: rank i is process i.
        root: the rank that samples.
    """

    spreads_experts = False  # whole experts go to ranks, in place of a part of each

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        device: torch.device | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        members: Sequence[int] | None = None,
        root: int = 0,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device or torch.device("cpu")
        self.root = root
        self._group = group
        self._members = tuple(members or range(size))

    @property
    def is_root(self) -> bool:
        """Whether this rank samples."""
        return self.rank == self.root

    @property
    def name(self) -> str:
        """What the collectives go through."""
        return str(dist.get_backend(self._group)) if self.size > 1 else "none"

    @classmethod
    def join(cls, rank: int, size: int, address: str, port: int, device: torch.device) -> "TensorParallel":
        """Meet the other ranks at tcp://address:port; NCCL on a GPU, gloo on a CPU."""
        backend = "nccl" if device.type == "cuda" else "gloo"
        with together(rank):
            dist.init_process_group(
                backend, init_method=f"tcp://{address}:{port}", rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT
            )
        return cls(rank, size, device)

    def leave(self) -> None:
        """Leave the group, if one was joined."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def split(self, total: int) -> tuple[int, int]:
        """This rank's range of `total` units."""
        return split_evenly(total, self.size, self.rank)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over all ranks, in place."""
        if self.size > 1:
            with together(self.rank):
                dist.all_reduce(x, group=self._group)
        return x

    def gather_columns(self, x: torch.Tensor, total: int) -> torch.Tensor | None:
        """Concatenate every rank's columns [rows, part of total] on rank 0; None elsewhere."""
        if self.size == 1:
            return x
        widest = -(-total // self.size)
        padded = torch.nn.functional.pad(x, (0, widest - x.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else None
        with together(self.rank):
            dist.gather(padded, parts, dst=self._members[0], group=self._group)
        if parts is None:
            return None
        widths = [end - start for start, end in (split_evenly(total, self.size, r) for r in range(self.size))]
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def broadcast(self, x: torch.Tensor, source: int | None = None) -> torch.Tensor:
        """Give every rank the values of rank `source`, by default of the root, in place."""
        if self.size > 1:
            process = self._members[self.root if source is None else source]
            with together(self.rank):
                dist.broadcast(x, src=process, group=self._group)
        return x

    def smallest(self, value: int) -> int:
        """Least `value` over all ranks."""
        if self.size == 1:
            return value
        x = torch.tensor([value], dtype=torch.int64, device=self.device)
        with together(self.rank):
            dist.all_reduce(x, op=dist.ReduceOp.MIN, group=self._group)
        return int(x.item())

    def share(self, text: str, source: int | None = None) -> str:
        """Give every rank the `text` of rank `source`, by default of the root, as bytes: nothing is unpickled."""
        if self.size == 1:
            return text
        source = self.root if source is None else source
        payload = text.encode() if self.rank == source else b""
        length = torch.tensor([len(payload)], dtype=torch.int64, device=self.device)
        self.broadcast(length, source)
        data = torch.zeros(int(length.item()), dtype=torch.uint8, device=self.device)
        if self.rank == source:
            data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        self.broadcast(data, source)
        return bytes(data.cpu().tolist()).decode()

    def exchange(self, value: str) -> list[str]:
        """Every rank's `value`, in rank order."""
        return [self.share(value, source) for source in range(self.size)]


@contextmanager
def together(rank: int) -> Iterator[None]:
    """Say that another rank is gone or late where torch.distributed only says how it noticed."""
    try:
        yield
    except RuntimeError as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ShardFailed(f"rank {rank} lost the other ranks: {reason}") from error
