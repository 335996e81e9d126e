"""The block allocator: which KV blocks are free. Pure; block 0 is reserved and never handed out."""

from collections.abc import Iterable


class BlockAllocator:
    """Blocks 1..num_blocks, each free or owned by exactly one sequence."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks, 0, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks owned by sequences."""
        return len(self._used)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` blocks; the caller has checked `num_free`."""
        assert count <= len(self._free), f"{count} blocks asked for, {len(self._free)} free"
        taken = tuple(self._free.pop() for _ in range(count))
        self._used.update(taken)
        return taken

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back; each must be in use."""
        for block in blocks:
            assert block in self._used, f"block {block} is not in use"
            self._used.remove(block)
            self._free.append(block)
