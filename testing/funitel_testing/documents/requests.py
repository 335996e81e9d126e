"""Check the calls of curl in the pages against the table of routes and the records of the bodies."""

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from funitel.router.api.common.body import shape_error
from funitel.router.api.common.field_policy import FieldPolicy
from funitel.router.api.operators import DEBUG_ROUTES
from funitel.router.api.routes import OPERATIONS
from funitel.router.middleware.operation import PATH_PARAMETER, Operation

FOREIGN_PORTS = (4317, 4318, 8000, 8080, 9090, 11434)  # of other programs that the pages mention


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"curl: {message}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    for names in (
        ("-s", "--silent"),
        ("-S", "--show-error"),
        ("-f", "--fail"),
        ("-i", "--include"),
        ("-L", "--location"),
        ("-N", "--no-buffer"),
        ("-v", "--verbose"),
        ("--fail-with-body",),
    ):
        parser.add_argument(*names, action="store_true")
    for names in (
        ("-o", "--output"),
        ("-w", "--write-out"),
        ("-m", "--max-time"),
        ("--retry",),
        ("--cacert",),
        ("--cert",),
        ("--key",),
    ):
        parser.add_argument(*names)
    parser.add_argument("-X", "--request", dest="method")
    parser.add_argument("-H", "--header", action="append", default=[])
    parser.add_argument("-d", "--data", "--data-raw", "--data-binary", dest="data")
    parser.add_argument("--json", dest="json")
    parser.add_argument("-F", "--form", action="append", default=[])
    parser.add_argument("url")
    return parser


def check_curl(words: Sequence[str]) -> None:
    """Check a call of curl, without the word `curl`.

    Raises:
        ValueError: a flag is unknown, no route has the path and method, or the body is refused; the message has why.
    """
    call = _parser().parse_args(words)
    url = urlsplit(call.url if "//" in call.url else f"http://{call.url}")
    if url.port in FOREIGN_PORTS:
        return
    data = call.json if call.json is not None else call.data
    method = call.method or ("GET" if data is None and not call.form else "POST")
    operation = route(method, url.path)
    if call.form:
        _check_form(call.form, operation)
        return
    if data is None:
        if operation.body is not None:
            raise ValueError(f"{method} {url.path} needs a body")
        return
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in call.header)}
    if call.json is None and headers.get("content-type") != "application/json":
        raise ValueError("a body needs the header content-type: application/json")
    if not data.startswith("@"):
        check_body(operation, json.loads(data))


def route(method: str, path: str) -> Operation:
    """The operation of a method and path.

    Raises:
        ValueError: there is none.
    """
    for operation in (*OPERATIONS, *DEBUG_ROUTES):
        pattern = PATH_PARAMETER.sub(lambda name: ".+" if name[0].endswith(":path}") else "[^/]+", operation.path)
        if operation.method == method and re.fullmatch(pattern, path or "/"):
            return operation
    raise ValueError(f"no route has {method} {path}")


def _check_form(parts: Sequence[str], operation: Operation) -> None:
    """Raise ValueError where a form has a part that the route does not take, or lacks one that it needs."""
    if operation.form is None:
        raise ValueError(f"{operation.method} {operation.path} takes no form")
    known = operation.form.model_fields
    names = {part.partition("=")[0] for part in parts}
    missing = {name for name, field in known.items() if field.is_required()} - names
    aliases = {field.alias for field in known.values()}
    if unknown := names - known.keys() - aliases:
        raise ValueError(f"{operation.path}: the form has {', '.join(sorted(unknown))}, which the route does not take")
    if missing:
        raise ValueError(f"{operation.path}: the form lacks {', '.join(sorted(missing))}")


def check_body(operation: Operation, content: Any) -> None:
    """Check a body as the router does with `--strict-fields`.

    Raises:
        ValueError: it is refused.
    """
    model: type[BaseModel] | None = operation.body
    if model is None:
        raise ValueError(f"{operation.method} {operation.path} takes no body")
    try:
        model.model_validate(content, context=FieldPolicy(is_strict=True))
    except ValidationError as error:
        raise ValueError(f"{operation.path}: {shape_error(error, content).message}") from None
