"""What the keywords of a JSON schema say: which keys are declared, and which types they concern."""

from dataclasses import dataclass
from typing import Any, Final

OBJECT_KEYWORDS: Final = (
    "properties",
    "patternProperties",
    "additionalProperties",
    "required",
    "minProperties",
    "maxProperties",
)
_CONCERNS: Final = {
    "object": OBJECT_KEYWORDS,
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
DROPPED: Final = frozenset(("$defs", "definitions", "$id", "id", "$anchor", "unevaluatedProperties"))
DESCRIPTIONS: Final = frozenset(("title", "description", "default", "examples", "deprecated", "$comment"))
_BESIDE = (DESCRIPTIONS | DROPPED) - {"unevaluatedProperties"}  # changes nothing for a reference or an `allOf`


@dataclass(frozen=True, slots=True)
class Declared:
    """What some schemas of one value say together of its keys, in order."""

    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    has_keys: bool = False  # keys are declared, if only that there are none
    has_rest: bool = False  # something is said of all other keys
    has_type: bool = False

    def __or__(self, other: "Declared") -> "Declared":
        return Declared(
            tuple(dict.fromkeys((*self.names, *other.names))),
            tuple(dict.fromkeys((*self.patterns, *other.patterns))),
            self.has_keys or other.has_keys,
            self.has_rest or other.has_rest,
            self.has_type or other.has_type,
        )

    @property
    def is_closed(self) -> bool:
        """Whether keys that are not declared are to be forbidden."""
        return self.has_keys and not self.has_rest


NOTHING: Final = Declared()


def own(schema: dict[str, Any]) -> Declared:
    """What the keywords of a schema itself declare. One that needs more keys than it declares allows others."""
    properties, patterns, required = (schema.get(key) for key in ("properties", "patternProperties", "required"))
    listed = [*(properties if isinstance(properties, dict) else ()), *(required if isinstance(required, list) else ())]
    names = tuple(dict.fromkeys(name for name in listed if isinstance(name, str)))
    least = schema.get("minProperties")
    return Declared(
        names=names,
        patterns=tuple(patterns) if isinstance(patterns, dict) else (),
        has_keys=properties is not None or patterns is not None,
        has_rest="additionalProperties" in schema
        or schema.get("unevaluatedProperties", False) is not False
        or (properties is not None and not patterns and isinstance(least, int) and least > len(names)),
        has_type=not schema.keys().isdisjoint(("type", "const", "enum")),
    )


def is_only_member(schema: dict[str, Any]) -> bool:
    """Whether a schema is no more than a reference, or an `allOf` of one."""
    match {key: value for key, value in schema.items() if key not in _BESIDE}:
        case {"$ref": _, **others} | {"allOf": [_], **others}:
            return not others
    return False


def concerned(schema: dict[str, Any], known: Declared) -> str | list[str] | None:
    """The types that the keywords of a schema are about; None where it has none, or leaves that to its only member."""
    if is_only_member(schema):
        return None
    types = [type_ for type_, keywords in _CONCERNS.items() if not schema.keys().isdisjoint(keywords)]
    if known.has_keys and "object" not in types:
        types.insert(0, "object")
    return types[0] if len(types) == 1 else types or None
