"""Handle OpenAI's `/v1/responses`: answers that are stored, to be retrieved and continued."""

import time
from functools import partial
from typing import cast

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from funitel.proto.errors import InvalidRequest, NotFound
from funitel.router.api.common.body import json_answer, query_of
from funitel.router.api.common.errors import openai_error
from funitel.router.api.common.handler import IncomingRequest, generation_route, reading_route
from funitel.router.api.responses.answering import FIELDS, Answering
from funitel.router.api.responses.builder import new_id
from funitel.router.api.responses.schema_request import (
    InputItemsQuery,
    InputTokensRequest,
    Item,
    ItemReference,
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
from funitel.router.api.responses.store import ResponseStore, StoredResponse, read_items, written_items
from funitel.router.api.responses.to_chat import chat_call, conversation
from funitel.router.chat.run import count_prompt_tokens
from funitel.router.core import request_context
from funitel.router.core.request_context import drawn
from funitel.router.middleware.auth import is_background_request, tenant_of
from funitel.router.serving.service import Service
from funitel.router.transport.sse import EventStream, run_until_disconnect
from funitel.router.transport.sse_frames import named_frame

CONVERSATION = "conversation"  # of the journal: the items that a request goes on from, where some were stored


@generation_route
async def create(incoming: IncomingRequest) -> Response:
    """`POST /v1/responses`: the answer to a conversation, whole or streamed."""
    body = await incoming.read(ResponsesRequest)
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("`stream_options` needs `stream` to be true", "stream_options")
    owner = tenant_of(incoming.http.scope)
    store = store_of(incoming.http)
    begun = _begun(incoming.service, body)
    if is_background_request(incoming.http.scope):  # its answer is in the batch's output
        begun.store = False
    if body.background and not begun.store:
        raise InvalidRequest("`background` needs `store`", "background")
    items = _conversation(body, store, owner, incoming.service.payload_limit)
    answering = Answering(incoming.service, store, body, items, owner, begun)
    if body.background:
        headers = await answering.begin(incoming.arrived)
        if body.stream:
            follow = partial(answering.events.follow, -1)
            return EventStream(follow, openai_error, headers=headers, frame=named_frame)
        return json_answer(answering.builder.response, headers)
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
    store, owner = store_of(incoming.http), tenant_of(incoming.http.scope)
    items = _conversation(body, store, owner, incoming.service.payload_limit)
    call = chat_call(body, items)
    count = await count_prompt_tokens(incoming.service, call, FIELDS)
    return json_answer(InputTokenCount(input_tokens=count))


async def retrieve(http: HttpRequest) -> Response:
    """`GET /v1/responses/{response_id}`: a response that is stored, or its events from some number on."""
    query, stored = query_of(http, RetrieveQuery), _stored(http)
    if not query.stream:
        if query.starting_after is not None:
            raise InvalidRequest("`starting_after` needs `stream` to be true", "starting_after")
        return json_answer(stored.response)
    after = -1 if query.starting_after is None else query.starting_after
    return EventStream(partial(stored.events.follow, after), openai_error, frame=named_frame)


async def delete(http: HttpRequest) -> Response:
    """`DELETE /v1/responses/{response_id}`: store it no more."""
    id = _stored(http).response.id
    store_of(http).remove(id)
    return json_answer(DeletedResponse(id=id))


async def cancel(http: HttpRequest) -> Response:
    """`POST /v1/responses/{response_id}/cancel`: end a response that is made in the background."""
    stored = _stored(http)
    if not stored.response.background:
        message = "only a response that was made in the background can be cancelled"
        raise InvalidRequest(f"{message}. Given: {stored.response.id!r}", "response_id")
    await stored.cancel()
    return json_answer(stored.response)


async def input_items(http: HttpRequest) -> Response:
    """`GET /v1/responses/{response_id}/input_items`: the items a stored response answered."""
    query = query_of(http, InputItemsQuery)
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


def _conversation(body: InputTokensRequest, store: ResponseStore, owner: bytes, most: int) -> tuple[Item, ...]:
    """All items that a request goes on from, with `most` bytes of stored ones.

    What is stored goes with this router: another one that answers the request again has the items from the journal.
    """
    journal = request_context.current().journal
    if journal.knows(CONVERSATION):
        return read_items(journal.draw(CONVERSATION, list))
    items = conversation(body, store, owner, max_stored_bytes=most)
    if journal.key and (body.previous_response_id or any(isinstance(item, ItemReference) for item in body.input)):
        journal.draw(CONVERSATION, lambda: written_items(items))
    return items


def store_of(http: HttpRequest) -> ResponseStore:
    """The store of the application that got the request."""
    return cast(ResponseStore, http.app.state.responses)


def _stored(http: HttpRequest) -> StoredResponse:
    id: str = http.path_params["response_id"]
    stored = store_of(http).get(id, tenant_of(http.scope))
    if stored is None:
        raise NotFound(f"no response with id {id!r} is stored")
    return stored


def _begun(service: Service, body: ResponsesRequest) -> ModelResponse:
    """A response without output."""
    temperature, top_p = body.temperature, body.top_p
    if temperature is None and top_p is None:
        temperature, top_p = service.recommended.temperature, service.recommended.top_p
    choice = body.tool_choice
    response_id, model = drawn("id", lambda: new_id("resp")), drawn("model", lambda: service.shown_model(body.model))
    request_context.current().name_answer(response_id, model)
    return ModelResponse(
        id=response_id,
        created_at=drawn("created", lambda: int(time.time())),
        background=bool(body.background),
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
