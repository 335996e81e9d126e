"""Make the JSON schema of constrained tool calls, so that a model writes nothing but calls with valid arguments.

A call is `{"name": NAME, "arguments": ARGUMENTS}`, where ARGUMENTS follow the tool's own schema. Several calls are an
array of such. Beside a response format, a call or an answer by the format is allowed, and no answer has the form of a
call.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from funitel.proto.errors import ToolError
from funitel.proto.step import GrammarType
from funitel.router.chat.call import Tool
from funitel.router.chat.tool_call_reader import ARGUMENT_KEYS, NAME_KEYS, CallKeys
from funitel.router.core.grammar import Grammar

DEFAULT_KEYS = CallKeys()
MAX_CALLS = 16  # in one answer; an array without end would only ever be cut off

_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum", "default", "examples", "example")
_CLOSING = ("properties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf", "enum", "const")
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def forced_calls(tools: Sequence[Tool], *, parallel: bool, keys: CallKeys = DEFAULT_KEYS) -> Grammar:
    """Return the grammar of one call of any of some tools, or, where `parallel` calls are allowed, of several.

    Raises:
        ToolError: the parameters of a tool are not the schema of an object.
    """
    definitions = _definitions(tools)
    cases = _calls(tools, keys, definitions, parallel=parallel)
    return _grammar(cases, definitions)


def calls_or_answer(tools: Sequence[Tool], answer: Grammar, *, parallel: bool) -> tuple[Grammar, CallKeys]:
    """Return the grammar of calls, or of an answer by a JSON schema, and the keys that calls have in it.

    Several calls are not allowed where an answer may be an array.

    Raises:
        ToolError: the parameters of a tool are not the schema of an object.
        ValueError: the answer's schema is no JSON object.
    """
    schema = json.loads(answer.text)
    if not isinstance(schema, dict):
        raise ValueError(f"not an object: {answer.text[:100]}")
    keys = _keys_beside(schema)
    parallel = parallel and not _may_be_array(schema)
    definitions = _definitions(tools) | {"answer": _moved(_without_key(schema, keys.arguments), "#/$defs/answer")}
    cases = _calls(tools, keys, definitions, parallel=parallel)
    return _grammar([*cases, {"$ref": "#/$defs/answer"}], definitions), keys


def _definitions(tools: Sequence[Tool]) -> dict[str, Any]:
    return {f"tool{place}": _arguments_schema(tool, f"tool{place}") for place, tool in enumerate(tools)}


def _calls(
    tools: Sequence[Tool], keys: CallKeys, definitions: dict[str, Any], *, parallel: bool
) -> list[dict[str, Any]]:
    """The forms that calls may have; adds the definitions they need."""
    calls = [_call_schema(tool, f"tool{place}", keys) for place, tool in enumerate(tools)]
    if not parallel:
        return calls
    definitions["call"] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    one = {"$ref": "#/$defs/call"}
    return [one, {"type": "array", "items": one, "minItems": 1, "maxItems": MAX_CALLS}]


def _grammar(cases: list[dict[str, Any]], definitions: dict[str, Any]) -> Grammar:
    schema = cases[0] if len(cases) == 1 else {"anyOf": cases}
    return Grammar(GrammarType.JSON, json.dumps(schema | {"$defs": definitions}, ensure_ascii=False))


def _keys_beside(answer: Any) -> CallKeys:
    """Keys of calls that an answer does not declare, both of them; the usual ones where all are declared."""
    declared = set(_declared_keys(answer))
    pairs = [CallKeys(name, arguments) for arguments, name in product(ARGUMENT_KEYS, NAME_KEYS)]
    return next((keys for keys in pairs if not {keys.name, keys.arguments} <= declared), CallKeys())


def _declared_keys(schema: Any) -> Iterator[str]:
    """The keys that any object within a schema declares."""
    if isinstance(schema, Mapping):
        properties = schema.get("properties")
        yield from properties if isinstance(properties, Mapping) else ()
    for inner in schema.values() if isinstance(schema, Mapping) else schema if isinstance(schema, list) else ():
        yield from _declared_keys(inner)


def _may_be_array(schema: dict[str, Any]) -> bool:
    """Whether an answer by a schema may be an array; a schema of unknown type may."""
    target: Any = schema
    for step in str(schema.get("$ref", "")).split("/")[1:]:
        target = target.get(step) if isinstance(target, dict) else None
    if not isinstance(target, dict):
        return True
    types = target.get("type", "object" if "properties" in target else "array")
    return "array" in (types if isinstance(types, list) else [types])


def _without_key(schema: dict[str, Any], key: str) -> dict[str, Any]:
    """An answer's schema, and where it allows keys that it does not declare, not this one."""
    properties = schema.get("properties", {})
    is_free = not schema.keys() & {
        "properties",
        "patternProperties",
        "$ref",
        "allOf",
        "anyOf",
        "oneOf",
        "enum",
        "const",
    }
    if not isinstance(properties, dict) or key in properties:
        return schema
    if schema.get("additionalProperties", is_free) is False:
        return schema
    return {"additionalProperties": True} | schema | {"properties": properties | {key: False}}


def _call_schema(tool: Tool, definition: str, keys: CallKeys) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {keys.name: {"const": tool.name}, keys.arguments: {"$ref": f"#/$defs/{definition}"}},
        "required": [keys.name, keys.arguments],
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
