"""Make the OpenAPI document of the table of routes, and a page of it."""

import html
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from funitel.proto.process.version import version
from funitel.router.console.assets import HEADERS
from funitel.router.middleware.operation import PATH_PARAMETER, ModelUse, Operation

REFERENCE = "#/components/schemas/{model}"

# What a status means, in the document; each has the error's record as its body, save where TGI's has none.
MEANINGS = {
    400: "The body is not JSON; on Anthropic's routes, also: a field breaks a rule, the message names it",
    401: "The API key is missing or wrong",
    403: "The API key is not for this route or model",
    404: "What the path names is not there, or no model of the name",
    409: "The state of the model forbids it",
    410: "It was there, and cannot be had any more; the message says why",
    413: "The body is larger than --payload-limit",
    415: "The body is not declared as JSON",
    422: "A field breaks a rule; the message names it",
    424: "A model shard failed",
    429: "Too many requests at once, or of this API key, or no time left for this one",
    499: "The launch was cancelled",
    500: "The generation ended without its last message",
    503: "The server is starting, stopping or broken",
    504: "The time given with x-request-timeout has passed",
    507: "The model does not fit; or the folder of --batch-dir cannot be written, such as on a full disk",
    529: "Too many requests at once, or no time left for this one",
}
KEY_FAILURES = (401, 403, 429)  # of a route that asks for an API key
MODEL_FAILURES = (404, 503, 507)  # of a route that needs a model: unknown, being loaded, too large


class _Generator(GenerateJsonSchema):
    """Describes answers as they are sent: a default is sent too, and what is left out when absent is never null."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        if self.mode == "serialization" and field["type"] == "model-field":
            return "serialization_exclude_if" not in field
        return super().field_is_required(field, total)

    def model_field_schema(self, schema: core_schema.ModelField) -> JsonSchemaValue:
        described = super().model_field_schema(schema)
        if self.mode == "serialization" and "serialization_exclude_if" in schema:
            present = [branch for branch in described.get("anyOf", []) if branch != {"type": "null"}]
            if len(present) == 1:
                rest = {key: value for key, value in described.items() if key not in ("anyOf", "default")}
                return {**present[0], **rest}
        return described


_Schemas = Mapping[Any, dict[str, Any]]  # a reference to each record's schema


def document(operations: Sequence[Operation], title: str) -> dict[str, Any]:
    """The OpenAPI document of the routes."""
    given_bodies = [body for operation in operations for body in (operation.body, operation.form) if body is not None]
    bodies = [(body, "validation") for body in given_bodies]
    answers = [(model, "serialization") for operation in operations for model in operation.answers]
    references, schemas = models_json_schema(
        [*bodies, *answers],  # type: ignore[list-item]
        ref_template=REFERENCE,
        schema_generator=_Generator,
    )
    taken = {model: reference for (model, mode), reference in references.items() if mode == "validation"}
    given = {model: reference for (model, mode), reference in references.items() if mode == "serialization"}
    paths: dict[str, Any] = {}
    for operation in operations:
        paths.setdefault(operation.documented_path, {})[operation.method.lower()] = _operation(operation, taken, given)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version()},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "key_header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(operation: Operation, taken: _Schemas, given: _Schemas) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": _operation_id(operation),
        "responses": {"200": {"description": "Success"} | _contents(operation, given)} | _failures(operation, given),
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": _json_content(taken[operation.body])}
    if operation.form is not None:
        content = {"multipart/form-data": {"schema": taken[operation.form]}}
        described["requestBody"] = {"required": True, "content": content}
    parameters = _parameters(operation)
    if parameters:
        described["parameters"] = parameters
    if operation.is_protected:
        described["security"] = [{"key": []}, {"key_header": []}]
    return described


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    """Those of the path and those of the query."""
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in PATH_PARAMETER.findall(operation.path)
    ]
    if operation.query is not None:
        described = operation.query.model_json_schema()["properties"]
        parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in described.items()]
    return parameters


def _operation_id(operation: Operation) -> str:
    """A name of its own for each method and path."""
    words = re.findall(r"\w+", operation.path)
    return "_".join([operation.method.lower(), *words])


def _failures(operation: Operation, given: _Schemas) -> dict[str, Any]:
    body = {"content": _json_content(given[operation.error])}
    chooses = operation.model is not ModelUse.NONE
    statuses = {
        *operation.failures,
        *(KEY_FAILURES if operation.is_protected else ()),
        *(MODEL_FAILURES if chooses else ()),
    }
    return {
        str(status): {"description": MEANINGS[status]} | ({} if status == 401 and operation.is_native else body)
        for status in sorted(statuses)
    }


def _contents(operation: Operation, given: _Schemas) -> dict[str, Any]:
    contents: dict[str, Any] = {}
    if operation.text is not None:
        contents[operation.text] = {"schema": {"type": "string"}}
    if operation.answer is not None:
        schema = given[operation.answer]
        contents |= _json_content({"type": "array", "items": schema} if operation.is_array else schema)
    if operation.event is not None:
        contents["text/event-stream"] = {"schema": given[operation.event]}
    return {"content": contents} if contents else {}


def _json_content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


# Page

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="description" content="Routes of a funitel server.">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
{head}
</head>
<body>
{before}
<h1>{title} <small>{version}</small></h1>
<p>The same as a document: <a href="openapi.json">openapi.json</a></p>
<h2>Routes</h2>
<table>
{routes}
</table>
<h2>Schemas</h2>
{schemas}
{after}
</body>
</html>
"""
_STYLE = """<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font-family: ui-monospace, monospace; }
td, th { text-align: left; padding: .2rem 1rem .2rem 0; vertical-align: top; }
pre { background: #8882; padding: .6rem; overflow: auto; }
</style>"""
# With the console's files; a browser without scripts shows what is in `noscript`.
_ASSETS = """<link rel="icon" href="ui/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="ui/style.css">
<script type="module" src="ui/docs.js"></script>"""


class Pages(NamedTuple):
    """The description of the routes, for programs and for people, and the headers of the page."""

    document: bytes
    page: str
    headers: Mapping[str, str]


def pages(described: dict[str, Any], *, has_console: bool) -> Pages:
    """A document as it is sent."""
    return Pages(
        document=json.dumps(described, separators=(",", ":")).encode(),
        page=page(described, has_console=has_console),
        headers=HEADERS if has_console else {},
    )


def page(described: dict[str, Any], *, has_console: bool) -> str:
    """A page about an OpenAPI document that needs nothing of other hosts.

    With the console's files its routes can be tried.
    """
    routes = "\n".join(
        _route_row(method, path, operation)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
    )
    schemas = "\n".join(_schema_part(name, schema) for name, schema in described["components"]["schemas"].items())
    info = described["info"]
    return _PAGE.format(
        title=html.escape(info["title"]),
        version=html.escape(info["version"]),
        routes=routes,
        schemas=schemas,
        head=_ASSETS if has_console else _STYLE,
        before='<div id="app"></div>\n<noscript>' if has_console else "",
        after="</noscript>" if has_console else "",
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
