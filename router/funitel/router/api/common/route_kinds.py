"""Kinds of routes by protocol: the error record, the access and the failures of a row of the table."""

from functools import partial

from funitel.router.api.common.error_schemas import AnthropicErrorResponse, ErrorResponse, OpenAIErrorResponse
from funitel.router.middleware.operation import Access, Operation

READ_FAILURES = (400, 413, 415, 422, 429, 503)  # of a route that reads a body and needs the model's files
GENERATION_FAILURES = (*READ_FAILURES, 424, 500, 504)
ANTHROPIC_FAILURES = (400, 413, 415, 500, 503, 504, 529)

native = partial(Operation, error=ErrorResponse, is_native=True)
native_read = partial(native, method="POST", failures=READ_FAILURES)
native_work = partial(native, method="POST", failures=GENERATION_FAILURES)
native_fact = partial(native, method="GET", access=Access.FACT)
native_state = partial(native, method="GET", access=Access.FACT, failures=(503,))
native_probe = partial(native, method="GET", access=Access.PROBE)

openai_read = partial(Operation, error=OpenAIErrorResponse, method="POST", failures=READ_FAILURES)
openai_work = partial(Operation, error=OpenAIErrorResponse, method="POST", failures=GENERATION_FAILURES)
openai_stored = partial(Operation, error=OpenAIErrorResponse, failures=(404, 422))
openai_fact = partial(Operation, error=OpenAIErrorResponse, method="GET", access=Access.FACT)

anthropic_work = partial(Operation, error=AnthropicErrorResponse, method="POST", failures=ANTHROPIC_FAILURES)
