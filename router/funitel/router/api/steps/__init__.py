"""Routes of the step API: add queries, infer a step of all, commit the tokens that the client chose, remove queries."""

from functools import partial

from funitel.router.api.common.error_schemas import OpenAIErrorResponse
from funitel.router.api.common.route_kinds import openai_read, openai_work
from funitel.router.api.native.schema import GenerateRequest
from funitel.router.api.steps import handlers
from funitel.router.api.steps.schema import (
    AddedQuery,
    CommitRequest,
    CommittedTokens,
    InferredTokens,
    InferRequest,
    ModelQuery,
    RemovedQuery,
)
from funitel.router.middleware.operation import Operation

_remove = partial(Operation, error=OpenAIErrorResponse, method="DELETE", failures=(404,))

ROUTES = (
    openai_read(
        "/v1/steps/queries",
        handlers.add,
        "Add a query that advances step by step; the body is that of `/generate`",
        GenerateRequest,
        AddedQuery,
    ),
    openai_work(
        "/v1/steps/infer", handlers.infer, "Compute one step of the queries of the key", InferRequest, InferredTokens
    ),
    openai_read(
        "/v1/steps/commit",
        handlers.commit,
        "Go on with the tokens that the client chose",
        CommitRequest,
        CommittedTokens,
    ),
    _remove("/v1/steps/queries/{query_id}", handlers.remove, "Remove a query", query=ModelQuery, answer=RemovedQuery),
)
