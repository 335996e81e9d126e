"""Store responses in memory, bounded, to be retrieved and continued; each key's least recently used go first."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from funitel.router.api.responses.event_log import EventLog
from funitel.router.api.responses.schema_request import AnyItem, Item
from funitel.router.api.responses.schema_response import ModelResponse, OutputItem
from funitel.router.core.background_tasks import Tasks

_ITEM: TypeAdapter[Any] = TypeAdapter(AnyItem, config=ConfigDict(defer_build=True))


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

    @property
    def items_by_id(self) -> dict[str, Item]:
        """The items of the conversation that have an id; of several with one id, an answered one, else the first."""
        items = (*reversed(self.input_items), *reversed(self.output_items))
        return {item.id: item for item in items if item.id is not None}

    async def cancel(self) -> None:
        """End its run, if it has not ended."""
        if self.run is not None and not self.run.done():
            self.run.cancel()
            await asyncio.wait([self.run])


def written_items(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Items of a conversation as JSON."""
    return [item.model_dump(mode="json", by_alias=True, exclude_unset=True) for item in items]


def read_items(written: Sequence[dict[str, Any]]) -> tuple[Item, ...]:
    """The items that `written_items` has written."""
    return tuple(_ITEM.validate_python(item) for item in written)


def as_input(item: OutputItem) -> Item:
    """An item that was answered, as it is sent back."""
    sent_back: Item = _ITEM.validate_python(item.model_dump())
    return sent_back


class ResponseStore:
    """The responses that can be retrieved. Used by the event loop only.

    The owner of most of what is stored gives up its own for more, so that no key evicts what another one stored while
    it holds more itself.
    """

    def __init__(self, max_count: int, max_bytes: int) -> None:
        """Keep at most so many responses, and at most so many bytes of JSON."""
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._stored: dict[str, StoredResponse] = {}
        self._shares: dict[bytes, _Share] = {}  # by owner
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
        self._shares.setdefault(stored.owner, _Share()).add(stored)
        self.num_bytes += stored.num_bytes
        while len(self._stored) > self._max_count:
            self._evict(max(self._shares.values(), key=lambda share: len(share.ids)))
        while self.num_bytes > self._max_bytes:
            self._evict(max(self._shares.values(), key=lambda share: share.num_bytes))

    def _evict(self, share: "_Share") -> None:
        self.remove(next(iter(share.ids)))

    def get(self, id: str, owner: bytes = b"") -> StoredResponse | None:
        """A response of an owner by its id."""
        stored = self._stored.get(id)
        if stored is None or stored.owner != owner:
            return None
        self._shares[owner].ids.move_to_end(id)
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
            share = self._shares[dropped.owner]
            share.drop(dropped)
            if not share.ids:
                del self._shares[dropped.owner]
        return dropped

    def __contains__(self, id: str) -> bool:
        return id in self._stored

    def item(self, id: str, owner: bytes = b"") -> "StoredItem | None":
        """An item of any response of an owner, of the latest one that was stored with it."""
        share = self._shares.get(owner)
        return None if share is None else share.items.get(id)


class StoredItem:
    """An item that a number of responses have."""

    def __init__(self, item: Item, num_responses: int) -> None:
        self.item = item
        self.num_responses = num_responses

    @cached_property
    def num_bytes(self) -> int:
        """Its size in bytes of JSON."""
        return len(self.item.model_dump_json())


class _Share:
    """What one owner has stored."""

    def __init__(self) -> None:
        self.ids: OrderedDict[str, None] = OrderedDict()  # of responses, least recently used first
        self.num_bytes = 0
        self.items: dict[str, StoredItem] = {}  # by id

    def add(self, stored: StoredResponse) -> None:
        """Count a response as the latest used."""
        self.ids[stored.response.id] = None
        self.num_bytes += stored.num_bytes
        for id, item in stored.items_by_id.items():
            known = self.items.get(id)
            self.items[id] = StoredItem(item, known.num_responses + 1 if known else 1)

    def drop(self, stored: StoredResponse) -> None:
        """Count a response no more."""
        del self.ids[stored.response.id]
        self.num_bytes -= stored.num_bytes
        for id in stored.items_by_id:
            self.items[id].num_responses -= 1
            if not self.items[id].num_responses:
                del self.items[id]
