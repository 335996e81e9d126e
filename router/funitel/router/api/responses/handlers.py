"""Handle OpenAI's `/v1/responses`: answers that are stored, to be retrieved and continued."""

import time
from collections.abc import Sequence
from functools import partial
from typing import TypeVar, cast

from pydantic import BaseModel, ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from funitel.proto.errors import FunitelError, InvalidRequest, NotFound
from funitel.router.api.common.body import json_answer, shape_error
from funitel.router.api.common.handler import IncomingRequest, generation_route, reading_route
from funitel.router.api.responses.builder import ResponseBuilder, new_id
from funitel.router.api.responses.schema_request import (
    InputItemsQuery,
    InputTokensRequest,
    Item,
    ModeChoice,
    ResponsesRequest,
    RetrieveQuery,
    TextConfig,
)
from funitel.router.api.responses.schema_response import (
    DeletedResponse,
    InputTokenCount,
    ItemList,
    ModelResponse,
    ResponseReasoning,
)
from funitel.router.api.responses.store import ResponseStore, StoredResponse
from funitel.router.api.responses.to_chat import chat_call, conversation
from funitel.router.api.responses.truncation import prepare_longest, shortened
from funitel.router.chat.parts import Part
from funitel.router.chat.run import PreparedChat, count_prompt_tokens, prepare_chat
from funitel.router.core import request_context
from funitel.router.middleware.auth import tenant_of
from funitel.router.serving.arrival import Arrival
from funitel.router.serving.service import Service
from funitel.router.transport.sse import EventStream, Put, run_until_disconnect
from funitel.router.transport.sse_frames import named_frame

FIELDS = {
    "inputs": "input",
    "max_new_tokens": "max_output_tokens",
    "top_n_tokens": "top_logprobs",
    "grammar": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
Q = TypeVar("Q", bound=BaseModel)


@generation_route
async def create(incoming: IncomingRequest) -> Response:
    """`POST /v1/responses`: the answer to a conversation, whole or streamed."""
    body = await incoming.read(ResponsesRequest)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("`stream_options` needs `stream` to be true", "stream_options")
    owner = tenant_of(incoming.http.scope)
    store = store_of(incoming.http)
    answering = _Answering(incoming.service, store, body, conversation(body, store, owner), owner)
    if body.stream:
        chat = await answering.prepare(incoming.arrived)
        stream = partial(answering.stream, chat)
        return EventStream(stream, answering.failed, headers=chat.stream_headers, frame=named_frame)
    headers = await run_until_disconnect(incoming.http.receive, answering.run(incoming.arrived))
    return json_answer(answering.builder.response, headers)


@reading_route
async def count_input_tokens(incoming: IncomingRequest) -> Response:
    """`POST /v1/responses/input_tokens`: how many tokens the prompt of a conversation has."""
    body = await incoming.read(InputTokensRequest)
    call = chat_call(body, conversation(body, store_of(incoming.http), tenant_of(incoming.http.scope)))
    count = await count_prompt_tokens(incoming.service, call, FIELDS)
    return json_answer(InputTokenCount(input_tokens=count))


async def retrieve(http: HttpRequest) -> Response:
    """`GET /v1/responses/{response_id}`: a response that is stored."""
    _query(http, RetrieveQuery)
    return json_answer(_stored(http).response)


async def delete(http: HttpRequest) -> Response:
    """`DELETE /v1/responses/{response_id}`: store it no more."""
    id = _stored(http).response.id
    store_of(http).remove(id)
    return json_answer(DeletedResponse(id=id))


async def cancel(http: HttpRequest) -> Response:
    """`POST /v1/responses/{response_id}/cancel`: refused, for what is stored has ended."""
    id = _stored(http).response.id
    raise InvalidRequest(f"only a response that runs in the background can be cancelled. Given: {id!r}", "response_id")


async def input_items(http: HttpRequest) -> Response:
    """`GET /v1/responses/{response_id}/input_items`: the items a stored response answered."""
    query = _query(http, InputItemsQuery)
    items = list(_stored(http).input_items)
    if query.order == "desc":
        items.reverse()
    if query.after is not None:
        places = [place for place, item in enumerate(items) if item.id == query.after]
        if not places:
            raise InvalidRequest(f"after: the response has no such item. Given: {query.after!r}", "after")
        items = items[places[0] + 1 :]
    page = items[: query.limit]
    listed = ItemList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(items) > len(page),
    )
    return json_answer(listed)


def store_of(http: HttpRequest) -> ResponseStore:
    """The store of the application that got the request."""
    return cast(ResponseStore, http.app.state.responses)


def _stored(http: HttpRequest) -> StoredResponse:
    id: str = http.path_params["response_id"]
    stored = store_of(http).get(id, tenant_of(http.scope))
    if stored is None:
        raise NotFound(f"no response with id {id!r} is stored")
    return stored


def _query(http: HttpRequest, model: type[Q]) -> Q:
    given = dict(http.query_params)
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise shape_error(error, given) from None


class _Answering:
    """One response while it is made."""

    def __init__(
        self, service: Service, store: ResponseStore, body: ResponsesRequest, items: Sequence[Item], owner: bytes
    ) -> None:
        self._service = service
        self._store = store
        self._body = body
        self._items = items
        self._owner = owner
        self.builder = ResponseBuilder(_begun(service, body), wants_logprobs=body.wants_logprobs)

    async def prepare(self, arrived: Arrival) -> PreparedChat:
        is_streamed = bool(self._body.stream)

        async def prepare(items: Sequence[Item]) -> PreparedChat:
            call = chat_call(self._body, items)
            return await prepare_chat(self._service, call, stream=is_streamed, arrived=arrived, names=FIELDS)

        if self._body.truncation != "auto":
            return await prepare(self._items)
        return await prepare_longest(shortened(self._items), prepare)

    async def run(self, arrived: Arrival) -> dict[str, str]:
        """Make the whole response; return the headers."""
        chat = await self.prepare(arrived)
        (answer,), headers = await chat.run()
        for part in answer.parts:
            for _ in self.builder.feed(part):
                pass
        self._keep()
        return headers

    async def stream(self, chat: PreparedChat, put: Put) -> None:
        """Make the response event by event; what is stored is there when the last event is sent."""

        def take(_index: int, part: Part) -> None:
            for event in self.builder.feed(part):
                if self.builder.response.status != "in_progress":
                    self._keep()
                put(event)

        await chat.stream(take)

    def failed(self, error: FunitelError) -> BaseModel:
        """The event that says so; a failed response is stored too."""
        event = self.builder.failed(error)
        self._keep()
        return event

    def _keep(self) -> None:
        if self.builder.response.store:
            self._store.put(StoredResponse.of(self.builder.response, self._items, self._owner))


def _begun(service: Service, body: ResponsesRequest) -> ModelResponse:
    """A response without output."""
    temperature, top_p = body.temperature, body.top_p
    if temperature is None and top_p is None:
        temperature, top_p = service.recommended.temperature, service.recommended.top_p
    choice = body.tool_choice
    response_id, model = new_id("resp"), service.shown_model(body.model)
    request_context.current().name_answer(response_id, model)
    return ModelResponse(
        id=response_id,
        created_at=int(time.time()),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=ResponseReasoning(
            effort=body.reasoning.effort if body.reasoning else None,
            summary=body.reasoning.summary if body.reasoning else None,
        ),
        safety_identifier=body.safety_identifier,
        store=body.store is not False and service.settings.max_stored_responses > 0,
        temperature=1.0 if temperature is None else temperature,
        text=body.text or TextConfig(),
        tool_choice=choice.type if isinstance(choice, ModeChoice) else choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if top_p is None else top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )
