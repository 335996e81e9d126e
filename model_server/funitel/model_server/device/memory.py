"""The memory of this process and its device: what is free, what is in use, and errors that say there is none left."""

import ctypes
import gc
from dataclasses import dataclass
from pathlib import Path

import torch

from funitel.proto.errors import NotEnoughMemory

# What torch and the C++ library say of memory that is not there, in errors of no class of its own.
_WORDS_OF_NO_MEMORY = ("can't allocate memory", "bad_alloc", "out of memory", "Cannot allocate memory")


MEMORY_ERRORS = (RuntimeError, OSError, MemoryError, NotEnoughMemory)
"""What may say that there is no memory left; `is_out_of_memory` tells whether it does."""


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

    After loading that is megabytes that would not be used again.
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
    return isinstance(error, RuntimeError | OSError) and any(words in str(error) for words in _WORDS_OF_NO_MEMORY)


def release_memory(device: torch.device) -> None:
    """Give freed memory back, to the device and to the host."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    _trim()


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """Bytes of a GPU: all, those that are free, and those that this process's allocator holds."""

    total: int
    free: int
    held: int


class Gpu:
    """One CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def state(self) -> GpuState:
        """What is held and what is free, once all work is done."""
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return GpuState(total=total, free=free, held=torch.cuda.memory_reserved(self._device))

    def release_cached(self) -> None:
        """Give what the allocator holds and does not use back to the GPU."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def reset_peak(self) -> None:
        """Count the peak from here on."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """Most bytes that the allocator has held: what it could not use for want of a fitting hole is in them."""
        return torch.cuda.max_memory_reserved(self._device)
