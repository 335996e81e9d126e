"""Rewrite a client's JSON schema for llguidance: declared keys only, in keywords that the library supports.

An object that declares keys (`properties`, `patternProperties`) has no others, unless the schema says so with
`additionalProperties` or `unevaluatedProperties`. Declarations of one value are joined over `allOf`, `$ref` and what
stands beside `anyOf` and `oneOf`; each of their cases is closed by itself. A schema without a type gets the type that
its keywords concern. The result allows nothing that the given schema does not allow.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import unquote

from funitel.proto.errors import InvalidRequest
from funitel.proto.grammar.exclusive_cases import ExclusiveCases, types_of
from funitel.proto.grammar.keywords import (
    DESCRIPTIONS,
    DROPPED,
    NOTHING,
    OBJECT_KEYWORDS,
    Declared,
    concerned,
    is_only_member,
    own,
)
from funitel.proto.printable import printable, shortened

# Formats of llguidance; an unknown format does not constrain the value, as in JSON Schema.
FORMATS: Final = frozenset(
    ("date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
MAX_STRING = 8192  # characters of a string, unless a schema states more
MAX_ENTRIES = 1024  # of an object or array, unless a schema states more
MAX_PARTS = 50_000
MAX_REFERENCES = 8  # chained, to the names of a map

UNSUPPORTED: Final = "the schema has keywords that cannot be kept: {}"

_VALUES = ("items", "additionalItems", "additionalProperties")
_VALUE_LISTS = ("prefixItems", "items")
_VALUE_MAPS = ("properties", "patternProperties")
_CASES = ("anyOf", "oneOf")


def rewritten(schema: Any) -> Any:
    """Return a schema for llguidance of what a client's schema allows, without keys that are not declared.

    Raises:
        InvalidRequest: the cases of a `oneOf` overlap, or references lead to too many definitions.
        RecursionError: the schema is nested too deeply.
    """
    return _Rewriting(schema).whole()


def mixes_keys(schema: Any) -> bool:
    """Whether a rewritten schema declares keys, and has objects with other keys."""
    parts = list(_parts(schema))
    has_others = any(part.get("additionalProperties", False) is not False for part in parts)
    return has_others and any(part.get("properties") or part.get("patternProperties") for part in parts)


@dataclass(frozen=True, slots=True)
class AnswerBounds:
    """The longest string, in characters, and the most entries of an object or array that an answer may have."""

    string: int = MAX_STRING
    entries: int = MAX_ENTRIES

    @classmethod
    def of(cls, schema: Any) -> "AnswerBounds":
        """The usual ones, or the largest that a schema states."""
        return cls(
            max(MAX_STRING, *_stated(schema, "minLength", "maxLength")),
            max(MAX_ENTRIES, *_stated(schema, "minItems", "maxItems", "minProperties", "maxProperties")),
        )


def _stated(schema: Any, *keywords: str) -> list[int]:
    values = (part.get(keyword) for part in _parts(schema) for keyword in keywords)
    return [0, *(value for value in values if isinstance(value, int))]


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """Every object within a JSON value, the value included."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _parts(inner)


@dataclass(frozen=True, slots=True)
class _Said:
    """What a schema declares: always, and in any of its cases."""

    always: Declared = NOTHING
    in_cases: Declared = NOTHING
    has_cases: bool = False

    def __or__(self, other: "_Said") -> "_Said":
        return _Said(self.always | other.always, self.in_cases | other.in_cases, self.has_cases or other.has_cases)

    @property
    def anywhere(self) -> Declared:
        return replace(self.always | self.in_cases, has_keys=self.always.has_keys)

    @property
    def to_others(self) -> Declared:
        """What it means for the schemas beside it: a case that is open opens no other."""
        return replace(self.anywhere, has_rest=self.always.has_rest)


@dataclass(slots=True)
class _Rewriting:
    """The rewriting of one schema; definitions are made as references to them are met."""

    root: Any
    _definitions: dict[str, Any] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)  # of definitions, by the id of the schema in the root
    _pending: list[Any] = field(default_factory=list)  # schemas that have a name, but no definition yet
    _open_values: set[int] = field(default_factory=set)  # ids of the schemas of values that are being rewritten
    _open_references: set[str] = field(default_factory=set)  # resolved for the value at hand
    _num_parts: int = 0
    _by_name: dict[str, Any] = field(default_factory=dict)  # subschemas by `$id`, and by `#` and `$anchor`
    _said_by: dict[str, _Said] = field(default_factory=dict)

    def whole(self) -> Any:
        """The root with the definitions that it needs."""
        for part in _parts(self.root):
            for key, mark in (("$id", ""), ("$anchor", "#")):
                if isinstance(part.get(key), str):
                    self._by_name.setdefault(mark + part[key], part)
        schema = self._value(self.root)
        while self._pending:
            target = self._pending.pop()
            self._definitions[self._names[id(target)]] = self._value(target)
        return schema | {"$defs": self._definitions} if self._definitions else schema

    def target(self, reference: str) -> Any:
        """The schema that a reference names; None where the root has none."""
        if reference in self._by_name:
            return self._by_name[reference]
        base, _, path = reference.partition("#")
        found = self._by_name.get(base) if base else self.root
        if path[:1] not in ("", "/"):
            return None
        for step in unquote(path).split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = found[int(step)] if step.isdecimal() and int(step) < len(found) else None
            else:
                found = found.get(step) if isinstance(found, dict) else None
        return found

    # What schemas declare

    def anywhere(self, schema: Any) -> Declared:
        """What a schema declares of one value, always or in any of its cases; closed only if all of them are."""
        return self._said(schema).anywhere

    def _said(self, schema: Any) -> _Said:
        if not isinstance(schema, dict):
            return _Said()
        total = _Said(own(schema))
        for key, value in schema.items():
            for said in self._said_in(key, value):
                total |= said
        return total

    def _said_in(self, key: str, value: Any) -> Iterator[_Said]:
        """What the schemas within a keyword say of the same value."""
        if key == "$ref" and isinstance(value, str):
            yield self._said_by_reference(value)
        elif key == "allOf" and isinstance(value, list):
            yield from map(self._said, value)
        elif key in _CASES and isinstance(value, list):
            yield from (_Said(in_cases=self.anywhere(case), has_cases=True) for case in value)

    def _said_by_reference(self, reference: str) -> _Said:
        if reference not in self._said_by:
            self._said_by[reference] = _Said()  # of a reference to itself
            self._said_by[reference] = self._said(self.target(reference))
        return self._said_by[reference]

    # How they are rewritten

    def _value(self, schema: Any) -> Any:
        """The schema of a value of its own, such as a property or an item."""
        if not isinstance(schema, dict):
            return schema
        if id(schema) in self._open_values:  # by way of references that were resolved
            return {"$ref": self._definition(schema, "value")}
        references, self._open_references = self._open_references, set()
        self._open_values.add(id(schema))
        result = self._part(schema, NOTHING, closes=True, is_alone=True)
        self._open_values.remove(id(schema))
        self._open_references = references
        return result

    def _part(self, schema: Any, beside: Declared, *, closes: bool, is_alone: bool) -> Any:
        """One of the schemas of a value; `beside` it, others declare more, or it `is_alone`.

        It `closes` the value if keys that none of them declares are to be forbidden here.
        """
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise _refused(f"the schema has more than {MAX_PARTS} parts when its references are resolved")
        if schema is True and closes and beside.is_closed:
            schema = {}
        if not isinstance(schema, dict):
            return schema
        if isinstance(schema.get("$ref"), str) and is_only_member(schema):
            return self._reference(schema["$ref"], beside, closes=closes, is_alone=is_alone)
        kept = {key: value for key, value in schema.items() if not _is_annotation(key, value)}
        kept = _with_reference_as_member(self._with_named_properties(kept))
        rest = kept.pop("unevaluatedProperties", True)
        if rest is True and "unevaluatedProperties" in schema:
            kept.setdefault("additionalProperties", True)
        if rest is not True and not self._said(kept).always.has_rest:
            beside, closes = Declared(has_keys=True, has_type=beside.has_type), True  # it sees nothing beside it
        return self._closed(kept, beside, closes=closes, is_alone=is_alone, rest=False if rest is True else rest)

    def _closed(
        self, schema: dict[str, Any], beside: Declared, *, closes: bool, is_alone: bool, rest: Any
    ) -> dict[str, Any]:
        said = self._said(schema)
        known = beside | said.always
        type_ = None if known.has_type or said.in_cases.has_type else concerned(schema, known)
        if type_ is not None:
            beside = replace(beside, has_type=True)
        if said.has_cases and rest is not False:
            raise _refused(UNSUPPORTED.format('"unevaluatedProperties"'))
        closes = closes and known.is_closed and not said.has_cases
        heir = self._heir(schema) if closes and rest is False else None
        result: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _CASES and isinstance(value, list):
                is_all = is_alone and not schema.keys() - {key} - DESCRIPTIONS - DROPPED
                _add_cases(result, self._cases(schema, key, beside, type_, is_alone=is_all))
            elif key == "allOf" and isinstance(value, list):
                only = is_alone and is_only_member(schema)
                members = [
                    self._part(member, joined, closes=heir == place, is_alone=only)
                    for place, (member, joined) in enumerate(self._members(schema, beside))
                ]
                result[key] = result.get(key, []) + members
            elif key not in DROPPED:
                result[key] = self._within(key, value)
        if type_ is not None:
            result["type"] = type_
        if closes and heir is None:
            _forbid_others(result, known, self._value(rest))
        return result

    def _within(self, key: str, value: Any) -> Any:
        """The value of a keyword that describes values within this one, or none."""
        if key in _VALUE_MAPS and isinstance(value, dict):
            return {name: self._value(part) for name, part in value.items()}
        if key in _VALUE_LISTS and isinstance(value, list):
            return [self._value(part) for part in value]
        return self._value(value) if key in _VALUES else value

    def _heir(self, schema: dict[str, Any]) -> int | None:
        """Which member of `allOf` alone declares keys, and so can forbid others in place of the schema itself."""
        members = schema.get("allOf")
        if not isinstance(members, list) or any(keyword in schema for keyword in OBJECT_KEYWORDS):
            return None
        declaring = [place for place, member in enumerate(members) if self._said(member).always.has_keys]
        found = [0] if len(members) == 1 else declaring
        return found[0] if len(found) == 1 else None

    def _members(self, schema: dict[str, Any], beside: Declared) -> Iterator[tuple[Any, Declared]]:
        """The members of `allOf`, each with what is declared beside it."""
        whole = self._beside(schema, beside, None)
        for place, member in enumerate(schema["allOf"]):
            has_cases = self._said(member).has_cases  # which are not to allow the keys of each other
            yield member, self._beside(schema, beside, "allOf", place) if has_cases else whole

    def _beside(self, schema: dict[str, Any], beside: Declared, key: str | None, place: int | None = None) -> Declared:
        """What is declared beside a member of `allOf`, the cases of a keyword, or nothing."""
        found = beside | own(schema)
        for other, value in schema.items():
            for index, said in enumerate(self._said_in(other, value)):
                if other != key or (place is not None and index != place):
                    found |= said.to_others
        return found if key in _CASES or is_only_member(schema) else replace(found, has_type=True)

    def _cases(
        self, schema: dict[str, Any], key: str, beside: Declared, type_: str | list[str] | None, *, is_alone: bool
    ) -> list[Any]:
        cases, beside = schema[key], self._beside(schema, beside, key)
        types = types_of(schema.get("type", type_))
        if key == "oneOf" and not ExclusiveCases(self, types, beside).holds(cases):
            raise _refused("the schema has `oneOf` with cases that overlap: use `anyOf`")
        return [self._part(case, beside, closes=True, is_alone=is_alone) for case in cases]

    def _reference(self, reference: str, beside: Declared, *, closes: bool, is_alone: bool) -> Any:
        """A reference to the definition of its target; what it refers to, where other schemas must be joined to it."""
        target = self.target(reference)
        if not isinstance(target, dict | bool):
            return {"$ref": reference}  # llguidance says what is wrong
        if is_alone and isinstance(target, dict):
            return {"$ref": "#" if target is self.root else self._definition(target, reference.rpartition("/")[2])}
        if reference in self._open_references:
            raise _refused(f"the schema has a reference that leads to itself: {shortened(printable(reference), 100)}")
        self._open_references.add(reference)
        part = self._part(target, beside, closes=closes, is_alone=is_alone)
        self._open_references.remove(reference)
        return part

    def _definition(self, target: dict[str, Any], word: str) -> str:
        """The reference to a definition of a schema within the root, as a value of its own."""
        if id(target) not in self._names:
            word = re.sub(r"[^0-9A-Za-z_.-]", "_", word)
            taken = self._names.values()
            self._names[id(target)] = f"{word}_{len(taken)}" if word in taken else word
            self._pending.append(target)
        return f"#/$defs/{self._names[id(target)]}"

    def _with_named_properties(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Rewrite `propertyNames` with a list or pattern, as pydantic writes it, to keywords of llguidance."""
        if "propertyNames" not in schema or {"properties", "patternProperties"} & schema.keys():
            return schema
        names = self._resolved(schema["propertyNames"])
        values = schema.get("additionalProperties", True)
        rest = {key: value for key, value in schema.items() if key not in ("propertyNames", "additionalProperties")}
        match {key: value for key, value in names.items() if key not in DESCRIPTIONS}:
            case {"const": str(name), **others} if not others.keys() - {"type"}:
                return rest | {"properties": {name: values}, "additionalProperties": False}
            case {"enum": list(listed), **others} if not others.keys() - {"type"}:
                named = {name: values for name in listed if isinstance(name, str)}
                return rest | {"properties": named, "additionalProperties": False}
            case {"pattern": str(pattern), **others} if not others.keys() - {"type"}:
                return rest | {"patternProperties": {pattern: values}, "additionalProperties": False}
            case {"type": "string", **others} if not others:
                return rest | {"additionalProperties": values}
        return schema

    def _resolved(self, schema: Any) -> dict[str, Any]:
        """The target of a schema that is only a reference; an empty schema if there is none."""
        for _ in range(MAX_REFERENCES):
            if not isinstance(schema, dict):
                return {}
            reference = schema.get("$ref")
            if not isinstance(reference, str) or schema.keys() - {"$ref"} - DESCRIPTIONS:
                return schema
            schema = self.target(reference)
        return {}


def _with_reference_as_member(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema with keywords beside its `$ref`, as one with an `allOf` in which the reference is alone."""
    if not isinstance(schema.get("$ref"), str) or is_only_member(schema):
        return schema
    members = schema.get("allOf")
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref":
            made["allOf"] = [*made.get("allOf", ()), {"$ref": value}]
        elif key == "allOf" and isinstance(members, list):
            made["allOf"] = [*made.get("allOf", ()), *members]
        else:
            made[key] = value
    return made


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"grammar is not valid: {reason}", "grammar")


def _add_cases(schema: dict[str, Any], cases: list[Any]) -> None:
    """Add alternatives, in `allOf` where there are others."""
    if "anyOf" in schema:
        schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": cases}]
    else:
        schema["anyOf"] = cases


def _forbid_others(schema: dict[str, Any], known: Declared, rest: Any) -> None:
    """Allow the known keys, and others by the schema `rest` only."""
    names, patterns = (schema.get(key, {}) for key in _VALUE_MAPS)
    if not (isinstance(names, dict) and isinstance(patterns, dict)):
        return  # llguidance says what is wrong
    most = schema.get("maxProperties")
    if rest is False and not known.patterns and isinstance(most, int) and most >= len(known.names):
        del schema["maxProperties"]  # which llguidance does not support beside keys that may be left out
    schema["properties"] = names | {name: True for name in known.names if name not in names}
    schema.pop("patternProperties", None)  # beside `additionalProperties` only does llguidance see both
    if known.patterns:
        schema["patternProperties"] = patterns | {
            pattern: True for pattern in known.patterns if pattern not in patterns
        }
    schema["additionalProperties"] = rest


_IS_TRIVIAL: dict[str, Callable[[Any], bool]] = {
    "x-guidance": lambda value: True,  # options of llguidance are not for clients
    "format": lambda value: isinstance(value, str) and value not in FORMATS,
    "uniqueItems": lambda value: value is False,
    "minProperties": lambda value: value == 0 and value is not False,
}


def _is_annotation(key: str, value: Any) -> bool:
    return key in _IS_TRIVIAL and _IS_TRIVIAL[key](value)
