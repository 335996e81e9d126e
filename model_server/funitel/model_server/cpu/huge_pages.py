"""Memory in huge pages for weights that the fused step reads in small pieces."""

import ctypes
import mmap

import torch

HUGE_BYTES = 2 << 20
LINE_BYTES = 64


class HugePages:
    """Copies of tensors side by side, so that a processor waits for few addresses and reads neighbours ahead."""

    def __init__(self, num_bytes: int) -> None:
        """Reserve addresses for so many bytes; memory is taken as tensors come. More is reserved where it is needed."""
        self._regions: list[mmap.mmap] = []
        self._reserve(num_bytes)

    def _reserve(self, num_bytes: int) -> None:
        region = mmap.mmap(-1, num_bytes + HUGE_BYTES)
        start = ctypes.addressof(ctypes.c_char.from_buffer(region))
        before = -start % HUGE_BYTES
        whole = num_bytes // HUGE_BYTES * HUGE_BYTES
        if whole:
            region.madvise(mmap.MADV_HUGEPAGE, before, whole)
        self._regions.append(region)
        self._next, self._end = start + before, start + before + num_bytes

    def place(self, tensor: torch.Tensor) -> int:
        """Copy a tensor's numbers, in their order, and return their address, at the start of a line of the cache."""
        num_bytes = tensor.numel() * tensor.element_size()
        if self._next + num_bytes > self._end:
            self._reserve(num_bytes)
        address = self._next
        if num_bytes:
            copied = (ctypes.c_char * num_bytes).from_address(address)
            torch.frombuffer(copied, dtype=tensor.dtype).view(tensor.shape).copy_(tensor)
        self._next += -(-num_bytes // LINE_BYTES) * LINE_BYTES
        return address
