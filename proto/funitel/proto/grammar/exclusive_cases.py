"""Show that no value can match two cases of a `oneOf`, so that they may be alternatives of a grammar."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Final, Protocol

from funitel.proto.grammar.keywords import NOTHING, Declared, concerned

MAX_DEPTH = 8  # of properties and references
MAX_PAIRS = 300_000  # of schemas compared; some 10 µs each

_TYPES: Final = {
    "null": {"null"},
    "boolean": {"boolean"},
    "integer": {"integer"},
    "number": {"integer", "fraction"},
    "string": {"string"},
    "array": {"array"},
    "object": {"object"},
}
ALL_TYPES: Final = frozenset(kind for kinds in _TYPES.values() for kind in kinds)


class Schemas(Protocol):
    """The schema that the cases are part of."""

    def target(self, reference: str) -> Any:
        """The schema that a reference names; None where there is none."""

    def anywhere(self, schema: Any) -> Declared:
        """What a schema declares of one value, always or in any of its cases; closed only if all of them are."""


@dataclass(slots=True)
class ExclusiveCases:
    """Compares the cases of a `oneOf`, each of which will be closed, with the others as they were given."""

    schemas: Schemas
    types: frozenset[str]  # that the value can have by the schema with the cases
    beside: Declared  # what is declared of the same value beside the cases
    _num_pairs: int = 0

    def holds(self, cases: list[Any]) -> bool:
        """Whether it is certain that a value by one case, closed, matches no other case."""
        return all(
            self._are_apart_values(one, other, self.beside, self.types, MAX_DEPTH)
            for one, other in permutations(cases, 2)
        )

    def _are_apart_values(self, one: Any, other: Any, beside: Declared, types: frozenset[str], depth: int) -> bool:
        """Whether no value matches both; what is `beside` holds for `one`, too."""
        keys = beside | self.schemas.anywhere(one)
        if isinstance(one, dict) and not keys.has_type:
            types &= types_of(concerned(one, keys))
        return self._are_apart(one, other, keys, types, depth)

    def _are_apart(self, one: Any, other: Any, keys: Declared, types: frozenset[str], depth: int) -> bool:
        """Whether no value of these types matches both; `one` is closed to `keys`."""
        self._num_pairs += 1
        if one is False or other is False:
            return True
        if not (isinstance(one, dict) and isinstance(other, dict)) or not depth or self._num_pairs > MAX_PAIRS:
            return False
        types = types & _types(one) & _types(other)
        return (
            not types
            or _have_no_value_in_common(one, other)
            or (types == {"object"} and self._have_apart_keys(one, other, keys, depth))
            or self._are_apart_in_parts(one, other, keys, types, depth)
        )

    def _have_apart_keys(self, one: dict[str, Any], other: dict[str, Any], keys: Declared, depth: int) -> bool:
        here, there = (_properties(schema) for schema in (one, other))
        needed_here, needed_there = (_strings(schema.get("required")) for schema in (one, other))
        if keys.is_closed and not keys.patterns and any(name not in keys.names for name in needed_there):
            return True
        if _forbids_one(one, needed_there) or _forbids_one(other, needed_here):
            return True
        return any(
            self._are_apart_values(here[name], there[name], NOTHING, ALL_TYPES, depth - 1)
            for name in (*needed_here, *needed_there)
            if name in here and name in there
        )

    def _are_apart_in_parts(
        self, one: dict[str, Any], other: dict[str, Any], keys: Declared, types: frozenset[str], depth: int
    ) -> bool:
        """Whether a part that must match, or every case of which one must, is apart from the other schema."""
        for parts, quantifier in self._groups(one):
            if quantifier(self._are_apart(part, other, keys, types, depth - 1) for part in parts):
                return True
        return any(
            quantifier(self._are_apart(one, part, keys, types, depth - 1) for part in parts)
            for parts, quantifier in self._groups(other)
        )

    def _groups(self, schema: dict[str, Any]) -> Iterator[tuple[list[Any], Any]]:
        if isinstance(schema.get("$ref"), str):
            yield [self.schemas.target(schema["$ref"])], any
        for keyword, quantifier in (("allOf", any), ("anyOf", all), ("oneOf", all)):
            if isinstance(schema.get(keyword), list) and schema[keyword]:
                yield schema[keyword], quantifier


def types_of(names: Any) -> frozenset[str]:
    """The types that a `type` names, with integers apart from other numbers; all without one."""
    listed = names if isinstance(names, list) else [names]
    return ALL_TYPES if names is None else frozenset().union(*(_TYPES.get(str(name), ()) for name in listed))


def _types(schema: dict[str, Any]) -> frozenset[str]:
    values = _values(schema)
    types = types_of(schema.get("type"))
    return types if values is None else types & {_type_of(value) for value in values}


def _values(schema: dict[str, Any]) -> list[Any] | None:
    """All values that a schema allows, where it lists them."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _have_no_value_in_common(one: dict[str, Any], other: dict[str, Any]) -> bool:
    here, there = _values(one), _values(other)
    if here is None or there is None:
        return False
    return not any(_type_of(a) == _type_of(b) and a == b for a in here for b in there)


def _type_of(value: Any) -> str:
    if isinstance(value, float):
        return "integer" if value.is_integer() else "fraction"
    names = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _forbids_one(schema: dict[str, Any], names: list[str]) -> bool:
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    return is_closed and any(name not in _properties(schema) for name in names)


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _strings(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
