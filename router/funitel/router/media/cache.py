"""Processed media items, kept for requests that bring them again. Event loop only."""

from collections import OrderedDict

from funitel.router.media.interface import PreparedMedia

Key = tuple[bytes, ...]


class PreparedCache:
    """The items that were used last, of `max_bytes` of processed values together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: OrderedDict[Key, PreparedMedia] = OrderedDict()  # the one used last is the last
        self.num_bytes = 0

    def get(self, key: Key) -> PreparedMedia | None:
        """Return an item, which is now the one used last."""
        item = self._items.get(key)
        if item is not None:
            self._items.move_to_end(key)
        return item

    def put(self, key: Key, item: PreparedMedia) -> None:
        """Keep an item; those that were not used for longest go."""
        size = len(item.input.values)
        if key in self._items or size > self._max_bytes:
            return
        self._items[key] = item
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, gone = self._items.popitem(last=False)
            self.num_bytes -= len(gone.input.values)
