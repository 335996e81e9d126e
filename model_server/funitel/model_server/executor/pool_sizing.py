"""Pool sizing: how many blocks a KV pool may have, by the memory of a host or by what is left of a GPU's.

The memory of a host is divided between its ranks. On a GPU the largest step and the recorded ones are measured, once,
before there is a pool; the arithmetic knows no device."""

import socket
from collections.abc import Callable
from typing import Protocol

import torch

from funitel.model_server.device.memory import MEMORY_ERRORS, Gpu, GpuState, free_bytes, is_out_of_memory
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.forward.batch import RecordingForward
from funitel.model_server.kv_cache.pool import KVCache
from funitel.proto.errors import NotEnoughMemory, SettingsError

_CPU = torch.device("cpu")
CPU_SHARE = 0.5  # of free memory: it is shared with the activations of later steps, and with all else on the host
MAX_POOL_TOKENS = 2**31 - 1  # as many as the wire can say: a state of a few kilobytes stands for thousands


class PoolMemory(Protocol):
    """What sizes the pool of a rank."""

    is_measured: bool  # whether the profile run is the largest step, as what it takes is known by measuring alone

    def profile(self, step: Callable[[], None], what: str) -> None:
        """Compute a step; `what` says how to make it smaller."""

    def profile_recording(self, decoder: RecordingForward, cache: KVCache) -> None:
        """Record the largest step over `cache`, and forget it again."""

    def pool_bytes(self) -> int:
        """Bytes the pool may take."""


class HostPoolMemory:
    """The memory of a host, shared fairly with the ranks that are on it too; nothing of it is measured."""

    is_measured = False

    def __init__(self, fraction: float, parallel: TensorParallel) -> None:
        self._fraction = fraction
        self._parallel = parallel

    def profile(self, step: Callable[[], None], what: str) -> None:
        """Compute a step, so that memory is touched and kernels are there."""
        step()

    def profile_recording(self, decoder: RecordingForward, cache: KVCache) -> None:
        """Nothing is measured on a host."""

    def pool_bytes(self) -> int:
        """Bytes the pool of this rank may take."""
        hosts = self._parallel.exchange(socket.gethostname())
        return host_share(free_bytes(_CPU), self._fraction, hosts.count(hosts[self._parallel.rank]))


def num_pool_blocks(max_blocks: int, free: int, block_size: int, asked_tokens: int | None) -> int:
    """Blocks of a pool, at most the `max_blocks` that all ranks have memory for; for `asked_tokens`, if given.

    Raises:
        NotEnoughMemory: of the `free` bytes none, or fewer than are asked for, have room.
        SettingsError: what is asked for is less than a block.
    """
    max_blocks = min(max_blocks, MAX_POOL_TOKENS // block_size)
    if asked_tokens is None:
        if max_blocks < 1:
            raise NotEnoughMemory(f"{free} bytes are left for the KV pool, less than one block of {block_size} tokens")
        return max_blocks
    asked = asked_tokens // block_size
    if asked > max_blocks:
        raise NotEnoughMemory(
            f"--max-batch-total-tokens {asked_tokens} needs more memory than there is: "
            f"at most {max(0, max_blocks) * block_size} tokens fit"
        )
    if asked < 1:
        raise SettingsError(f"--max-batch-total-tokens {asked_tokens} must be >= the block size of {block_size}")
    return asked


def host_share(free: int, fraction: float, num_ranks: int) -> int:
    """Bytes that the pool of each of `num_ranks` on a host may take of the `free` ones."""
    return max(0, int(free * CPU_SHARE * fraction / num_ranks))


# Of the GPU. The rest is for what is not counted: contexts of this and other processes, kernels that are loaded late.
USABLE = 0.95
MAX_DRIVER_BYTES = 64 << 20  # of one graph: what is beyond is another process's, which took it meanwhile


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

    def __init__(self, gpu: Gpu, fraction: float) -> None:
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
