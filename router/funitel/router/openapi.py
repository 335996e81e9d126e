"""The routes as a table, and the OpenAPI document and the page made from it. Knows no handler's inside."""

import html
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

REFERENCE = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One route: who answers it, and what goes in and out.

    Attributes:
        body: record of the request's JSON body, if it has one.
        answer: record of the JSON answer; None for text.
        event: record of each Server-Sent Event, when the route can stream.
        error: record of a failure.
        is_array: whether the answer is an array of `answer`.
        is_protected: whether an API key is asked for, when there is one.
    """

    method: str
    path: str
    handler: Callable[[Request], Awaitable[Response]]
    summary: str
    error: type[BaseModel]
    body: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None
    event: type[BaseModel] | None = None
    is_array: bool = False
    is_protected: bool = False

    @property
    def models(self) -> list[type[BaseModel]]:
        """Every record of the route."""
        return [model for model in (self.body, self.answer, self.event, self.error) if model is not None]


def document(operations: Sequence[Operation], title: str, version: str) -> dict[str, Any]:
    """The OpenAPI document of the routes."""
    bodies = [(operation.body, "validation") for operation in operations if operation.body is not None]
    answers = [
        (model, "serialization")
        for operation in operations
        for model in operation.models
        if model is not operation.body
    ]
    _, schemas = models_json_schema([*bodies, *answers], ref_template=REFERENCE)  # type: ignore[list-item]
    paths: dict[str, Any] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": operation.handler.__name__,
        "responses": {
            "200": {"description": "Success", "content": _contents(operation)},
            "default": {"description": "Failure", "content": _json_content(_reference(operation.error))},
        },
    }
    if operation.body is not None:
        content = _json_content(_reference(operation.body))
        described["requestBody"] = {"required": True, "content": content}
    if operation.is_protected:
        described["security"] = [{"key": []}]
    return described


def _contents(operation: Operation) -> dict[str, Any]:
    contents: dict[str, Any] = {}
    if operation.answer is not None:
        schema = _reference(operation.answer)
        contents |= _json_content({"type": "array", "items": schema} if operation.is_array else schema)
    if operation.event is not None:
        contents["text/event-stream"] = {"schema": _reference(operation.event)}
    return contents


def _json_content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _reference(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": REFERENCE.format(model=model.__name__)}


# Page

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
code, pre {{ font-family: ui-monospace, monospace; }}
td, th {{ text-align: left; padding: .2rem 1rem .2rem 0; vertical-align: top; }}
pre {{ background: #8882; padding: .6rem; overflow: auto; }}
</style>
</head>
<body>
<h1>{title} <small>{version}</small></h1>
<p>The same as a document: <a href="openapi.json">openapi.json</a></p>
<h2>Routes</h2>
<table>
{routes}
</table>
<h2>Schemas</h2>
{schemas}
</body>
</html>
"""


def page(described: dict[str, Any]) -> str:
    """A page about an OpenAPI document that needs nothing from elsewhere."""
    routes = "\n".join(
        _route_row(method, path, operation)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    )
    schemas = "\n".join(_schema_part(name, schema) for name, schema in described["components"]["schemas"].items())
    info = described["info"]
    return _PAGE.format(
        title=html.escape(info["title"]), version=html.escape(info["version"]), routes=routes, schemas=schemas
    )


def _route_row(method: str, path: str, operation: dict[str, Any]) -> str:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    name = body.get("$ref", "").rpartition("/")[2]
    link = f'<a href="#{html.escape(name)}">{html.escape(name)}</a>' if name else ""
    signature = html.escape(f"{method.upper()} {path}")
    cells = (f"<code>{signature}</code>", html.escape(operation["summary"]), link)
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _schema_part(name: str, schema: dict[str, Any]) -> str:
    heading = f'<h3 id="{html.escape(name)}">{html.escape(name)}</h3>'
    return f"{heading}\n<pre>{html.escape(json.dumps(schema, indent=2))}</pre>"
