"""Compare two OpenAPI documents: whether what was written for one server works with another.

A request that the old document allows must be allowed by the new one; an answer that the new document allows must be
one that a client of the old one can read. Every exception is listed under the place it was found at.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

Schema = Mapping[str, Any]
Direction = Literal["request", "answer"]
Found = dict[str, list[str]]

ANY = "any"
_INTEGER_FORMATS = {"int32": 2**31 - 1, "int64": 2**63 - 1}


@dataclass(frozen=True)
class Document:
    """An OpenAPI document, 3.0 or 3.1."""

    content: Mapping[str, Any]

    def alternatives(self, schema: Schema) -> list[dict[str, Any]]:
        """Every kind of value a schema allows, free of references and combinations, each with one `type`."""
        own = {
            key: value for key, value in schema.items() if key not in ("$ref", "oneOf", "anyOf", "allOf", "nullable")
        }
        groups = [[own]]
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            found = self.alternatives(self.content["components"]["schemas"][name])
            groups.append([{"x-name": name} | alternative for alternative in found])
        for key in ("oneOf", "anyOf"):
            if key in schema:
                groups.append([found for branch in schema[key] for found in self.alternatives(branch)])
        groups += [self.alternatives(part) for part in schema.get("allOf", [])]
        merged = [_typed(_merged(combination)) for combination in product(*groups)]
        return merged + ([{"type": "null"}] if schema.get("nullable") else [])


def _merged(parts: Iterable[Schema]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if key == "properties":
                whole[key] = whole.get(key, {}) | value
            elif key == "required":
                whole[key] = [*whole.get(key, []), *value]
            elif key == "type" and whole.get("type") == ANY or key not in whole or value != ANY:
                whole[key] = value
    return whole


def _typed(schema: dict[str, Any]) -> dict[str, Any]:
    if "const" in schema:
        schema = schema | {"enum": [schema["const"]]}
    if "type" not in schema:
        schema = schema | {"type": "string" if "enum" in schema else "object" if "properties" in schema else ANY}
    return schema


def differences(old: Mapping[str, Any], new: Mapping[str, Any], paths: Iterable[str]) -> Found:
    """Everything a client written for `old` would stumble over on these paths of `new`, by place."""
    comparison = _Comparison(Document(old), Document(new))
    for path in paths:
        for method, operation in old["paths"][path].items():
            comparison.operation(f"{method.upper()} {path}", operation, new["paths"].get(path, {}).get(method))
    return comparison.found


class _Comparison:
    def __init__(self, old: Document, new: Document) -> None:
        self.old, self.new = old, new
        self.found: Found = {}
        self._seen: set[tuple[str, str]] = set()

    def operation(self, where: str, old: Mapping[str, Any], new: Mapping[str, Any] | None) -> None:
        if new is None:
            self._note(where, "is no route")
            return
        if "requestBody" in old:
            pair = [side["requestBody"]["content"]["application/json"]["schema"] for side in (old, new)]
            self._note_all(self._compare("request", pair[0], pair[1], f"{where} body"))
        for status, response in old["responses"].items():
            if status not in new["responses"]:
                self._note(where, f"never answers {status}")
                continue
            contents = new["responses"][status].get("content", {})
            for media_type, content in response.get("content", {}).items():
                place = f"{where} {status} {media_type}"
                if media_type not in contents:
                    self._note(place, "is not sent")
                else:
                    self._note_all(self._compare("answer", content["schema"], contents[media_type]["schema"], place))

    def _note(self, where: str, what: str) -> None:
        self._note_all({where: [what]})

    def _note_all(self, found: Found) -> None:
        for where, notes in found.items():
            listed = self.found.setdefault(where, [])
            listed += [note for note in notes if note not in listed]

    def _compare(self, direction: Direction, old: Schema, new: Schema, where: str, depth: int = 0) -> Found:
        olds, news = self.old.alternatives(old), self.new.alternatives(new)
        if direction == "request":
            judged = [self._best(direction, [(one, other) for other in news], where, depth) for one in olds]
        else:
            judged = [self._best(direction, [(other, one) for other in olds], where, depth) for one in news]
        return _joined(judged)

    def _best(self, direction: Direction, pairs: list[tuple[Schema, Schema]], where: str, depth: int) -> Found:
        """What is wrong with the pair that fits best: one of the same name, if any, with the fewest problems."""
        fitting = [(old, new) for old, new in pairs if _is_kind(direction, old, new)]
        if not fitting:
            return {where: [f"{_kinds(new for _, new in pairs)} instead of {_kinds(old for old, _ in pairs)}"]}
        named = [(old, new) for old, new in fitting if "x-name" in old and old["x-name"] == new.get("x-name")]
        judged = [self._pair(direction, old, new, where, depth) for old, new in named or fitting]
        return min(judged, key=lambda found: sum(map(len, found.values())))

    def _pair(self, direction: Direction, old: Schema, new: Schema, where: str, depth: int) -> Found:
        where = old.get("x-name", where)
        found = _bounds(old, new, where) if direction == "request" else {}
        if ANY in (old["type"], new["type"]) or depth > 12:
            return found
        if old["type"] == "array":
            items = self._compare(direction, old.get("items", {}), new.get("items", {}), f"{where}[]", depth + 1)
            found = _joined([found, items])
        if old["type"] == "object":
            found = _joined([found, self._objects(direction, old, new, where, depth)])
        return found

    def _objects(self, direction: Direction, old: Schema, new: Schema, where: str, depth: int) -> Found:
        judged: list[Found] = []
        properties = new.get("properties", {})
        for name, schema in old.get("properties", {}).items():
            place = f"{where}.{name}"
            if name not in properties:
                judged.append({place: ["is missing"]})
            else:
                judged.append(self._compare(direction, schema, properties[name], place, depth + 1))
        firsts, others = (new, old) if direction == "request" else (old, new)
        for name in set(firsts.get("required", [])) - set(others.get("required", [])):
            judged.append({f"{where}.{name}": ["is required" if direction == "request" else "may be absent"]})
        return _joined(judged)


def _joined(parts: Iterable[Found]) -> Found:
    whole: Found = {}
    for part in parts:
        for where, notes in part.items():
            whole.setdefault(where, []).extend(notes)
    return whole


def _is_kind(direction: Direction, old: Schema, new: Schema) -> bool:
    """Whether values of the narrower side are of the wider side's type and among its values."""
    wide, narrow = (new, old) if direction == "request" else (old, new)
    if wide["type"] not in (narrow["type"], ANY) and (wide["type"], narrow["type"]) != ("number", "integer"):
        return False
    return "enum" not in wide or set(narrow.get("enum", [ANY])) <= set(wide["enum"])


def _kinds(schemas: Iterable[Schema]) -> str:
    return " or ".join(sorted({str(schema.get("enum", schema["type"])) for schema in schemas}))


def _bounds(old: Schema, new: Schema, where: str) -> Found:
    notes = []
    if _lower(new) > _lower(old):
        notes.append(f"must be above {_lower(new)[0]:g}" if _lower(new)[1] else f"must be at least {_lower(new)[0]:g}")
    if _upper(new) < _upper(old):
        notes.append(f"must be below {_upper(new)[0]:g}" if _upper(new)[1] else f"must be at most {_upper(new)[0]:g}")
    if new.get("minItems", 0) > old.get("minItems", 0):
        notes.append(f"must have at least {new['minItems']} items")
    if new.get("maxItems", math.inf) < old.get("maxItems", math.inf):
        notes.append(f"must have at most {new['maxItems']} items")
    return {where: notes} if notes else {}


def _lower(schema: Schema) -> tuple[float, int]:
    """Least value, and 1 if it is excluded itself."""
    least = [(float(schema[key]), code) for key, code in (("minimum", 0), ("exclusiveMinimum", 1)) if key in schema]
    if schema.get("type") == "number" and least and least[0][0] < -1e38:
        return (-math.inf, 0)  # single precision's own bound
    return max(least, default=(-math.inf, 0))


def _upper(schema: Schema) -> tuple[float, int]:
    """Greatest value, and -1 if it is excluded itself."""
    most = [(float(schema[key]), code) for key, code in (("maximum", 0), ("exclusiveMaximum", -1)) if key in schema]
    if schema.get("type") == "integer" and not most and schema.get("format") in _INTEGER_FORMATS:
        return (float(_INTEGER_FORMATS[schema["format"]]), 0)
    if schema.get("type") == "number" and most and most[0][0] > 1e38:
        return (math.inf, 0)
    return min(most, default=(math.inf, 0))
