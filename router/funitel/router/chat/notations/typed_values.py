"""Make JSON of arguments that a model writes as bare text, by the types that the tool's schema says."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

MAX_DEPTH = 32  # of references and cases within each other, beyond which a schema says nothing about its type

Schema = Mapping[str, Any]
_WORDS = {"true": True, "false": False, "null": None, "none": None}
_NOTHING = object()  # no JSON


def json_text(value: Any) -> str:
    """Write a value as JSON, with characters as they are."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def arguments_text(arguments: Mapping[str, str]) -> str:
    """Write an object of values that are JSON text already."""
    return "{" + ", ".join(f"{json_text(key)}: {value}" for key, value in arguments.items()) + "}"


def argument_schema(parameters: Schema | None, key: str) -> Any:
    """Return what a tool's parameters say about one of its arguments; None for nothing."""
    properties = resolved(parameters or {}, parameters or {}).get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else None


def typed_json(text: str, schema: Any, root: Schema | None = None) -> str:
    """Return JSON text of what a model wrote as an argument.

    Text is a string where the schema allows a string and nothing else that it could be. Without types, it is what it
    is as JSON, else a string.

    Args:
        text: as the model wrote it.
        schema: of the argument, None if there is none.
        root: the schema that references in it refer to.
    """
    kinds = kinds_of(schema, root or {})
    if kinds == {"string"}:
        return json_text(text)
    found = _read(text, kinds)
    if found is _NOTHING or (isinstance(found, str) and not kinds):
        return json_text(text)
    if kinds and "string" in kinds and not _kinds_of_value(found) & (kinds - {"string"}):
        return json_text(text)
    return text.strip() if _is_plain_json(text, found) else json_text(found)


def json_or_string(text: str) -> str:
    """Return a text that is to be JSON; as a string if it is none."""
    return json_text(text) if _read(text, frozenset()) is _NOTHING else text.strip()


def kinds_of(schema: Any, root: Schema) -> frozenset[str]:
    """Return the JSON types that a schema allows; none where it does not say."""
    return frozenset(_kinds(schema, root, MAX_DEPTH))


def _kinds(schema: Any, root: Schema, depth: int) -> Iterator[str]:
    schema = resolved(schema, root)
    given = schema.get("type")
    if isinstance(given, str):
        yield given
    elif isinstance(given, list):
        yield from (kind for kind in given if isinstance(kind, str))
    elif "const" in schema or isinstance(schema.get("enum"), list):
        for value in schema.get("enum") or [schema.get("const")]:
            yield from _kinds_of_value(value)
    elif depth:
        for keyword in ("anyOf", "oneOf", "allOf"):
            cases = schema.get(keyword)
            for case in cases if isinstance(cases, list) else ():
                yield from _kinds(case, root, depth - 1)


def resolved(schema: Any, root: Schema) -> Schema:
    """A schema, or what its reference within the root leads to."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        schema = root
        for step in reference.split("/")[1:]:
            schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return {}


def _kinds_of_value(value: Any) -> set[str]:
    match value:
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"integer", "number"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case None:
            return {"null"}
        case list():
            return {"array"}
        case _:
            return {"object"}


def _read(text: str, kinds: frozenset[str]) -> Any:
    """A text as JSON, or as the word that Python writes for a truth value or for nothing."""
    word = text.strip().lower() if len(text) < 16 else ""
    if word in _WORDS and _kinds_of_value(_WORDS[word]) & kinds:
        return _WORDS[word]
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return _NOTHING
    return value if not isinstance(value, float) or math.isfinite(value) else _NOTHING


def _is_plain_json(text: str, found: Any) -> bool:
    """Whether the text itself is the JSON: not one of Python's words."""
    return not isinstance(found, bool | None) or text.strip() == json_text(found)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
