"""Make the JSON schema of forced tool calls, so that a model writes nothing but calls with valid arguments.

A call is `{"name": NAME, "arguments": ARGUMENTS}`, where ARGUMENTS follow the tool's own schema. Several calls are an
array of such.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from funitel.proto.errors import ToolError
from funitel.proto.step import GrammarType
from funitel.router.chat.call import Tool
from funitel.router.core.grammar import Grammar

MAX_CALLS = 16  # in one answer; an array without end would only ever be cut off

_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum", "default", "examples", "example")
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def forced_calls(tools: Sequence[Tool], *, parallel: bool) -> Grammar:
    """Return the grammar of one call of any of some tools, or, where `parallel` calls are allowed, of several.

    Raises:
        ToolError: the parameters of a tool are not the schema of an object.
    """
    definitions = {f"tool{place}": _arguments_schema(tool, f"tool{place}") for place, tool in enumerate(tools)}
    calls = [_call_schema(tool, f"tool{place}") for place, tool in enumerate(tools)]
    schema: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if parallel:
        definitions["call"] = schema
        one = {"$ref": "#/$defs/call"}
        schema = {"anyOf": [one, {"type": "array", "items": one, "minItems": 1, "maxItems": MAX_CALLS}]}
    return Grammar(GrammarType.JSON, json.dumps(schema | {"$defs": definitions}, ensure_ascii=False))


def _call_schema(tool: Tool, definition: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": {"$ref": f"#/$defs/{definition}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _arguments_schema(tool: Tool, definition: str) -> dict[str, Any]:
    if not tool.parameters:
        return _NO_ARGUMENTS
    if tool.parameters.get("type", "object") != "object":
        given = json.dumps(tool.parameters.get("type"))
        raise ToolError(f"`parameters` of `{tool.name}` must be a schema of type `object`. Given: {given}", "tools")
    moved: dict[str, Any] = _moved(tool.parameters, f"#/$defs/{definition}")
    return {"type": "object"} | moved


def _moved(schema: Any, root: str) -> Any:
    """A schema with its references to its own root changed to where it is put."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return dict(_moved_items(schema, root))


def _moved_items(schema: Mapping[str, Any], root: str) -> Iterator[tuple[str, Any]]:
    for key, value in schema.items():
        if key in ("$ref", "$dynamicRef") and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            yield key, root + value[1:]
        elif key in _VALUES or key in ("$schema", "$id"):
            if key in _VALUES:
                yield key, value
        elif key in _MAPS_OF_SCHEMAS and isinstance(value, Mapping):
            yield key, {name: _moved(item, root) for name, item in value.items()}
        else:
            yield key, _moved(value, root)
