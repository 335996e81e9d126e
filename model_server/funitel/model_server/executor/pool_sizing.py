"""Pool sizing: how many blocks a KV pool may have, by the memory of a host or by what is left of a GPU's.

The memory of a host is divided between its ranks. On a GPU the largest step and the recorded ones are measured, once,
before there is a pool; the arithmetic knows no device."""

import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from funitel.model_server.device.host_memory import AvailableMemory, available_memory
from funitel.model_server.device.memory import MEMORY_ERRORS, Gpu, GpuState, is_out_of_memory
from funitel.model_server.device.tensor_parallel import TensorParallel
from funitel.model_server.forward.batch import RecordingForward
from funitel.model_server.kv_cache.pool import KVCache
from funitel.proto.errors import NotEnoughMemory, SettingsError

USUAL_CONTEXTS = 16  # of a pool on a host, where no setting says how large it is to be
USUAL_SHARE = 0.25  # of the available memory, likewise
FRACTION_SHARE = 0.5  # that --cuda-memory-fraction is a fraction of, on a host
MIN_CHECKPOINTS = 64  # of states, which a pool has slots for beside those of running sequences
STATE_SHARE = 0.5  # of the bytes for KV pool and states: what states take at most
USUAL_BATCH_SIZE = 128  # sequences, where the router does not say how many
MAX_SHARE = 0.9  # of what is asked for in tokens
MAX_POOL_TOKENS = 2**31 - 1  # as many as the wire can say: a state of a few kilobytes stands for thousands


@dataclass(frozen=True, slots=True)
class PoolRoom:
    """Bytes that the pool of a rank may take: `most` at all, `usual` where no number of tokens is asked for.

    The usual pool holds at most `contexts` of the model's, if that is given. In words, `limit` is what sets the usual
    bytes, and `memory` is the memory that is available.
    """

    most: int
    usual: int
    contexts: int | None
    limit: str
    memory: str

    def without(self, num_bytes: int) -> "PoolRoom":
        """What is left beside so many bytes."""
        return replace(self, most=max(0, self.most - num_bytes), usual=max(0, self.usual - num_bytes))


def num_state_slots(room: PoolRoom, bytes_per_slot: int, num_rows: int, *, has_prefix_cache: bool = True) -> int:
    """Slots of a state pool for `num_rows` sequences and for checkpoints, or as many as half of the usual bytes hold.

    Slot 0 is no sequence's.
    """
    num_checkpoints = max(num_rows, MIN_CHECKPOINTS) if has_prefix_cache else 0
    return min(1 + num_rows + num_checkpoints, int(room.usual * STATE_SHARE) // bytes_per_slot)


class PoolMemory(Protocol):
    """What sizes the pool of a rank."""

    is_measured: bool  # whether the profile run is the largest step, as what it takes is known by measuring alone

    def profile(self, step: Callable[[], None], what: str) -> None:
        """Compute a step; `what` says how to make it smaller."""

    def profile_recording(self, decoder: RecordingForward, cache: KVCache) -> None:
        """Record the largest step over `cache`, and forget it again."""

    def room(self, step_bytes: int) -> PoolRoom:
        """What the pool may take, where the largest step is known to take `step_bytes` on a host."""


class HostPoolMemory:
    """The memory of a host, shared fairly with the ranks and replicas that are on it too; nothing of it is measured.

    Args:
        fraction: as asked for, of half of the available memory; None for the usual size.
        parallel: the ranks.
        num_replicas: that share the host.
    """

    is_measured = False

    def __init__(self, fraction: float | None, parallel: TensorParallel, num_replicas: int = 1) -> None:
        self._fraction = fraction
        self._parallel = parallel
        self._num_replicas = num_replicas

    def profile(self, step: Callable[[], None], what: str) -> None:
        """Compute a step, so that memory is touched and kernels are there."""
        step()

    def profile_recording(self, decoder: RecordingForward, cache: KVCache) -> None:
        """Nothing is measured on a host."""

    def room(self, step_bytes: int) -> PoolRoom:
        """What the pool of this rank may take."""
        hosts = self._parallel.exchange(socket.gethostname())
        num_ranks = hosts.count(hosts[self._parallel.rank]) * self._num_replicas
        return host_room(available_memory(), self._fraction, num_ranks, step_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDemand:
    """What a pool is for: sequences of at most `context` tokens, `num_rows` of them at once, in blocks of `block_size`.

    `asked_tokens` is the size that was asked for. Else a sequence of `longest` tokens has room, if that was asked for.
    Where blocks are `empty`, as of a model that keeps states alone, memory says nothing of how many there should be.
    """

    context: int
    block_size: int
    num_rows: int
    longest: int | None = None
    asked_tokens: int | None = None
    empty: bool = False

    def usual(self, room: PoolRoom, usual_blocks: int) -> tuple[int, str]:
        """Blocks where no size is asked for, at most `usual_blocks`, and what limits them."""
        contexts = room.contexts if room.contexts is not None or not self.empty else USUAL_CONTEXTS
        if contexts is None:
            return usual_blocks, room.limit
        # A block may be a whole context, such as a state.
        contexts = max(contexts, self.num_rows) if self.block_size >= self.context else contexts
        most = contexts * -(-self.context // self.block_size)
        if usual_blocks <= most:
            return usual_blocks, room.limit
        return most, f"{contexts} contexts of {self.context} tokens; --max-batch-total-tokens sets another size"


def num_pool_blocks(demand: PoolDemand, room: PoolRoom, max_blocks: int, usual_blocks: int) -> tuple[int, str]:
    """Blocks of a pool and what limits them; `max_blocks` and `usual_blocks` have room on every rank.

    Raises:
        NotEnoughMemory: there is room for fewer than are asked for, or for none.
        SettingsError: what is asked for is less than a block.
    """
    size, asked_tokens = demand.block_size, demand.asked_tokens
    max_blocks = min(max_blocks, MAX_POOL_TOKENS // size)
    if asked_tokens is None:
        found, limit = demand.usual(room, min(usual_blocks, max_blocks))
        longest = min(max_blocks, -(-(demand.longest or 0) // size))
        if max(found, longest) < 1:
            raise NotEnoughMemory(
                f"{room.usual} bytes are left for the KV pool, less than one block of {size} tokens: {room.limit}"
            )
        return (found, limit) if found >= longest else (longest, f"--max-total-tokens {demand.longest}")
    asked = asked_tokens // size
    if asked > max_blocks:
        raise NotEnoughMemory(
            f"--max-batch-total-tokens {asked_tokens} needs more memory than there is: "
            f"at most {max(0, max_blocks) * size} tokens fit in the {room.memory}"
        )
    if asked < 1:
        raise SettingsError(f"--max-batch-total-tokens {asked_tokens} must be >= the block size of {size}")
    return asked, "--max-batch-total-tokens"


def host_room(available: AvailableMemory, fraction: float | None, num_ranks: int, step_bytes: int = 0) -> PoolRoom:
    """What the pool of each of `num_ranks` on a host may take; see `HostPoolMemory` for `fraction`."""
    part, share = 1.0, USUAL_SHARE
    contexts: int | None = USUAL_CONTEXTS
    if fraction is not None:
        part, share, contexts = fraction, FRACTION_SHARE, None
    bytes_of_rank = available.num_bytes * part / num_ranks
    most = max(0, int(bytes_of_rank * MAX_SHARE) - step_bytes)
    limit = f"{part * share:.0%} of the {available}" + ("" if num_ranks == 1 else f", divided by {num_ranks}")
    return PoolRoom(most, max(0, min(most, int(bytes_of_rank * share))), contexts, limit, str(available))


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

    def __init__(self, gpu: Gpu, fraction: float | None) -> None:
        self._gpu = gpu
        self._fraction = 1.0 if fraction is None else fraction
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

    def room(self, step_bytes: int) -> PoolRoom:
        """What the pool may take beside what was measured."""
        self._gpu.release_cached()
        budget = pool_budget(self._gpu.state(), self._fraction, self.step_bytes + self.graph_bytes)
        memory = f"{budget / 1e6:.0f} MB that the GPU leaves"
        return PoolRoom(budget, budget, None, memory, memory)


class JoinedPoolMemory:
    """Sizes the pools of a model with layers on a GPU and on the CPU: as many blocks as both have room for.

    Args:
        host, gpu: what sizes a pool of one device.
        share: of a block's bytes that is on the GPU, within (0, 1).
    """

    is_measured = True

    def __init__(self, host: PoolMemory, gpu: PoolMemory, share: float) -> None:
        self._host = host
        self._gpu = gpu
        self._share = share

    def profile(self, step: Callable[[], None], what: str) -> None:
        """See GpuPoolMemory."""
        self._gpu.profile(step, what)

    def profile_recording(self, decoder: RecordingForward, cache: KVCache) -> None:
        """Nothing is recorded: hidden states come from the host."""

    def room(self, step_bytes: int) -> PoolRoom:
        """What the pools of both devices together may take."""
        return joined_room(self._host.room(step_bytes), self._gpu.room(0), self._share)


def joined_room(host: PoolRoom, gpu: PoolRoom, share: float) -> PoolRoom:
    """What pools on the host and on a GPU may take together, where blocks have a `share` of their bytes on the GPU."""
    most = min(host.most / (1 - share), gpu.most / share)
    of_host, of_gpu = host.usual / (1 - share), gpu.usual / share
    fewer = host if of_host <= of_gpu else gpu
    return PoolRoom(int(most), int(min(most, of_host, of_gpu)), host.contexts, fewer.limit, fewer.memory)
