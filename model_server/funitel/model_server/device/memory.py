"""The memory of this process and its device: what is free, what is in use, and errors that say there is none left."""

import ctypes
import functools
import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from funitel.model_server.device.host_memory import available_memory
from funitel.proto.errors import NotEnoughMemory
from funitel.proto.step import ShardMemory

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

# What torch and the C++ library say of memory that is not there, in errors of no class of its own.
_WORDS_OF_NO_MEMORY = (
    *("can't allocate memory", "bad_alloc", "out of memory", "Cannot allocate memory"),
    "can't start new thread",  # there is no memory for its stack
)


MEMORY_ERRORS = (RuntimeError, OSError, MemoryError, NotEnoughMemory)
"""What may say that there is no memory left; `is_out_of_memory` tells whether it does."""


def resident_bytes() -> int:
    """Memory of this process that no file stands behind, once what glibc keeps of freed memory is given back.

    After loading that is megabytes that would not be used again.
    """
    _trim()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def process_memory() -> ShardMemory:
    """Host memory that this process holds now, and the most it ever held; files that it maps are included."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    resident, peak = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return ShardMemory(resident, peak)


def log_idle_memory() -> None:
    """Log what this process holds before its first request, once freed memory is given back."""
    _trim()
    memory = process_memory()
    logger.info("memory idle resident_bytes=%d peak_bytes=%d", memory.resident_bytes, memory.peak_bytes)


def bytes_in_use(device: torch.device) -> int:
    """Memory this process holds where weights on `device` lie."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()


def bytes_held(device: torch.device) -> int:
    """Memory that this process keeps from others on `device`: what its allocator holds, whether it is in use or not."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else resident_bytes()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether something failed because there is no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | NotEnoughMemory):
        return True
    return isinstance(error, RuntimeError | OSError) and any(words in str(error) for words in _WORDS_OF_NO_MEMORY)


def within_memory(load: Callable[P, T]) -> Callable[P, T]:
    """`load`, raising NotEnoughMemory with the memory that is left where it fails for want of memory."""

    @functools.wraps(load)
    def wrapped(*given: P.args, **named: P.kwargs) -> T:
        try:
            return load(*given, **named)
        except NotEnoughMemory:
            raise
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            raise NotEnoughMemory(f"the model does not fit in the {available_memory()}: {error}") from error

    return wrapped


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
