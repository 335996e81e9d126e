"""The pools of a model with a drafter: both of as many blocks, counted together."""

from collections.abc import Callable
from dataclasses import dataclass

from funitel.model_server.kv_cache.pool import KVCache, Pools
from funitel.model_server.kv_cache.state_pool import StateLayout


@dataclass(frozen=True, slots=True)
class DraftPools:
    """See Pools. `give` is told the drafter's pool, if it has one, whenever the target's is made."""

    target: Pools
    draft: Pools | None
    give: Callable[[KVCache | None], None]

    @property
    def block_size(self) -> int:
        """See Pools."""
        return self.target.block_size

    @property
    def bytes_per_block(self) -> int:
        """See Pools."""
        return self.target.bytes_per_block + (0 if self.draft is None else self.draft.bytes_per_block)

    @property
    def total_bytes_per_block(self) -> int:
        """See Pools."""
        return self.target.total_bytes_per_block + (0 if self.draft is None else self.draft.total_bytes_per_block)

    @property
    def state_layout(self) -> StateLayout | None:
        """See Pools."""
        return self.target.state_layout

    @property
    def has_parted_blocks(self) -> bool:
        """See Pools."""
        return self.target.has_parted_blocks

    def make(self, num_blocks: int) -> KVCache:
        """See Pools."""
        cache = self.target.make(num_blocks)
        cache.companion = None if self.draft is None else self.draft.make(num_blocks)
        self.give(cache.companion)
        return cache
