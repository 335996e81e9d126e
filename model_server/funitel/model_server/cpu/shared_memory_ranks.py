"""Collectives of the ranks of one host in shared memory: a reduction takes microseconds there.

They meet through torch.distributed first, which stays for what is not done in every step. The memory has no name that
could be left behind: rank 0 makes it, the others open it through rank 0's entry in /proc, so they must be of one user.
"""

import ctypes
import os
import secrets

import torch

from funitel.model_server.device.tensor_parallel import COLLECTIVE_TIMEOUT, TensorParallel, split_evenly
from funitel.proto.errors import ShardFailed

_NOTE_BYTES = 32  # random, at the start of the memory: it is this one and no other


class SharedMemoryRanks(TensorParallel):
    """One rank's view of its group, as `TensorParallel`, of ranks that share memory.

    Sums are taken in the order of the ranks: every rank has the same bits, in any order of arrival.
    """

    def __init__(self, rank: int, size: int, library: ctypes.CDLL, handle: int) -> None:
        super().__init__(rank, size)
        self.handle = handle
        self._library = library

    @property
    def name(self) -> str:
        """What the collectives go through."""
        return "shared-memory"

    @classmethod
    def meet(cls, parallel: TensorParallel, library: ctypes.CDLL) -> "SharedMemoryRanks | str":
        """The same ranks in shared memory, or why they have none; every rank gets the same of the two."""
        places = parallel.exchange(_place())
        if len(set(places)) > 1:
            return "the ranks do not see each other's processes"
        num_bytes = int(library.funitel_ranks_bytes(parallel.size))
        mine, address = _make(num_bytes) if parallel.rank == 0 else (None, "")
        address = parallel.share(address)
        fd = mine if parallel.rank == 0 else _open(address)
        handle = None
        if fd is not None:
            timeout_ms = int(COLLECTIVE_TIMEOUT.total_seconds() * 1000)
            handle = library.funitel_ranks(fd, parallel.rank, parallel.size, timeout_ms)
        ranks = cls(parallel.rank, parallel.size, library, handle) if handle else None
        if not parallel.smallest(ranks is not None) or ranks is None:
            return "they cannot open each other's memory"
        ranks.spreads_experts = parallel.spreads_experts
        return ranks

    def __del__(self) -> None:
        self._library.funitel_ranks_release(self.handle)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x`, contiguous float32, over all ranks, in place."""
        assert x.dtype is torch.float32, "sums are of float32"
        assert x.is_contiguous(), "sums are of contiguous values"
        self._check(self._library.funitel_ranks_sum(self.handle, x.data_ptr(), x.numel()))
        return x

    def gather_columns(self, x: torch.Tensor, total: int) -> torch.Tensor | None:
        """Concatenate every rank's columns [rows, part of total], float32, on rank 0; None elsewhere."""
        x = x.contiguous()
        starts = (ctypes.c_int64 * (self.size + 1))(
            *(split_evenly(total, self.size, r)[0] for r in range(self.size)), total
        )
        whole = torch.empty(x.shape[0], total) if self.rank == 0 else None
        target = None if whole is None else whole.data_ptr()
        self._check(self._library.funitel_ranks_gather(self.handle, x.data_ptr(), x.shape[0], starts, target))
        return whole

    def broadcast(self, x: torch.Tensor, source: int | None = None) -> torch.Tensor:
        """Give every rank the values of rank `source`, by default of the root, contiguous, in place."""
        assert x.is_contiguous(), "what is handed out is contiguous"
        size = x.numel() * x.element_size()
        self._check(
            self._library.funitel_ranks_broadcast(
                self.handle, x.data_ptr(), size, self.root if source is None else source
            )
        )
        return x

    def lost(self) -> ShardFailed:
        """The error of the rank that did not come, once a collective has failed."""
        rank = self._library.funitel_ranks_lost_rank(self.handle)
        return ShardFailed(f"rank {self.rank} lost the other ranks: rank {rank} ended or is late")

    def _check(self, is_done: int) -> None:
        if not is_done:
            raise self.lost()


def _place() -> str:
    """Where process ids mean the same: one boot of one kernel, one namespace. Nothing two hosts have in common."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return secrets.token_hex(_NOTE_BYTES)


def _make(num_bytes: int) -> tuple[int | None, str]:
    """Memory without a name: its descriptor, and where others find it; None where the system or Python has none."""
    if not hasattr(os, "memfd_create"):  # a Python built for an old C library
        return None, ""
    note = secrets.token_bytes(_NOTE_BYTES)
    fd = None
    try:
        fd = os.memfd_create("funitel-ranks")
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, num_bytes)
        os.pwrite(fd, note, 0)
    except OSError:
        if fd is not None:
            os.close(fd)
        return None, ""
    return fd, f"/proc/{os.getpid()}/fd/{fd} {note.hex()}"


def _open(address: str) -> int | None:
    """The descriptor of the memory that rank 0 made; None when it cannot be had."""
    path, _, note = address.partition(" ")
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return None
    if os.pread(fd, _NOTE_BYTES, 0).hex() == note:
        return fd
    os.close(fd)
    return None
