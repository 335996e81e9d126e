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
        "/v1/responses",
        handlers.create,
        "Answer a conversation and keep the answer; streamed if `stream` is true",
        ResponsesRequest,
        ModelResponse,
        event=ResponseStreamEvent,
    ),
    openai_read(
        "/v1/responses/input_tokens",
        handlers.count_input_tokens,
        "Count the tokens of a conversation",
        InputTokensRequest,
        InputTokenCount,
    ),
    openai_stored(
        "/v1/responses/{response_id}",
        handlers.retrieve,
        "An answer that was kept; its events if `stream` is true",
        method="GET",
        query=RetrieveQuery,
        answer=ModelResponse,
        event=ResponseStreamEvent,
    ),
    openai_stored(
        "/v1/responses/{response_id}",
        handlers.delete,
        "Keep an answer no more",
        method="DELETE",
        answer=DeletedResponse,
    ),
    openai_stored(
        "/v1/responses/{response_id}/cancel",
        handlers.cancel,
        "End an answer that is made in the background",
        method="POST",
        answer=ModelResponse,
    ),
    openai_stored(
        "/v1/responses/{response_id}/input_items",
        handlers.input_items,
        "The conversation that a kept answer goes on from",
        method="GET",
        query=InputItemsQuery,
        answer=ItemList,
    ),
)
