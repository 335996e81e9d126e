"""Routes for the requests that run: list them, abort, pause and resume one by its id, and get its events again."""

from functools import partial

from funitel.router.api.common.error_schemas import OpenAIErrorResponse
from funitel.router.api.requests import handlers
from funitel.router.api.requests.schema import AbortedRequest, RequestList, RequestRecord, StreamEvent, StreamQuery
from funitel.router.auth.access import Access
from funitel.router.middleware.operation import Operation

_requests = partial(Operation, error=OpenAIErrorResponse)
_FAILURES = (400, 404, 503)

ROUTES = (
    _requests("/v1/requests", handlers.listed, "The requests that run", answer=RequestList, method="GET"),
    _requests(
        "/v1/requests/{request_id}",
        handlers.abort,
        "Abort a request; its client gets the answer up to there",
        answer=AbortedRequest,
        method="DELETE",
        failures=(400, 404),
    ),
    _requests(
        "/v1/requests/{request_id}/pause",
        handlers.pause,
        "Pause a request; it goes on with the same text",
        answer=RequestRecord,
        method="POST",
        failures=_FAILURES,
    ),
    _requests(
        "/v1/requests/{request_id}/resume",
        handlers.resume,
        "Resume a paused request",
        answer=RequestRecord,
        method="POST",
        failures=(400, 404),
    ),
    _requests(
        "/v1/requests/{request_id:path}/stream",
        handlers.stream,
        "The events of a stream that was asked for with x-resume-seconds, after the last one that its client has",
        method="GET",
        query=StreamQuery,
        event=StreamEvent,
        failures=(400, 404, 410),
        access=Access.CONTINUED,
    ),
)
