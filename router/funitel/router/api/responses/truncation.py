"""`truncation: auto`: drop the first turns of a conversation that does not fit the context."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from funitel.proto.errors import ContextTooLong
from funitel.router.api.responses.schema_request import Item, MessageItem

T = TypeVar("T")


class Conversations(Protocol):
    """Conversations by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Sequence[Item]: ...


class Shortened:
    """A conversation and what is left of it without its first turns, longest first; each is made when it is asked for.

    A turn begins with a message of the user. What system and developer say stays, and so does the last turn.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items
        users = [place for place, item in enumerate(items) if isinstance(item, MessageItem) and item.role == "user"]
        self._starts = [0, *users[1:]]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> Sequence[Item]:
        start = self._starts[number]
        return [*filter(_instructs, self._items[:start]), *self._items[start:]]


def _instructs(item: Item) -> bool:
    return isinstance(item, MessageItem) and item.role in ("system", "developer")


async def prepare_longest(conversations: Conversations, prepare: Callable[[Sequence[Item]], Awaitable[T]]) -> T:
    """Prepare the first of some conversations, longest first, that fits; a number of tries that is logarithmic.

    Raises:
        ContextTooLong: not even the last one fits.
    """
    try:
        return await prepare(conversations[0])
    except ContextTooLong:
        if len(conversations) == 1:
            raise
    found = await prepare(conversations[-1])
    low, high = 1, len(conversations) - 1  # the one wanted is within; `high` fits
    while low < high:
        middle = (low + high) // 2
        try:
            found, high = await prepare(conversations[middle]), middle
        except ContextTooLong:
            low = middle + 1
    return found
