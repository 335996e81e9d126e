"""Inferflow's native route: a query, a system prompt, the beginning of the answer, and input templates."""

from functools import partial

from funitel.router.api.common.error_schemas import InferflowError
from funitel.router.api.common.route_kinds import GENERATION_FAILURES
from funitel.router.api.inferflow import handlers
from funitel.router.api.inferflow.schema import InferflowAnswer, InferflowRequest
from funitel.router.middleware.operation import ModelUse, Operation

_work = partial(Operation, error=InferflowError, method="POST", failures=GENERATION_FAILURES, model=ModelUse.GENERATES)

ROUTES = (
    _work(
        "/inferflow",
        handlers.answer,
        "Inferflow's native route: the answer to a query, streamed unless `is_streaming_mode` is false",
        InferflowRequest,
        InferflowAnswer,
        event=InferflowAnswer,
    ),
)
