"""The memory of a GPU as its driver and torch's allocator count it: the one place that asks them."""

from dataclasses import dataclass

import torch


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
