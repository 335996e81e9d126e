"""Routes of the console: its pages, which anyone may load, and what they show, for which a key is asked."""

from functools import partial

from funitel.router.api.common.error_schemas import OpenAIErrorResponse
from funitel.router.api.common.route_kinds import native_fact
from funitel.router.api.console import handlers
from funitel.router.api.console.schema import EndedRequestList, LiveQuery, LiveState
from funitel.router.auth.access import Access
from funitel.router.middleware.operation import Operation

_shown = partial(Operation, error=OpenAIErrorResponse, method="GET", access=Access.CLOSED_FACT)

ROUTES = (
    native_fact("/ui", handlers.enter, "The console for browsers; it is at `/ui/`"),
    native_fact("/ui/{path:path}", handlers.asset, "Its first page, and its files", text="text/html", failures=(404,)),
    _shown(
        "/v1/console/live",
        handlers.live,
        "The numbers of every model, now and in the last hour",
        query=LiveQuery,
        answer=LiveState,
        failures=(400,),
    ),
    _shown("/v1/console/requests", handlers.requests, "The requests that ended last", answer=EndedRequestList),
)
