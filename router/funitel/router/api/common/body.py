"""Read a JSON body into a record, or refuse it with a status and the reason; write records as JSON answers."""

import asyncio
import json
import re
import reprlib
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from funitel.proto.errors import (
    InvalidRequest,
    MalformedBody,
    PayloadTooLarge,
    UnsupportedEncoding,
    UnsupportedMediaType,
)
from funitel.proto.printable import shortened
from funitel.router.api.common.body_size import count_values
from funitel.router.api.common.error_codes import openai_code
from funitel.router.api.common.field_policy import FIELD_ERROR, FieldPolicy
from funitel.router.api.common.schema_base import Body, unsupported_type
from funitel.router.core import request_context
from funitel.router.core.text_bytes import check_text_bytes
from funitel.router.middleware.auth import check_model
from funitel.router.middleware.operation import route_of
from funitel.router.serving.service import Service
from funitel.router.transport.memory_budget import CLIENT, TOO_LARGE, Client
from funitel.router.transport.multipart import FormReader, boundary_of


def json_answer(body: BaseModel, headers: Mapping[str, str] | None = None, *, status: int = 200) -> Response:
    """Answer with one record."""
    return Response(body.model_dump_json(), status, headers, "application/json")


B = TypeVar("B", bound=Body)

FEW_VALUES = 1024  # are checked within a millisecond or two
MAX_SHOWN_HEADER = 80
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

# In a request's scope: its body, and how many values that has. A route may look at it before it hands the request on.
_RAW, _PARSED, _NUM_VALUES = "funitel.bytes", "funitel.body", "funitel.num_values"
_UPLOAD = "funitel.upload"  # in place of them: a file with its fields
FORM_BYTES = 65_536  # of a form beside its file


async def read_body(request: Request, model: type[B], service: Service) -> B:
    """Read and check the body of a request to a `service`; one of many values in a thread, one at a time.

    Unknown fields are ignored, with one warning for each name; with `strict_fields` they are errors.

    Raises:
        UnsupportedMediaType: it is not declared as JSON, or is compressed.
        PayloadTooLarge: it is too long.
        MalformedBody: it is not JSON.
        Forbidden: it asks for a model that the API key is not for.
        InvalidRequest: it is JSON of another shape; names the first field at fault.
    """
    content = await read_json(request, service.payload_limit)
    policy = FieldPolicy(service.settings.strict_fields)
    if request.scope[_NUM_VALUES] <= FEW_VALUES:
        body = _validated(content, model, policy)
    else:
        async with service.validating.acquired(request_context.current().owner):
            body = await asyncio.to_thread(_validated, content, model, policy)
    policy.warn(route_of(request.scope))
    return body


def _validated(content: Any, model: type[B], policy: FieldPolicy) -> B:
    try:
        return model.model_validate(content, context=policy)
    except ValidationError as error:
        raise shape_error(error, content) from None


async def read_json(request: Request, limit: int) -> Any:
    """Read a request's body of at most `limit` bytes as JSON, whatever its shape; again, if asked again.

    Raises: as `read_body`, save for the shape.
    """
    scope = request.scope
    if _PARSED not in scope:
        await receive_body(request, limit)
        raw = scope.pop(_RAW)
        check_text_bytes(raw, limit)
        content, scope[_NUM_VALUES] = _parse_json(raw)
        if isinstance(content, dict):
            check_model(scope, content.get("model"))
        scope[_PARSED] = content
    return scope[_PARSED]


def forget_body(scope: Scope) -> None:
    """Release the body of a request; its scope is part of a cycle, which may be collected much later."""
    scope.pop(_RAW, None)
    scope.pop(_PARSED, None)
    scope.pop(_UPLOAD, None)


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that a client has sent, and what it has said of it: the fields of its form, where that is one."""

    content: bytes
    fields: Mapping[str, str | list[str]]


async def receive_upload(request: Request, limit: int, flag: str) -> None:
    """Receive the file of a request, of at most `limit` bytes: in the field `file` of a form, or as the body itself.

    A body of JSON, which may hold a file in base64, is received as other bodies are.

    Raises:
        UnsupportedEncoding: the body is compressed.
        PayloadTooLarge: the file is too long; names `flag`, the setting.
        MalformedBody: the form is none.
        InvalidRequest: the form has a field too many, or too long.
    """
    scope = request.scope
    if _UPLOAD in scope or _PARSED in scope:
        return
    if is_json(request):
        await receive_body(request, limit * 4 // 3 + FORM_BYTES)
        return
    _check_encoding(", ".join(request.headers.getlist("content-encoding")))
    content_type = request.headers.get("content-type", "")
    is_form = content_type.lower().startswith("multipart/")
    if declared_size(request) > limit + FORM_BYTES * is_form:
        raise _upload_too_large(limit, flag)
    content = bytearray()
    client: Client | None = scope.get(CLIENT)

    def take(more: bytes) -> None:
        content.extend(more)
        if len(content) > limit:
            raise _upload_too_large(limit, flag)

    async def chunks() -> AsyncIterator[bytes]:
        num_kept = 0
        try:
            async for chunk in request.stream():
                if TOO_LARGE in scope:
                    raise PayloadTooLarge("a chunked body is longer than --payload-limit: send a content-length")
                if client is not None:
                    client.keep_body(len(chunk))
                    num_kept += len(chunk)
                yield chunk
        finally:
            if client is not None:
                client.keep_body(-num_kept)

    fields: dict[str, str | list[str]] = {}
    if is_form:
        form = FormReader(boundary_of(content_type), "file", take)
        await form.read(chunks())
        fields = {**form.fields, **form.lists}
        if form.filename is None:
            raise InvalidRequest("file: this field is required", "file", "missing_required_parameter")
    else:
        async for chunk in chunks():
            take(chunk)
    if not content:
        raise InvalidRequest("file: must not be empty", "file")
    check_model(scope, fields.get("model"))
    scope[_UPLOAD] = Upload(bytes(content), fields)


def is_json(request: Request) -> bool:
    """Whether a body is declared as JSON."""
    return "json" in _media_type(request.headers.get("content-type", ""))


def is_audio(request: Request) -> bool:
    """Whether a body is an audio file by itself, by its media type."""
    return request.headers.get("content-type", "").lower().startswith("audio/")


def has_upload(scope: Scope) -> bool:
    """Whether a file was received."""
    return _UPLOAD in scope


def upload_of(scope: Scope) -> Upload:
    """The file of a request that was received.

    Raises:
        UnsupportedMediaType: JSON was received in its place.
    """
    upload: Upload | None = scope.get(_UPLOAD)
    if upload is None:
        raise UnsupportedMediaType("content-type must be multipart/form-data, with the field `file`. Given: JSON")
    return upload


def checked_form(request: Request, upload: Upload, model: type[B], *, is_strict: bool) -> B:
    """The fields of an upload as a record; unknown ones as in a body. Raises InvalidRequest for the first at fault."""
    policy = FieldPolicy(is_strict)
    form = _validated(dict(upload.fields), model, policy)
    policy.warn(route_of(request.scope))
    return form


def _upload_too_large(limit: int, flag: str) -> PayloadTooLarge:
    return PayloadTooLarge(f"file: must have at most {limit} bytes ({flag})")


def taken_body(scope: Scope) -> bytes:
    """Take the body of a request that was received and not parsed."""
    content: bytes = scope.pop(_RAW)
    return content


async def receive_body(request: Request, limit: int) -> None:
    """Receive a request's body of at most `limit` bytes, without parsing it.

    Raises:
        UnsupportedMediaType: it is not declared as JSON, or is compressed.
        PayloadTooLarge: it is too long.
    """
    if _RAW not in request.scope and _PARSED not in request.scope:
        _check_media_type(request.headers.get("content-type", ""))
        _check_encoding(", ".join(request.headers.getlist("content-encoding")))
        request.scope[_RAW] = await _read_bytes(request, limit)


def _media_type(content_type: str) -> str:
    """Without its parameters, of which the boundary of a form is any text."""
    return content_type.partition(";")[0].strip().lower()


def _check_media_type(content_type: str) -> None:
    media_type = _media_type(content_type)
    kind, _, name = media_type.partition("/")
    if kind != "application" or not (name == "json" or name.endswith("+json")):
        raise UnsupportedMediaType(f"content-type must be application/json. Given: {media_type or 'none'}")


def _check_encoding(encoding: str) -> None:
    if any(coding.strip().lower() not in ("", "identity") for coding in encoding.split(",")):
        raise UnsupportedEncoding(f"content-encoding must be identity. Given: {shortened(encoding, MAX_SHOWN_HEADER)}")


def declared_size(request: Request) -> int:
    """Return the bytes that a body has by its header; 0 where the header does not say."""
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isdigit() and len(declared) < 20 else 0


async def _read_bytes(request: Request, limit: int) -> bytes:
    declared = declared_size(request)
    if declared > limit:
        raise PayloadTooLarge(f"the body must have at most {limit} bytes. Given: {declared}")
    content = bytearray()
    client: Client | None = request.scope.get(CLIENT)
    try:
        async for chunk in request.stream():
            content += chunk
            if client is not None:
                client.keep_body(len(chunk))
            if len(content) > limit or TOO_LARGE in request.scope:
                raise PayloadTooLarge(f"the body must have at most {limit} bytes")
    finally:
        if client is not None:
            client.keep_body(-len(content))
    return bytes(content)


def _parse_json(content: bytes) -> tuple[Any, int]:
    """The value, and how many values it has together."""
    try:
        parsed = json.loads(content.decode("utf-8"), parse_constant=_refuse_constant)
        num_values = count_values(parsed)
        if _SURROGATE.search(content):
            _refuse_surrogates(parsed, ())
        return parsed, num_values
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
            if _LONE_SURROGATE.search(value):
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


Q = TypeVar("Q", bound=BaseModel)


def query_of(request: Request, model: type[Q]) -> Q:
    """Read the parameters of a query; raises InvalidRequest."""
    given = dict(request.query_params)
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise shape_error(error, given) from None


def shape_error(error: ValidationError, content: Any) -> InvalidRequest:
    """Say in one line what is wrong with the first field of `content` at fault."""
    first = error.errors(include_url=False)[0]
    param = ".".join(map(str, _path(first, content)))
    message = f"{param}: {_explain(first)}" if param else _explain(first)
    return InvalidRequest(message, param or None, openai_code(first))


def _path(detail: ErrorDetails, content: Any) -> list[int | str]:
    """The steps from the body to the field; pydantic adds the names of a union's branches, which no client knows."""
    *steps, last = detail["loc"] or ("",)
    path: list[int | str] = []
    value = content
    for step in detail["loc"] if detail["type"] != "missing" else steps:
        if isinstance(value, dict) and step in value or isinstance(value, list) and isinstance(step, int):
            path.append(step)
            value = value[step]  # type: ignore[index]
    match detail["type"]:
        case "missing":
            path.append(last)
        case _ if detail["type"] == FIELD_ERROR:
            path.append(detail["ctx"]["name"])
    return path


def _explain(detail: ErrorDetails) -> str:
    match detail["type"]:
        case "missing":
            return "this field is required"
        case "model_type":
            return f"must be an object. Given: {reprlib.repr(detail['input'])}"
        case "unsupported_type":
            return unsupported_type(detail["input"], detail["msg"])
        case "value_error":
            return detail["msg"].removeprefix("Value error, ")
        case kind if kind == FIELD_ERROR:
            return detail["msg"]
        case _:
            message = detail["msg"].replace("Input should", "must")
            return f"{message}. Given: {reprlib.repr(detail['input'])}"
