"""Store responses in memory, bounded, to be retrieved and continued; the least recently used are evicted first."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from funitel.router.api.responses.event_log import EventLog
from funitel.router.api.responses.schema_request import AnyItem, Item
from funitel.router.api.responses.schema_response import ModelResponse, OutputItem
from funitel.router.core.background_tasks import Tasks

_ITEM: TypeAdapter[Any] = TypeAdapter(AnyItem)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and the items it answered, those of the responses before it among them.

    `owner` is the tenant it belongs to, where keys are asked for; other tenants do not see it.
    """

    response: ModelResponse
    input_items: tuple[Item, ...]
    output_items: tuple[Item, ...]
    num_bytes: int
    owner: bytes = b""
    events: EventLog = field(default_factory=EventLog)
    run: "asyncio.Task[None] | None" = None  # while it runs in the background

    @classmethod
    def of(
        cls,
        response: ModelResponse,
        input_items: Sequence[Item],
        owner: bytes = b"",
        events: EventLog | None = None,
        run: "asyncio.Task[None] | None" = None,
    ) -> "StoredResponse":
        """Take a response; its size is counted in bytes of JSON, shared items with each that holds them, and events."""
        events = events or EventLog()
        output = tuple(as_input(item) for item in response.output)
        size = len(response.model_dump_json()) + sum(len(item.model_dump_json()) for item in input_items)
        return cls(response, tuple(input_items), output, size + events.num_bytes, owner, events, run)

    @property
    def conversation(self) -> tuple[Item, ...]:
        """What the next turn goes on from."""
        return self.input_items + self.output_items

    async def cancel(self) -> None:
        """End its run, if it has not ended."""
        if self.run is not None and not self.run.done():
            self.run.cancel()
            await asyncio.wait([self.run])


def as_input(item: OutputItem) -> Item:
    """An item that was answered, as it is sent back."""
    sent_back: Item = _ITEM.validate_python(item.model_dump())
    return sent_back


class ResponseStore:
    """The responses that can be retrieved. Used by the event loop only."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        """Keep at most so many responses, and at most so many bytes of JSON."""
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()  # least recently used first
        self.num_bytes = 0
        self.runs = Tasks()  # of responses in the background

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, stored: StoredResponse) -> None:
        """Keep a response, giving up others for it; one that is larger than all the room is not kept."""
        if self._max_count == 0 or stored.num_bytes > self._max_bytes:
            return
        self._forget(stored.response.id)
        self._stored[stored.response.id] = stored
        self.num_bytes += stored.num_bytes
        while len(self._stored) > self._max_count or self.num_bytes > self._max_bytes:
            self.remove(next(iter(self._stored)))

    def get(self, id: str, owner: bytes = b"") -> StoredResponse | None:
        """A response of an owner by its id."""
        stored = self._stored.get(id)
        if stored is None or stored.owner != owner:
            return None
        self._stored.move_to_end(id)
        return stored

    def remove(self, id: str) -> bool:
        """Keep a response no more, and end its run; tell whether it was kept."""
        dropped = self._forget(id)
        if dropped is None:
            return False
        if dropped.run is not None:
            dropped.run.cancel()
        return True

    def _forget(self, id: str) -> StoredResponse | None:
        dropped = self._stored.pop(id, None)
        if dropped is not None:
            self.num_bytes -= dropped.num_bytes
        return dropped

    def __contains__(self, id: str) -> bool:
        return id in self._stored

    def item(self, id: str, owner: bytes = b"") -> Item | None:
        """An item of any response of an owner, the latest used first."""
        return next((item for item in self._items(owner) if item.id == id), None)

    def _items(self, owner: bytes) -> Iterator[Item]:
        for stored in reversed(self._stored.values()):
            if stored.owner == owner:
                yield from stored.output_items
                yield from stored.input_items
