"""What serving a model takes: weights and KV blocks of each rank, held against the memory that is free."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from funitel.model_server.device.memory import Gpu, GpuState, free_bytes
from funitel.model_server.executor.pool_sizing import MAX_POOL_TOKENS, host_share, pool_budget
from funitel.model_server.kv_cache.pool import Pools
from funitel.model_server.loading.common import choose_device
from funitel.model_server.settings import ModelsSettings


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

    @property
    def fits(self) -> bool:
        """Whether weights and, where there is one, a pool for at least one block have room."""
        return self.free > sum(self.weights) and (not self.blocks or self.pool > 0)


def with_memory(facts: Needs, settings: ModelsSettings, pools: Sequence[Pools] = ()) -> Needs:
    """The needs with the memory that is free, and with the pool that fits beside the weights where ranks have one."""
    device = choose_device(settings.device, 0)
    free, fraction = free_bytes(device), settings.cuda_memory_fraction
    if not pools:
        return replace(facts, free=free)
    size = pools[0].block_size
    if device.type == "cpu":
        share = host_share(free - sum(facts.weights), fraction, len(facts.weights))
    else:  # each rank has a GPU of its own; what a step takes is known when it is loaded
        held = max(facts.weights)
        share = pool_budget(GpuState(total=Gpu(device).state().total, free=free - held, held=held), fraction, 0)
    num_blocks = min(share // each.bytes_per_block for each in pools) - 1  # block 0 is never a sequence's
    return replace(
        facts,
        blocks=tuple(each.bytes_per_block for each in pools),
        block_size=size,
        free=free,
        pool=max(0, min(num_blocks, MAX_POOL_TOKENS // size)) * size,
    )


def name_of(dtype: torch.dtype) -> str:
    """A precision as flags call it."""
    return str(dtype).removeprefix("torch.")
