"""How large the KV pool of a GPU may be: what memory is left beside the largest step and the recorded ones.

Both are measured, once, before there is a pool. The arithmetic knows no device.
"""

from collections.abc import Callable
from typing import Protocol

from funitel.model_server.device.gpu import GpuState
from funitel.model_server.device.memory import MEMORY_ERRORS, is_out_of_memory
from funitel.model_server.forward.interface import RecordingForward
from funitel.model_server.kv_cache.pool import KVCache
from funitel.proto.errors import NotEnoughMemory

# Of the GPU. The rest is for what is not counted: contexts of this and other processes, kernels that are loaded late.
USABLE = 0.95
MAX_DRIVER_BYTES = 64 << 20  # of one graph: what is beyond is another process's, which took it meanwhile


class GpuCounts(Protocol):
    """What is asked of a GPU."""

    def state(self) -> GpuState:
        """What is held and what is free."""

    def release_cached(self) -> None:
        """Give what is not used back to the GPU."""

    def reset_peak(self) -> None:
        """Count the peak from here on."""

    def peak(self) -> int:
        """Most bytes held since."""


def pool_budget(state: GpuState, fraction: float, set_aside: int) -> int:
    """Bytes a pool may take: within this process's `fraction` of the GPU, and within what others leave of it.

    Alone on the GPU this is TGI's rule: what is free, less what the fraction leaves of the whole GPU. Of several
    processes that are given fractions each gets its own, whichever comes first.
    """
    usable = int(state.total * USABLE)
    own = int(usable * fraction) - state.held
    left = state.free - (state.total - usable)
    return max(0, min(own, left) - set_aside)


def graph_bytes(before: GpuState, after: GpuState, num_graphs: int) -> int:
    """Bytes that `num_graphs` recorded steps will take, from the states around the recording of the largest.

    They share the memory of their tensors, which is the largest's twice: smaller tensors lie otherwise in it. What the
    driver keeps of a graph it keeps of each.
    """
    tensors = max(0, after.held - before.held)
    driver = min(max(0, before.free - after.free - tensors), MAX_DRIVER_BYTES)
    return 2 * tensors + num_graphs * driver


class GpuPoolMemory:
    """Sizes the pool of one GPU: profile first, then ask."""

    is_measured = True

    def __init__(self, gpu: GpuCounts, fraction: float) -> None:
        self._gpu = gpu
        self._fraction = fraction
        self.step_bytes = 0
        self.graph_bytes = 0

    def profile(self, step: Callable[[], None], what: str) -> None:
        """Compute the largest step; most that it held beside what was held before is set aside.

        Raises:
            NotEnoughMemory: there is none for it, even without a pool. `what` says how to make it smaller.
        """
        self._gpu.release_cached()
        held = self._gpu.state().held
        self._gpu.reset_peak()
        try:
            step()
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            raise NotEnoughMemory(f"there is no memory for the largest step, even without a KV pool: {what}") from None
        self.step_bytes = max(0, self._gpu.peak() - held)

    def profile_recording(self, decoder: RecordingForward, cache: KVCache) -> None:
        """Record the largest step, and set aside what all of them will take.

        The first time brings kernels with it that are loaded once, so the second is what counts.
        """
        for _ in range(2):
            self._gpu.release_cached()
            before = self._gpu.state()
            decoder.record_largest(cache)
            after = self._gpu.state()
            decoder.forget_recordings()
        self.graph_bytes = graph_bytes(before, after, decoder.num_recordings)

    def pool_bytes(self) -> int:
        """Bytes the pool may take."""
        self._gpu.release_cached()
        return pool_budget(self._gpu.state(), self._fraction, self.step_bytes + self.graph_bytes)
