"""What the routes read of a request: the JSON of its body, names in its path, flags of its query; what they call."""

import json
from typing import Any
from urllib.parse import unquote

from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import Request

from funitel.launcher.control_plane.checks import MAX_INTEGER
from funitel.launcher.control_plane.interface import Fleet
from funitel.launcher.control_plane.model_tools import ModelTools
from funitel.proto.errors import InvalidRequest, MalformedBody, NotFound, PayloadTooLarge
from funitel.proto.settings.options import parse_bool

MAX_BODY_BYTES = 1 << 24


class AnyName(PathConvertor):
    """As `path`, and takes line breaks too, which a path may have percent-encoded."""

    regex = "(?s:.*)"


register_url_convertor("name", AnyName())


def fleet_of(request: Request) -> Fleet:
    """The fleet behind the API."""
    found: Fleet = request.app.state.fleet
    return found


def tools_of(request: Request) -> ModelTools:
    """The tools of the model server."""
    found: ModelTools = request.app.state.tools
    return found


async def json_of(request: Request, *, is_required: bool = True) -> Any:
    """The JSON of the body; None for an empty one that is not required.

    Raises:
        PayloadTooLarge: it has more than `MAX_BODY_BYTES`.
        MalformedBody: it is not JSON.
    """
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > MAX_BODY_BYTES:
            raise PayloadTooLarge(f"the body has more than {MAX_BODY_BYTES} bytes")
    if not content.strip() and not is_required:
        return None
    try:
        parsed = json.loads(content)
        if b"\\u" in content:
            json.dumps(parsed, ensure_ascii=False).encode()  # raises for half of a surrogate pair
        return parsed
    except (ValueError, RecursionError) as error:
        raise MalformedBody(f"the body is not JSON: {error}") from error


def name_of(request: Request) -> str:
    """The model that the path names; raises NotFound for none."""
    name = unquote(request.path_params["name"])
    if not name:
        raise NotFound("the path names no model")
    return name


def part_of(request: Request, part: str) -> str:
    """A part of the path."""
    return unquote(request.path_params[part])


def replica_of(request: Request) -> int:
    """The replica that the path names; raises NotFound for what is no id."""
    text = part_of(request, "replica")
    if not (text.isascii() and text.isdigit()) or len(text) > len(str(MAX_INTEGER)) or int(text) > MAX_INTEGER:
        raise NotFound(f"{text} is no id of a replica")
    return int(text)


def flag_of(request: Request, name: str, *, default: bool) -> bool:
    """A boolean of the query; raises InvalidRequest for another value."""
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        return parse_bool(text)
    except ValueError as error:
        raise InvalidRequest(f"`{name}` {error}. Given: {text!r}", name) from error
