"""The OpenAI Responses API."""

from funitel.router.api.common.route_kinds import openai_read, openai_stored, openai_work
from funitel.router.api.responses import handlers
from funitel.router.api.responses.schema_request import (
    InputItemsQuery,
    InputTokensRequest,
    ResponsesRequest,
    RetrieveQuery,
)
from funitel.router.api.responses.schema_response import (
    DeletedResponse,
    InputTokenCount,
    ItemList,
    ModelResponse,
    ResponseStreamEvent,
)

ROUTES = (
    openai_work(
        path="/v1/responses",
        handler=handlers.create,
        summary="Answer a conversation and keep the answer; streamed if `stream` is true",
        body=ResponsesRequest,
        answer=ModelResponse,
        event=ResponseStreamEvent,
    ),
    openai_read(
        path="/v1/responses/input_tokens",
        handler=handlers.count_input_tokens,
        summary="Count the tokens of a conversation",
        body=InputTokensRequest,
        answer=InputTokenCount,
    ),
    openai_stored(
        method="GET",
        path="/v1/responses/{response_id}",
        handler=handlers.retrieve,
        summary="An answer that was kept",
        query=RetrieveQuery,
        answer=ModelResponse,
    ),
    openai_stored(
        method="DELETE",
        path="/v1/responses/{response_id}",
        handler=handlers.delete,
        summary="Keep an answer no more",
        answer=DeletedResponse,
    ),
    openai_stored(
        method="POST",
        path="/v1/responses/{response_id}/cancel",
        handler=handlers.cancel,
        summary="Refused: what is kept has ended",
        answer=ModelResponse,
    ),
    openai_stored(
        method="GET",
        path="/v1/responses/{response_id}/input_items",
        handler=handlers.input_items,
        summary="The conversation that a kept answer goes on from",
        query=InputItemsQuery,
        answer=ItemList,
    ),
)
