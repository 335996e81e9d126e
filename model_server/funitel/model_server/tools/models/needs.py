"""What serving a model takes: weights and KV blocks of each rank, held against the memory that is free."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from funitel.model_server.device.host_memory import AvailableMemory, available_memory
from funitel.model_server.device.memory import Gpu, GpuState
from funitel.model_server.executor.pool_sizing import (
    MAX_POOL_TOKENS,
    USUAL_BATCH_SIZE,
    PoolDemand,
    PoolRoom,
    host_room,
    joined_room,
    num_state_slots,
    pool_budget,
)
from funitel.model_server.kv_cache.state_pool import StateLayout
from funitel.model_server.loading.common import choose_device
from funitel.model_server.settings import ModelsSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PartNeeds:
    """Some layers of a model in parts: bytes of their weights, and of a block of KV, on the device that has them."""

    layers: str
    device: str
    precision: str
    weights: int
    block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Of one model. `weights` are bytes of each rank, `blocks` the bytes of a block of KV of each; empty without KV."""

    architecture: str
    served_by: str
    why: str = ""  # ... and not by a faster path
    precision: str
    kv_precision: str = ""
    context: int  # tokens
    weights: tuple[int, ...]
    blocks: tuple[int, ...] = ()
    block_size: int = 0
    free: int = 0  # bytes of the machine, or of each rank's GPU
    pool: int = 0  # tokens
    states: tuple[int, ...] = ()  # bytes of a sequence's states of each rank, where layers keep any
    state_slots: int = 0  # of the state pool, for sequences and checkpoints
    parts: tuple[PartNeeds, ...] = ()  # of a model in parts

    @property
    def fits(self) -> bool:
        """Whether weights and, where there is one, a pool for at least one block have room."""
        has_states = not self.states or self.state_slots > 0
        return self.free > sum(self.weights) and (not self.blocks or self.pool > 0) and has_states


class PoolSizes(Protocol):
    """Of the `Pools` of a rank what its size is computed from."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""

    @property
    def bytes_per_block(self) -> int:
        """Memory of a block on this rank."""

    @property
    def state_layout(self) -> StateLayout | None:
        """What the model keeps of a sequence besides, if it does."""


def with_memory(facts: Needs, settings: ModelsSettings, pools: Sequence[PoolSizes] = ()) -> Needs:
    """The needs with the memory that is free, and with the pool that fits beside the weights where ranks have one."""
    fraction = settings.cuda_memory_fraction
    on_gpu = [each for each in facts.parts if each.device == "cuda"]
    device = choose_device("cpu" if facts.parts and not on_gpu else settings.device, 0)
    if on_gpu:
        held = sum(each.weights for each in on_gpu)
        host = available_memory()
        left = AvailableMemory(host.num_bytes - sum(facts.weights) + held, host.limit)
        gpu = Gpu(device).state()
        free = host.num_bytes + gpu.free
        share = sum(each.block for each in on_gpu) / pools[0].bytes_per_block
        room = joined_room(host_room(left, fraction, 1), _gpu_room(gpu, held, fraction), share)
    elif device.type == "cpu":
        available = available_memory()
        free = available.num_bytes
        left = AvailableMemory(free - sum(facts.weights), available.limit)
        room = host_room(left, fraction, len(facts.weights))
    else:  # each rank has a GPU of its own; what a step takes is known when it is loaded
        gpu = Gpu(device).state()
        free = gpu.free
        room = _gpu_room(gpu, max(facts.weights), fraction)
    if not pools:
        return replace(facts, free=free)
    size, layouts = pools[0].block_size, [each.state_layout for each in pools]
    states = tuple(layout.bytes_per_slot for layout in layouts if layout is not None)
    num_slots = min((num_state_slots(room, each, USUAL_BATCH_SIZE) for each in states), default=0)
    room = room.without(num_slots * max(states, default=0))
    num_blocks = min(room.usual // each.bytes_per_block for each in pools) - 1  # block 0 is never a sequence's
    is_empty = all(each.bytes_per_block < size for each in pools)
    demand = PoolDemand(context=facts.context, block_size=size, num_rows=USUAL_BATCH_SIZE, empty=is_empty)
    num_blocks, _ = demand.usual(room, num_blocks)
    return replace(
        facts,
        blocks=tuple(each.bytes_per_block for each in pools),
        block_size=size,
        free=free,
        pool=max(0, min(num_blocks, MAX_POOL_TOKENS // size)) * size,
        states=states,
        state_slots=max(0, num_slots - 1),  # slot 0 is no sequence's
    )


def _gpu_room(gpu: GpuState, held: int, fraction: float | None) -> PoolRoom:
    """What a pool may take of a GPU beside weights that are still to be loaded."""
    state = GpuState(total=gpu.total, free=gpu.free - held, held=held)
    budget = pool_budget(state, 1.0 if fraction is None else fraction, 0)
    return PoolRoom(budget, budget, None, "", "")
