"""How many blocks a KV pool may have: the memory of a host divided between its ranks, and limits on request."""

import socket
from collections.abc import Callable
from typing import Protocol

import torch

from funitel.model_server.device.memory import free_bytes
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.forward.interface import RecordingForward
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
