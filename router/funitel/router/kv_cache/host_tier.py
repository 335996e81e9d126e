"""The lower tier of the prefix cache: content of evicted blocks, in slots of the shards' host memory or files. Pure.

Host memory gets what is evicted. A file gets every block as soon as it is published, so that whatever ends the process
takes little with it; an eviction then copies nothing.

The copies that planning decides on are part of the next step, and shards carry them out in their order before it
computes. So what is planned here is true by the time it matters; a shard that cannot make a copy refuses the step.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from enum import StrEnum

from funitel.proto.step import BlockCopy, StoredBlock

MAX_LOSSES = 8  # refused steps after which no content of a file is trusted


class CacheTier(StrEnum):
    """Where a cached prefix is found."""

    MEMORY = "memory"  # the KV pool
    HOST = "host"  # slots of host memory beside a GPU
    DISK = "disk"  # slots of a file


class HostTier:
    """Slots 0..num_slots - 1 by the key of their content, least recently used first.

    Args:
        num_slots: 0 where there is no such tier.
        kind: where the slots are.
        ttl: seconds after its last use in which content is found; None for any.
        stored: slots with content of an earlier run.
        now: monotonic time in seconds.
    """

    def __init__(
        self,
        num_slots: int,
        kind: CacheTier = CacheTier.HOST,
        ttl: float | None = None,
        stored: Iterable[StoredBlock] = (),
        now: float = 0.0,
    ) -> None:
        self.num_slots = num_slots
        self.kind = kind
        self.writes_through = kind is CacheTier.DISK and num_slots > 0
        self.ttl = ttl
        self.now = now
        self.num_saved = self.num_loaded = self.num_expired = self.num_lost = 0
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._used: dict[bytes, float] = {}  # when content was used last
        self._keys: dict[int, bytes] = {}  # of slots in use
        self._pinned: frozenset[bytes] = frozenset()
        self._reserved: Counter[bytes] = Counter()  # of preempted sequences
        self._copies: list[BlockCopy] = []
        self._num_losses = 0  # steps that were refused
        for each in sorted(stored, key=lambda block: -block.age_seconds):
            if each.slot < num_slots and each.slot not in self._keys:
                if each.key in self._slots:  # an older one
                    self._forget(each.key)
                self._put(each.key, each.slot, now - each.age_seconds)
        self._free = [slot for slot in range(num_slots - 1, -1, -1) if slot not in self._keys]

    def __len__(self) -> int:
        """Slots in use."""
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots and not self._has_expired(key)

    def pin(self, keys: Iterable[bytes]) -> None:
        """Keep these where they are, instead of any before."""
        self._pinned = frozenset(keys)

    def save(self, key: bytes, block: int, used: float = 0.0) -> None:
        """Keep content of a block, last used at `used`, if a slot can be had; what is there already is not copied."""
        if key in self._slots:  # since it was loaded from there
            self._slots.move_to_end(key)
            self._used[key] = max(used, self._used[key])
            return
        slot = self._slot()
        if slot is not None:
            self._save(key, block, slot, used)

    def load(self, key: bytes, block: int) -> None:
        """Copy content into a block; the slot keeps it too."""
        self._slots.move_to_end(key)
        self._used[key] = self.now
        self._copies.append(BlockCopy(block, self._slots[key], is_load=True, key=key))
        self.num_loaded += 1

    def swap_out(self, keys: Sequence[bytes], blocks: Sequence[int]) -> bool:
        """Save blocks of a sequence that is preempted, and keep them until `release`; whether there are slots for all.

        Otherwise none is saved.
        """
        missing = [(key, block) for key, block in zip(keys, blocks, strict=True) if key not in self._slots]
        kept = {key for key in (*self._reserved, *keys) if key in self._slots}
        if len(missing) > len(self._free) + len(self._slots) - len(kept):
            return False
        self._reserved.update(keys)
        for key in keys:
            if key in self._slots:
                self._slots.move_to_end(key)
                self._used[key] = self.now
        for key, block in missing:
            slot = self._slot()
            assert slot is not None, "they were counted"
            self._save(key, block, slot, self.now)
        return True

    def release(self, keys: Iterable[bytes]) -> None:
        """Keep content of `swap_out` no longer than any other."""
        for key in keys:
            self._reserved[key] -= 1
            if not self._reserved[key]:
                del self._reserved[key]
                if key in self._used:
                    self._used[key] = self.now

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies that the next step brings, in order."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def forget(self, copies: Iterable[BlockCopy]) -> None:
        """Forget copies that may not have been carried out: what they saved is lost."""
        for copy in copies:
            if not copy.is_load and (key := self._keys.get(copy.slot)) is not None:
                self._free.append(self._forget(key))

    def drop(self, slots: Sequence[int]) -> None:
        """Forget slots that have lost their content, and at times all others: each loss disturbs every stream."""
        self.num_lost += len(slots)
        self._num_losses += 1
        for slot in slots if self._num_losses % MAX_LOSSES else tuple(self._keys):
            if (key := self._keys.get(slot)) is not None:
                self._free.append(self._forget(key))

    def discard(self, keys: Iterable[bytes]) -> None:
        """Forget content that is wrong; a later process does not find it either."""
        slots = {self._forget(key) for key in keys if key in self._slots}
        self._free.extend(slots)
        self._copies = [copy for copy in self._copies if copy.is_load or copy.slot not in slots]
        if self.writes_through:
            self._copies.extend(BlockCopy(1, slot, is_load=False) for slot in slots)

    def expire(self) -> None:
        """Free slots with content that was not used for too long."""
        if self.ttl is None:
            return
        while self._slots and self._has_expired(key := next(iter(self._slots))):
            self._free.append(self._forget(key))
            self.num_expired += 1

    def _has_expired(self, key: bytes) -> bool:
        return self.ttl is not None and self.now - self._used[key] >= self.ttl and key not in self._reserved

    def _save(self, key: bytes, block: int, slot: int, used: float) -> None:
        self._put(key, slot, used)
        self._copies.append(BlockCopy(block, slot, is_load=False, key=key, age_seconds=max(0.0, self.now - used)))
        self.num_saved += 1

    def _put(self, key: bytes, slot: int, used: float) -> None:
        self._slots[key], self._keys[slot], self._used[key] = slot, key, used

    def _forget(self, key: bytes) -> int:
        """Forget content; returns its slot, which is free then."""
        slot = self._slots.pop(key)
        del self._keys[slot], self._used[key]
        return slot

    def _slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        key = next((key for key in self._slots if key not in self._pinned and key not in self._reserved), None)
        return None if key is None else self._forget(key)
