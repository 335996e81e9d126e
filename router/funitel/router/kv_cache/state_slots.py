"""The state pool of models with recurrent layers: which slots are free, in use, or cached for their content. Pure.

A running sequence has one slot for its working state. Checkpoints, copies of it after a number of tokens, lie in other
slots: cached under the key of the block that these tokens fill, until their memory is needed, least recently used
first. Slot 0 is never handed out. Shards carry out the copies of a step before it computes, so what is planned here is
true by the time it matters.
"""

from collections import OrderedDict


class StateSlots:
    """Slots 1..num_slots, each free, in use by a running sequence or a save under way, or cached."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_evicted = 0
        self._free = list(range(num_slots, 0, -1))
        self._cached: OrderedDict[bytes, int] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        """Slots that can be allocated, cached ones among them."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Slots that are kept for their content."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Slots in use by running sequences and saves under way."""
        return self.num_slots - self.num_free

    def __contains__(self, key: bytes) -> bool:
        return key in self._cached

    def allocate(self) -> int | None:
        """Take a slot of no content, from the cached ones last; None if all are in use."""
        if self._free:
            return self._free.pop()
        if not self._cached:
            return None
        _, slot = self._cached.popitem(last=False)
        self.num_evicted += 1
        return slot

    def allocate_from(self, key: bytes) -> tuple[int, int]:
        """Take a slot for a copy of the state cached under `key`; returns it and the slot to copy from.

        They are the same where no other slot is left: the cached state is then used up.
        """
        source = self._cached[key]
        self._cached.move_to_end(key)
        slot = self.allocate()
        assert slot is not None, "a cached slot can always be had"
        return slot, source

    def release(self, slot: int) -> None:
        """Free a slot in use."""
        self._free.append(slot)

    def publish(self, slot: int, key: bytes) -> None:
        """Cache the content of a slot in use; the first slot of a key stays the one."""
        if key in self._cached:
            self._cached.move_to_end(key)
            self._free.append(slot)
        else:
            self._cached[key] = slot

    def withdraw(self, key: bytes) -> None:
        """Forget what is cached under a key, if anything is."""
        slot = self._cached.pop(key, None)
        if slot is not None:
            self._free.append(slot)
