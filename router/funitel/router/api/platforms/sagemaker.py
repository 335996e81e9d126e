"""Handle `/invocations` of SageMaker, which carries bodies of the other routes."""

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from funitel.proto.errors import InvalidRequest
from funitel.router.api.common.body import read_json
from funitel.router.api.common.handler import Handler, IncomingRequest, generation_route, service_of
from funitel.router.api.native import generate
from funitel.router.api.openai import chat, completions
from funitel.router.api.platforms.bare_url import serve_task

# The field that tells a body's kind, in TGI's order.
_HANDLERS: tuple[tuple[str, Handler], ...] = (
    ("inputs", generate.compat_generate),
    ("messages", chat.chat_completions),
    ("prompt", completions.completions),
)


async def invocations(http: HttpRequest) -> Response:
    """`/invocations`: what the route answers that the body is meant for; of an encoder as `POST /`."""
    return await (serve_task if service_of(http).is_encoder else _generate)(http)


@generation_route
async def _generate(incoming: IncomingRequest) -> Response:
    content = await read_json(incoming.http, incoming.service.payload_limit)
    if not isinstance(content, dict):
        raise InvalidRequest("the body must be an object")
    for field, handler in _HANDLERS:
        if content.get(field) is not None:
            return await handler(incoming.http)
    fields = ", ".join(f"`{field}`" for field, _ in _HANDLERS)
    raise InvalidRequest(f"the body must have one of {fields}")
