"""The KV pool and its prefix cache: which blocks are free, in use, or cached for their content. Pure.

Block 0 is never handed out. A full, computed block is *published* under a key that stands for every token up to its
end. Sequences with the same cached prefix share it. When it is unused it stays until its memory is needed, least
recently used first. With a host tier its content goes there then, and comes back into another block. `states` are the
slots of recurrent states, which are cached under the same keys; None for models that keep none.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

from funitel.proto.step import BlockCopy
from funitel.router.kv_cache.host_tier import HostTier
from funitel.router.kv_cache.state_slots import StateSlots


class BlockPool:
    """Blocks 1..num_blocks, each free, in use by one or more sequences, or cached: unused, but with known content.

    Content that was not used for `ttl` seconds is forgotten, here and in the lower tier; time is what `tick` says.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        host_blocks: int = 0,
        state_slots: int = 0,
        *,
        host: HostTier | None = None,
        ttl: float | None = None,
    ) -> None:
        self.host = HostTier(host_blocks, ttl=ttl) if host is None else host
        self.ttl = ttl
        self.now = self.host.now
        self.num_expired = 0
        self.needs_ticks = ttl is not None or self.host.num_slots > 0
        self.states = StateSlots(state_slots) if state_slots else None
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evicted = 0
        self._free = list(range(num_blocks, 0, -1))
        self._users: dict[int, int] = {}  # blocks in use, by how many sequences
        self._cached: OrderedDict[int, float] = OrderedDict()  # by the time of their last use
        self._keys: dict[int, bytes] = {}  # of published blocks, in use or cached
        self._published: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, cached ones among them."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks in use by sequences."""
        return len(self._users)

    @property
    def num_cached(self) -> int:
        """Unused blocks that are kept for their content."""
        return len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take `count` blocks of no content, from the cached ones last; the caller has checked `num_free`."""
        if not count:
            return ()
        assert count <= self.num_free, f"{count} blocks asked for, {self.num_free} free"
        taken = tuple(self._free.pop() if self._free else self._evict() for _ in range(count))
        self._users.update(dict.fromkeys(taken, 1))
        return taken

    def can_hold(self, tables: Sequence[Sequence[int]]) -> bool:
        """Whether the blocks of some tables are of this pool, none of them in use, and none twice in a table."""
        return all(
            len(set(table)) == len(table)
            and all(0 < block <= self.num_blocks and block not in self._users for block in table)
            for table in tables
        )

    def hold(self, tables: Iterable[Sequence[int]]) -> None:
        """Use blocks that rows of the shards have already, of a pool without content; some may share a block."""
        assert not self._keys, "content may be overwritten"
        for table in tables:
            for block in table:
                self._users[block] = self._users.get(block, 0) + 1
        self._free = [block for block in self._free if block not in self._users]

    def _evict(self) -> int:
        block, used = self._cached.popitem(last=False)
        key = self._keys.pop(block)
        del self._published[key]
        self.host.save(key, block, used)
        if self.states is not None and key not in self.host:
            self.states.withdraw(key)
        self.num_evicted += 1
        return block

    def free(self, blocks: Sequence[int]) -> None:
        """Free blocks in use, given in their sequence's order; the deepest will be evicted first."""
        for block in reversed(blocks):
            assert block in self._users, f"block {block} is not in use"
            self._users[block] -= 1
            if self._users[block]:
                continue
            del self._users[block]
            if block in self._keys:
                self._cached[block] = self.now
            else:
                self._free.append(block)

    def tick(self, now: float) -> None:
        """Note the monotonic time in seconds, and free blocks and slots with expired content."""
        self.now = self.host.now = now
        if self.ttl is None:
            return
        while self._cached:
            block, used = next(iter(self._cached.items()))
            if now - used < self.ttl:
                break
            del self._cached[block]
            self.withdraw((block,))
            self._free.append(block)
            self.num_expired += 1
        self.host.expire()

    # Content --------------------------------------------------------------------------------------------------------

    def publish(self, block: int, key: bytes) -> None:
        """Make the content of a full, computed block in use known; the first block of a key stays the one."""
        assert block in self._users, f"block {block} is not in use"
        if key not in self._published and block not in self._keys:
            self._published[key] = block
            self._keys[block] = key
            if self.host.writes_through:
                self.host.save(key, block, self.now)

    def withdraw(self, blocks: Iterable[int]) -> None:
        """Take the publication of blocks back: they match no prefix any more; sequences that share one keep it."""
        for block in blocks:
            key = self._keys.pop(block, None)
            if key is not None:
                del self._published[key]
                if self.states is not None:
                    self.states.withdraw(key)

    def match(self, keys: Iterable[bytes]) -> tuple[int, ...]:
        """Published blocks of the longest beginning of `keys`; nothing is taken yet."""
        found = []
        for key in keys:
            block = self._published.get(key)
            if block is None:
                break
            found.append(block)
        return tuple(found)

    def match_host(self, keys: Iterable[bytes]) -> tuple[bytes, ...]:
        """The longest beginning of `keys` that the host tier holds."""
        return tuple(takewhile(self.host.__contains__, keys))

    def load(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        """Take blocks of the content that the host tier holds under `keys`; the caller has checked `num_free`."""
        if not keys:
            return ()
        self.host.pin(keys)
        blocks = self.allocate(len(keys))
        self.host.pin(())
        for block, key in zip(blocks, keys, strict=True):
            self.host.load(key, block)
            self.publish(block, key)
        return blocks

    def forget_copies(self, copies: Iterable[BlockCopy]) -> None:
        """Forget copies that may not have been carried out: what they saved or loaded matches no prefix any more."""
        copies = (*copies, *self.host.take_copies())
        loaded = [copy.block for copy in copies if copy.is_load]
        self.withdraw(loaded)
        for block in loaded:
            if block in self._cached:  # the sequence it was loaded for has left
                del self._cached[block]
                self._free.append(block)
        self.host.forget(copies)

    def num_idle(self, blocks: Iterable[int]) -> int:
        """Count the unused ones of `blocks`: sharing them takes so many from `num_free`."""
        return sum(block not in self._users for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Use published blocks, beside the sequences that use them already."""
        for block in blocks:
            assert block in self._keys, f"block {block} is not published"
            self._cached.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1
