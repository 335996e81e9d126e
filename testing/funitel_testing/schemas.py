"""Twenty bounded JSON schemas: every value they allow fits a few hundred bytes, so even a model that says nothing
sensible ends them. Nested objects, enums, refs, arrays, patterns, numbers, unions, unicode."""

from typing import Any

Schema = dict[str, Any]


def _object(**properties: Any) -> Schema:
    """An object with exactly these properties, all of them required."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _text(most: int, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most} | more


_BOOLEAN: Schema = {"type": "boolean"}

SCHEMAS: dict[str, Schema] = {
    "flat": _object(name=_text(8), age={"type": "integer", "minimum": 0, "maximum": 130}),
    "nested": _object(user=_object(name=_text(6), address=_object(city=_text(6), zip=_text(5)))),
    "deeply nested": _object(a=_object(b=_object(c=_object(d=_object(e=_BOOLEAN))))),
    "enum": _object(colour={"enum": ["red", "green", "blue"]}, size={"enum": ["S", "M", "L", "XL"]}),
    "enum of many types": _object(value={"enum": ["one", 2, 3.5, True, None]}),
    "const": _object(kind={"const": "circle"}, version={"const": 3}, filled=_BOOLEAN),
    "refs": {
        "$defs": {"point": _object(x={"type": "integer", "minimum": -99, "maximum": 99}, label=_text(3))},
        **_object(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
    },
    "refs to refs": {
        "$defs": {
            "unit": {"enum": ["kg", "m", "s"]},
            "amount": _object(value={"type": "integer", "minimum": 1, "maximum": 999}, unit={"$ref": "#/$defs/unit"}),
        },
        **_object(
            first={"$ref": "#/$defs/amount"},
            others={"type": "array", "items": {"$ref": "#/$defs/amount"}, "maxItems": 2},
        ),
    },
    "array of strings": _object(tags={"type": "array", "items": _text(5), "minItems": 1, "maxItems": 3}),
    "array of objects": _object(
        items={
            "type": "array",
            "items": _object(id={"type": "integer", "minimum": 1, "maximum": 99}, on=_BOOLEAN),
            "minItems": 2,
            "maxItems": 3,
        }
    ),
    "array of arrays": _object(
        grid={
            "type": "array",
            "items": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": 9},
                "minItems": 2,
                "maxItems": 2,
            },
            "minItems": 2,
            "maxItems": 2,
        }
    ),
    "tuple": _object(
        pair={
            "type": "array",
            "prefixItems": [_text(4), {"type": "integer", "minimum": 0, "maximum": 7}],
            "items": False,
            "minItems": 2,
        }
    ),
    "pattern": _object(
        phone={"type": "string", "pattern": "^\\+[0-9]{2}-[0-9]{6}$"},
        plate={"type": "string", "pattern": "^[A-Z]{2,3}[0-9]{1,3}$"},
    ),
    "formats": _object(day={"type": "string", "format": "date"}, id={"type": "string", "format": "uuid"}),
    "lengths": _object(code=_text(6, minLength=3), note=_text(4)),
    "integers": _object(
        dice={"type": "integer", "minimum": 1, "maximum": 6},
        level={"type": "integer", "exclusiveMinimum": -5, "exclusiveMaximum": 5},
        even={"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 20},
    ),
    "any of": _object(
        shape={
            "anyOf": [
                _object(kind={"const": "square"}, side={"type": "integer", "minimum": 1, "maximum": 9}),
                _object(kind={"const": "named"}, name=_text(5)),
            ]
        },
        extra={"type": ["boolean", "null"]},
    ),
    "optional": {
        "type": "object",
        "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 9}, "nick": _text(4), "ok": _BOOLEAN},
        "required": ["id"],
        "additionalProperties": False,
    },
    "unicode": _object(
        größe={"enum": ["klein", "groß", "riesig"]},
        名前={"enum": ["東京", "大阪"]},
        mood={"enum": ["😀", "😢"]},
        word={"type": "string", "pattern": "^[äöüß]{1,4}$"},
    ),
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]},
            {"type": "object", "properties": {"b": _BOOLEAN}, "required": ["b"]},
        ],
        "properties": {"a": True, "b": True},
        "additionalProperties": False,
    },
}
