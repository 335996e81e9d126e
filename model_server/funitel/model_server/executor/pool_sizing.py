"""How much memory a KV pool may take on this device, and how much this process has."""

import ctypes
import gc
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.kv_cache.pool import KVCache
from funitel.model_server.models.decoder import RecordingForward
from funitel.proto.errors import NotEnoughMemory, SettingsError

_CPU = torch.device("cpu")
CPU_SHARE = 0.5  # of free memory: it is shared with the activations of later steps, and with all else on the host
MOST_POOL_TOKENS = 2**31 - 1  # as many as the wire can say: a state of a few kilobytes stands for thousands
# What torch and the C++ library say of memory that is not there, in errors of no class of its own.
WORDS_OF_NO_MEMORY = ("can't allocate memory", "bad_alloc", "out of memory", "Cannot allocate memory")


class PoolMemory(Protocol):
    """What sizes the pool of a rank."""

    is_measured: bool  # whether steps are rehearsed at their largest, as what they take is known by measuring alone

    def rehearse(self, step: Callable[[], None], what: str) -> None:
        """Compute a step; `what` says how to make it smaller."""

    def rehearse_recording(self, decoder: RecordingForward, cache: KVCache) -> None:
        """Record the largest step over `cache`, and forget it again."""

    def pool_bytes(self) -> int:
        """Bytes the pool may take."""


class HostMemory:
    """The memory of a host, shared fairly with the ranks that are on it too; nothing of it is measured."""

    is_measured = False

    def __init__(self, fraction: float, parallel: TensorParallel) -> None:
        self._fraction = fraction
        self._parallel = parallel

    def rehearse(self, step: Callable[[], None], what: str) -> None:
        """Compute a step, so that memory is touched and kernels are there."""
        step()

    def rehearse_recording(self, decoder: RecordingForward, cache: KVCache) -> None:
        """Nothing is measured on a host."""

    def pool_bytes(self) -> int:
        """Bytes the pool of this rank may take."""
        hosts = self._parallel.exchange(socket.gethostname())
        return host_share(free_bytes(_CPU), self._fraction, hosts.count(hosts[self._parallel.rank]))


def num_pool_blocks(most: int, free: int, block_size: int, asked_tokens: int | None) -> int:
    """Blocks of a pool, of at `most` so many that all ranks have memory for; for `asked_tokens`, where that is given.

    Raises:
        NotEnoughMemory: of the `free` bytes none, or fewer than are asked for, have room.
        SettingsError: what is asked for is less than a block.
    """
    most = min(most, MOST_POOL_TOKENS // block_size)
    if asked_tokens is None:
        if most < 1:
            raise NotEnoughMemory(f"{free} bytes are left for the KV pool, less than one block of {block_size} tokens")
        return most
    asked = asked_tokens // block_size
    if asked > most:
        raise NotEnoughMemory(
            f"--max-batch-total-tokens {asked_tokens} needs more memory than there is: "
            f"at most {max(0, most) * block_size} tokens fit"
        )
    if asked < 1:
        raise SettingsError(f"--max-batch-total-tokens {asked_tokens} must be >= the block size of {block_size}")
    return asked


def host_share(free: int, fraction: float, num_ranks: int) -> int:
    """Bytes that the pool of each of `num_ranks` on a host may take of the `free` ones."""
    return max(0, int(free * CPU_SHARE * fraction / num_ranks))


def free_bytes(device: torch.device) -> int:
    """Memory this process can still get: of a GPU, of the host, or of its control group if that allows less."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    if (group / "memory.max").is_file() and (group / "memory.stat").is_file():
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            # Pages of files just read, such as the checkpoint, count as used but are given back on demand.
            used = int((group / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
            available = min(available, int(limit) - used)
    return max(available, 0)


def resident_bytes() -> int:
    """Memory of this process that no file stands behind, once what glibc keeps of freed memory is given back.

    After loading that is megabytes which nobody would use again.
    """
    _trim()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def bytes_in_use(device: torch.device) -> int:
    """Memory this process holds where weights on `device` lie."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether something failed because there is no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | NotEnoughMemory):
        return True
    return isinstance(error, RuntimeError | OSError) and any(words in str(error) for words in WORDS_OF_NO_MEMORY)


def give_back(device: torch.device) -> None:
    """Give freed memory back, to the device and to the host."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    _trim()


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
