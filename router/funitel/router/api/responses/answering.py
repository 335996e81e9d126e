"""Make one response: whole, streamed, or in the background, and store it with its events."""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext

from pydantic import BaseModel

from funitel.proto.errors import FunitelError
from funitel.router.api.responses.builder import Event, ResponseBuilder
from funitel.router.api.responses.event_log import EventLog
from funitel.router.api.responses.schema_request import Item, ResponsesRequest
from funitel.router.api.responses.schema_response import ModelResponse
from funitel.router.api.responses.store import ResponseStore, StoredResponse
from funitel.router.api.responses.to_chat import chat_call, namespaces
from funitel.router.api.responses.truncation import Shortened, prepare_longest
from funitel.router.auth.accounts import Account
from funitel.router.chat.parts import Part
from funitel.router.chat.run import PreparedChat, prepare_chat
from funitel.router.core import request_context
from funitel.router.serving.arrival import Arrival
from funitel.router.serving.service import Service
from funitel.router.transport.sse import Put
from funitel.router.transport.sse_frames import named_frame

# What a response calls otherwise than `SamplingRequest` and `ChatCall` do.
FIELDS = {
    "inputs": "input",
    "max_new_tokens": "max_output_tokens",
    "top_n_tokens": "top_logprobs",
    "grammar": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


class Answering:
    """One response while it is made."""

    def __init__(
        self,
        service: Service,
        store: ResponseStore,
        body: ResponsesRequest,
        items: Sequence[Item],
        owner: bytes,
        begun: ModelResponse,
    ) -> None:
        """Prepare for a request, its conversation and the response without output."""
        self._service = service
        self._store = store
        self._body = body
        self._items = items
        self._owner = owner
        self._run: asyncio.Task[None] | None = None
        self._refusal: FunitelError | None = None  # of the engine, before anything was made
        self.events = EventLog()
        self.builder = ResponseBuilder(begun, namespaces(body), wants_logprobs=body.wants_logprobs)

    async def prepare(self, arrived: Arrival) -> PreparedChat:
        """Check the request and make its prompt; raises as `prepare_chat`."""
        is_streamed = bool(self._body.stream)

        async def prepare(items: Sequence[Item]) -> PreparedChat:
            call = chat_call(self._body, items)
            return await prepare_chat(self._service, call, stream=is_streamed, arrived=arrived, names=FIELDS)

        if self._body.truncation != "auto":
            return await prepare(self._items)
        return await prepare_longest(Shortened(self._items), prepare)

    async def run(self, arrived: Arrival) -> dict[str, str]:
        """Make the whole response; return the headers."""
        chat = await self.prepare(arrived)
        (answer,), headers = await chat.run()
        for part in answer.parts:
            for event in self.builder.feed(part):
                self._note(event)
        self._keep()
        return headers

    async def stream(self, chat: PreparedChat, put: Put) -> None:
        """Make the response event by event; what is stored is there when the last event is sent."""

        def take(_index: int, part: Part) -> None:
            for event in self.builder.feed(part):
                frame = self._note(event)
                if self.builder.response.has_ended:
                    self._keep()
                put(frame)

        await chat.stream(take)

    def failed(self, error: FunitelError) -> BaseModel:
        """The event that says so; a failed response is stored too."""
        event = self.builder.failed(error)
        self._note(event)
        self._keep()
        return event

    # In the background

    async def begin(self, arrived: Arrival) -> dict[str, str]:
        """Begin to make the response, which goes on without the client; return the headers.

        Raises: as `prepare_chat`, Overloaded when the engine does not take it, and QuotaExceeded.
        """
        chat = await self.prepare(arrived)
        if not self._body.stream:
            request_context.current().journal.keep_no_outputs()
        for event in self.builder.queued():
            self._note(event)
        self._run = self._store.runs.start(self._work(chat, arrived.account))
        self._keep()
        submitted = asyncio.ensure_future(arrived.submitted.wait())
        await asyncio.wait({self._run, submitted}, return_when=asyncio.FIRST_COMPLETED)
        submitted.cancel()
        if self._refusal is not None:
            self._store.remove(self.builder.response.id)
            raise self._refusal
        return chat.stream_headers

    async def _work(self, chat: PreparedChat, account: Account | None) -> None:
        """Make the response; a drain waits for it, and it counts as a request of its account."""
        was_admitted = request_context.current().journal.is_replayed
        try:
            running = nullcontext() if account is None else account.prolonged()
            with self._service.drain.admitted(was_admitted=was_admitted), running:
                await self.stream(chat, lambda _event: None)
        except FunitelError as error:
            if self.builder.response.status == "queued":
                self._refusal = error
            self.failed(error)
        except asyncio.CancelledError:
            self.builder.cancelled()
            self._keep()
            raise

    # What is kept

    def _note(self, event: Event) -> bytes:
        """Keep an event where the response will be stored; returns its frame."""
        frame = event if isinstance(event, bytes) else named_frame(event)
        if self.builder.response.store:
            self.events.add(frame)
        return frame

    def _keep(self) -> None:
        """Store the response; one that runs in the background is stored from its beginning until it is removed."""
        response = self.builder.response
        if response.has_ended:
            self.events.end()
        is_removed = self._run is not None and response.has_ended and response.id not in self._store
        if response.store and not is_removed:
            self._store.put(StoredResponse.of(response, self._items, self._owner, self.events, self._run))
