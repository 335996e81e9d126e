"""The host tier of the prefix cache: content of evicted blocks, kept in slots of the shards' host memory. Pure.

The copies that planning decides on are part of the next step, and shards carry them out in their order before it
computes. So what is planned here is true by the time it matters.
"""

from collections import OrderedDict
from collections.abc import Iterable

from funitel.proto.step import BlockCopy


class HostTier:
    """Slots 0..num_slots - 1 by the key of their content, least recently used first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_saved = self.num_loaded = 0
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._keys: dict[int, bytes] = {}  # of slots in use
        self._free = list(range(num_slots - 1, -1, -1))
        self._pinned: frozenset[bytes] = frozenset()
        self._copies: list[BlockCopy] = []

    def __len__(self) -> int:
        """Slots in use."""
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def pin(self, keys: Iterable[bytes]) -> None:
        """Keep these where they are, instead of any before."""
        self._pinned = frozenset(keys)

    def save(self, key: bytes, block: int) -> None:
        """Keep the content of a block that is about to be allocated again, if a slot can be had."""
        if key in self._slots:  # since it was loaded from there
            self._slots.move_to_end(key)
            return
        slot = self._slot()
        if slot is None:
            return
        self._slots[key], self._keys[slot] = slot, key
        self._copies.append(BlockCopy(block, slot, is_load=False))
        self.num_saved += 1

    def load(self, key: bytes, block: int) -> None:
        """Copy content into a block; the slot keeps it too."""
        self._slots.move_to_end(key)
        self._copies.append(BlockCopy(block, self._slots[key], is_load=True))
        self.num_loaded += 1

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """The copies that the next step brings, in order."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def forget(self, copies: Iterable[BlockCopy]) -> None:
        """Forget copies that may not have been carried out: what they saved is lost."""
        for copy in copies:
            if not copy.is_load and (key := self._keys.pop(copy.slot, None)) is not None:
                del self._slots[key]
                self._free.append(copy.slot)

    def _slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        key = next((key for key in self._slots if key not in self._pinned), None)
        if key is None:
            return None
        slot = self._slots.pop(key)
        del self._keys[slot]
        return slot
