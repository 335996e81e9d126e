"""Read a JSON body into a record, or refuse it with a status and the reason; write records as JSON answers."""

import json
import logging
import re
import reprlib
import sys
import time
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request
from starlette.responses import Response

from funitel.proto.errors import InvalidRequest, MalformedBody, PayloadTooLarge, UnsupportedMediaType
from funitel.router.api.common.schema_base import Body, NativeBody, unsupported_type
from funitel.router.middleware.auth import check_model
from funitel.router.middleware.operation import is_native
from funitel.router.transport.memory_budget import CLIENT, Client


def json_answer(body: BaseModel, headers: Mapping[str, str] | None = None, *, status: int = 200) -> Response:
    """Answer with one record."""
    return Response(body.model_dump_json(), status, headers, "application/json")


logger = logging.getLogger(__name__)
B = TypeVar("B", bound=Body)

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

# In a request's scope: its body. A route may look at it before it hands the request on.
_RAW, _PARSED = "funitel.bytes", "funitel.body"

LENIENT_SECONDS = 0.25  # for finding the unknown fields of one body

MAX_WARNED_FIELDS = 100  # a client that invents names must not fill the log
_warned_fields: set[str] = set()


async def read_body(request: Request, model: type[B], limit: int) -> B:
    """Read and check a request's body of at most `limit` bytes.

    On native routes unknown fields are ignored, with one warning for each name.

    Raises:
        UnsupportedMediaType: it is not declared as JSON.
        PayloadTooLarge: it is too long.
        MalformedBody: it is not JSON.
        Forbidden: it asks for a model that the API key is not for.
        InvalidRequest: it is JSON of another shape; names the first field at fault.
    """
    content = await read_json(request, limit)
    try:
        body = _validated(content, model, is_lenient=is_native(request.scope))
    except ValidationError as error:
        raise shape_error(error, content) from None
    if isinstance(body, NativeBody):
        _warn_of_unknown(body.unknown_fields)
    return body


def _validated(content: Any, model: type[B], *, is_lenient: bool) -> B:
    """Check a body; a lenient route drops from it the unknown fields of records that are strict elsewhere.

    Each look at a body finds those of one item of a list, so there are several; not for ever.
    """
    deadline = time.monotonic() + LENIENT_SECONDS
    while True:
        try:
            return model.model_validate(content)
        except ValidationError as error:
            if not is_lenient or time.monotonic() > deadline or not _drop_unknown(error, content):
                raise


def _drop_unknown(error: ValidationError, content: Any) -> bool:
    """Remove the unknown fields an error names from `content`; False if it names none."""
    unknown = [_path(detail, content) for detail in error.errors() if detail["type"] == "extra_forbidden"]
    for *steps, name in unknown:
        holder = content
        for step in steps:
            holder = holder[step]
        holder.pop(name, None)
    _warn_of_unknown([str(name) for *_, name in unknown])
    return bool(unknown)


async def read_json(request: Request, limit: int) -> Any:
    """Read a request's body of at most `limit` bytes as JSON, whatever its shape; again, if asked again.

    Raises: as `read_body`, save for the shape.
    """
    scope = request.scope
    if _PARSED not in scope:
        await receive_body(request, limit)
        content = _parse_json(scope.pop(_RAW))
        if isinstance(content, dict):
            check_model(scope, content.get("model"))
        scope[_PARSED] = content
    return scope[_PARSED]


async def receive_body(request: Request, limit: int) -> None:
    """Receive a request's body of at most `limit` bytes, without parsing it.

    Raises:
        UnsupportedMediaType: it is not declared as JSON.
        PayloadTooLarge: it is too long.
    """
    if _RAW not in request.scope and _PARSED not in request.scope:
        _check_media_type(request.headers.get("content-type", ""))
        request.scope[_RAW] = await _read_bytes(request, limit)


def _check_media_type(content_type: str) -> None:
    media_type = content_type.split(";")[0].strip().lower()
    kind, _, name = media_type.partition("/")
    if kind != "application" or not (name == "json" or name.endswith("+json")):
        raise UnsupportedMediaType(f"content-type must be application/json. Given: {media_type or 'none'}")


async def _read_bytes(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and len(declared) < 20 and int(declared) > limit:
        raise PayloadTooLarge(f"the body must have at most {limit} bytes. Given: {declared}")
    content = bytearray()
    client: Client | None = request.scope.get(CLIENT)
    try:
        async for chunk in request.stream():
            content += chunk
            if client is not None:
                client.keep_body(len(chunk))
            if len(content) > limit:
                raise PayloadTooLarge(f"the body must have at most {limit} bytes")
    finally:
        if client is not None:
            client.keep_body(-len(content))
    return bytes(content)


def _parse_json(content: bytes) -> Any:
    try:
        parsed = json.loads(content.decode("utf-8"), parse_constant=_refuse_constant)
        if _SURROGATE.search(content):
            _refuse_surrogates(parsed, ())
        return parsed
    except UnicodeDecodeError as error:
        raise MalformedBody(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise MalformedBody("the body is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise MalformedBody(f"the body is not JSON: {error}") from None
    except ValueError:
        max_digits = sys.get_int_max_str_digits()
        raise MalformedBody(f"the body has an integer of more than {max_digits} digits") from None


def _refuse_surrogates(value: Any, path: tuple[str, ...]) -> None:
    """JSON can spell halves of characters; tokenizers and answers cannot."""
    match value:
        case str():
            if any("\ud800" <= character <= "\udfff" for character in value):
                param = ".".join(path)
                raise InvalidRequest(f"{param}: must be valid Unicode, without lone surrogates", param)
        case dict():
            for name, item in value.items():
                _refuse_surrogates(name, (*path, ascii(name)))
                _refuse_surrogates(item, (*path, name))
        case list():
            for place, item in enumerate(value):
                _refuse_surrogates(item, (*path, str(place)))


def _refuse_constant(name: str) -> NoReturn:
    raise MalformedBody(f"the body is not JSON: {name} is no JSON value")


def shape_error(error: ValidationError, content: Any) -> InvalidRequest:
    """Say in one line what is wrong with the first field of `content` at fault."""
    first = error.errors(include_url=False)[0]
    param = ".".join(map(str, _path(first, content)))
    return InvalidRequest(f"{param}: {_explain(first)}" if param else _explain(first), param or None)


def _path(detail: ErrorDetails, content: Any) -> list[int | str]:
    """The steps from the body to the field; pydantic adds the names of a union's branches, which no client knows."""
    path: list[int | str] = []
    value = content
    for step in detail["loc"]:
        if isinstance(value, dict) and step in value or isinstance(value, list) and isinstance(step, int):
            path.append(step)
            value = value[step]  # type: ignore[index]
    if detail["type"] == "missing":
        path.append(detail["loc"][-1])
    return path


def _explain(detail: ErrorDetails) -> str:
    match detail["type"]:
        case "missing":
            return "this field is required"
        case "extra_forbidden":
            return "unknown field"
        case "model_type":
            return f"must be an object. Given: {reprlib.repr(detail['input'])}"
        case "unsupported_type":
            return unsupported_type(detail["input"], detail["msg"])
        case "value_error":
            return detail["msg"].removeprefix("Value error, ")
        case _:
            message = detail["msg"].replace("Input should", "must")
            return f"{message}. Given: {reprlib.repr(detail['input'])}"


def _warn_of_unknown(names: list[str]) -> None:
    for name in names:
        if name not in _warned_fields and len(_warned_fields) < MAX_WARNED_FIELDS:
            _warned_fields.add(name)
            logger.warning("ignoring unknown field %s", reprlib.repr(name))
