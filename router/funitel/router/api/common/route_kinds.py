"""Kinds of routes by protocol: the error record, the access and the failures of a row of the table."""

from dataclasses import replace
from functools import partial

from funitel.router.api.common.error_schemas import (
    AnthropicErrorResponse,
    ErrorResponse,
    OpenAIErrorResponse,
    TgiOpenAIErrorResponse,
)
from funitel.router.auth.access import Access
from funitel.router.middleware.operation import ModelUse, Operation

READ_FAILURES = (400, 413, 415, 422, 429, 503)  # of a route that reads a body and needs the model's files
GENERATION_FAILURES = (*READ_FAILURES, 424, 500, 504)
OPENAI_READ_FAILURES = (400, 413, 415, 429, 503)
OPENAI_FAILURES = (*OPENAI_READ_FAILURES, 500, 504)
ANTHROPIC_FAILURES = (400, 413, 415, 500, 503, 504, 529)

native = partial(Operation, error=ErrorResponse, is_native=True)
native_read = partial(native, method="POST", failures=READ_FAILURES, model=ModelUse.ANY)
native_work = partial(native, method="POST", failures=GENERATION_FAILURES, model=ModelUse.GENERATES)
native_fact = partial(native, method="GET", access=Access.FACT)
native_state = partial(native, method="GET", access=Access.FACT, failures=(503,))
native_probe = partial(native, method="GET", access=Access.PROBE)

# OpenAI's routes that TGI has: OpenAI's error object with TGI's statuses.
tgi_openai_work = partial(
    Operation,
    error=TgiOpenAIErrorResponse,
    method="POST",
    failures=GENERATION_FAILURES,
    model=ModelUse.GENERATES,
)
tgi_openai_fact = partial(Operation, error=TgiOpenAIErrorResponse, method="GET", access=Access.FACT)

_openai_post = partial(Operation, error=OpenAIErrorResponse, method="POST", model=ModelUse.GENERATES)
openai_read = partial(_openai_post, failures=OPENAI_READ_FAILURES)
openai_work = partial(_openai_post, failures=OPENAI_FAILURES)
operator_work = partial(
    Operation,
    error=OpenAIErrorResponse,
    method="POST",
    failures=(*OPENAI_READ_FAILURES, 404, 500),
    access=Access.OPERATOR,
)
openai_stored = partial(Operation, error=OpenAIErrorResponse, failures=(400, 404))

anthropic_work = partial(
    Operation,
    error=AnthropicErrorResponse,
    method="POST",
    failures=ANTHROPIC_FAILURES,
    model=ModelUse.GENERATES,
)


def closed(operation: Operation) -> Operation:
    """The same route with a key asked for, where it is one of facts."""
    return replace(operation, access=Access.CLOSED_FACT) if operation.access is Access.FACT else operation


def with_openai_errors(operation: Operation) -> Operation:
    """The same route with OpenAI's statuses and error record, where it is OpenAI's and TGI has it."""
    if operation.error is not TgiOpenAIErrorResponse:
        return operation
    failures = OPENAI_FAILURES if operation.failures == GENERATION_FAILURES else operation.failures
    return replace(operation, error=OpenAIErrorResponse, failures=failures)
