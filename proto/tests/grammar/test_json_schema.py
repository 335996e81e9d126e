"""Answers by a schema have the keys that it declares, each once and in its order, and others only where it says so."""

import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from funitel.proto.errors import InvalidRequest
from funitel.proto.grammar.compiler import compile_grammar
from funitel.proto.step import GrammarType
from funitel_testing.random_writer import EOS_ID, TOKENIZER, written

NUM_SCHEMAS = 120
WALKS = 4
INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
CITY = {"type": "object", "properties": {"city": TEXT, "size": INTEGER}, "required": ["city"]}
TREE = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"of": INTEGER, "under": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
            "required": ["of"],
        }
    },
    "$ref": "#/$defs/tree",
}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": INTEGER}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"const": "dog"}, "name": TEXT}, "required": ["kind"]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    TOKENIZER.save(str(path))
    return LLTokenizer(str(path), eos_token=EOS_ID)


def kept(schema: Any, tokenizer: LLTokenizer) -> LLMatcher:
    return compile_grammar(GrammarType.JSON, json.dumps(schema), tokenizer)


def is_allowed(grammar: LLMatcher, text: str) -> bool:
    trial, ids = grammar.deep_copy(), TOKENIZER.encode(text).ids
    return trial.try_consume_tokens(ids) == len(ids) and trial.is_accepting()


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        (CITY, ['{"city":"a"}', '{"city":"a","size":1}'], ['{"city":"a","x":1}', '{"size":1,"city":"a"}', "{}", "1"]),
        ({"properties": {"a": INTEGER}}, ['{"a":1}', "{}"], ['{"b":1}', '{"a":1,"a":1}', "1", "null"]),
        ({"properties": {}}, ["{}"], ['{"a":1}']),
        ({"type": "object"}, ["{}", '{"a":{"b":[1]}}'], ["1"]),
        ({"type": "object", "required": ["a"]}, ['{"a":1}', '{"a":1,"b":2}'], ["{}", '{"a":1,"a":2}']),
        ({"properties": {"a": INTEGER}, "required": ["z"]}, ['{"a":1,"z":null}'], ['{"a":1}', '{"z":1,"y":1}']),
        (CITY | {"additionalProperties": INTEGER}, ['{"city":"","x":1}'], ['{"city":"","x":""}', '{"x":1,"city":""}']),
        (
            CITY | {"additionalProperties": True},
            ['{"city":"","x":{"y":1}}'],
            ['{"city":"","city":1}', '{"city":"","\\u0063ity":1}', '{"city":"","size":"x"}'],
        ),
        (CITY | {"unevaluatedProperties": True}, ['{"city":"","x":1}'], ['{"city":"","city":1}']),
        ({"items": CITY}, ['[{"city":""}]', "[]"], ['[{"city":"","x":1}]', "{}"]),
        ({"properties": {"a": CITY}}, ['{"a":{"city":""}}'], ['{"a":{"city":"","x":1}}']),
        (TREE, ['{"of":1,"under":[{"of":2,"under":[]}]}'], ['{"of":1,"under":[{"of":2,"x":1}]}', '{"of":1,"x":2}']),
        (
            {"properties": {"v": INTEGER, "next": {"$ref": "#"}}},
            ['{"v":1,"next":{"v":2}}'],
            ['{"v":1,"next":{"x":2}}'],
        ),
        ({"patternProperties": {"^a": INTEGER}}, ['{"a1":1,"a2":2}', "{}"], ['{"b":1}', '{"a":""}']),
        (
            CITY | {"patternProperties": {"^x_": INTEGER}, "additionalProperties": {"type": "null"}},
            ['{"city":"","x_1":1,"y":null}'],
            ['{"city":"","x_1":null}', '{"city":"","x_1":1,"city":null}'],
        ),
        (
            {"allOf": [CITY, {"properties": {"b": INTEGER}, "required": ["b"]}]},
            ['{"city":"","b":1}'],
            ['{"city":""}', '{"city":"","b":1,"x":1}', '{"b":1,"city":""}'],
        ),
        (
            {"$defs": {"c": CITY}, "$ref": "#/$defs/c", "properties": {"b": INTEGER}, "required": ["b"]},
            ['{"city":"","size":1,"b":1}'],
            ['{"city":""}', '{"city":"","b":1,"x":1}'],
        ),
        (
            {"$defs": {"c": CITY}, "properties": {"a": {"description": "d", "allOf": [{"$ref": "#/$defs/c"}]}}},
            ['{"a":{"city":""}}'],
            ['{"a":{"city":"","x":1}}'],
        ),
        (
            {"anyOf": [CITY, {"properties": {"b": INTEGER}}, {"type": "null"}]},
            ['{"city":""}', '{"b":1}', "null"],
            ['{"city":"","b":1}', '{"x":1}', "1"],
        ),
        (
            {"properties": {"a": INTEGER, "b": INTEGER}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
            ['{"a":1}', '{"b":1}', '{"a":1,"b":2}'],
            ["{}", '{"a":1,"x":1}', "1"],
        ),
        (
            {"properties": {"id": INTEGER}, "oneOf": [CAT, DOG], "required": ["id"]},
            ['{"id":1,"kind":"cat","lives":9}', '{"id":1,"kind":"dog"}'],
            ['{"id":1}', '{"id":1,"kind":"dog","lives":9}', '{"id":1,"kind":"cat","x":1}'],
        ),
        (
            {
                "$defs": {"cat": CAT, "dog": DOG},
                "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
                "discriminator": {"propertyName": "kind"},
            },
            ['{"kind":"cat","lives":9}', '{"kind":"dog","name":""}'],
            ['{"kind":"cat","name":""}', '{"kind":"eel"}'],
        ),
        (
            {"oneOf": [{"type": "object", "properties": {x: INTEGER}, "required": [x]} for x in "ab"]},
            ['{"a":1}', '{"b":1}'],
            ['{"a":1,"b":1}', "{}"],
        ),
        (
            {
                "allOf": [
                    {"anyOf": [CAT, DOG]},
                    {"anyOf": [{"properties": {"x": INTEGER}}, {"properties": {"y": TEXT}}]},
                ]
            },
            ['{"kind":"cat","lives":1,"x":1}', '{"kind":"dog","y":""}'],
            ['{"kind":"cat","name":"","x":1}', '{"kind":"cat","x":1,"y":""}', '{"kind":"cat","z":1}'],
        ),
        (
            {"type": "object", "allOf": [CITY, {"properties": {"b": INTEGER}}], "unevaluatedProperties": False},
            ['{"city":"","b":1}'],
            ['{"city":"","x":1}'],
        ),
        (
            {"type": "object", "allOf": [CITY], "unevaluatedProperties": INTEGER},
            ['{"city":"","x":1}'],
            ['{"city":"","x":""}', '{"city":"","city":1}'],
        ),
        ({"type": ["object", "null"], "properties": {"a": INTEGER}}, ["null", '{"a":1}'], ['{"b":1}']),
        ({"properties": {"a": INTEGER, "b": INTEGER}, "minProperties": 1, "maxProperties": 2}, ['{"b":1}'], ["{}"]),
        ({"properties": {"a": INTEGER}, "required": ["a"], "minProperties": 2}, ['{"a":1,"x":1}'], ['{"a":1}']),
        (
            {"oneOf": [CAT | {"additionalProperties": False}, {"properties": {"b": TEXT}, "required": ["b"]}]},
            ['{"kind":"cat"}', '{"b":""}'],
            ['{"kind":"cat","b":""}', "{}"],
        ),
        ({"items": INTEGER, "maxItems": 2}, ["[1,2]"], ["[1,2,3]", "1"]),
        ({"pattern": "^a+$"}, ['"aa"'], ['"b"', "1"]),
        ({"minimum": 3}, ["3"], ["2", '"a"']),
        ({"const": {"a": 1, "b": 2}}, ['{"a":1,"b":2}'], ['{"a":1}', '{"a":1,"b":2,"c":3}']),
        (
            {"$id": "https://example.com/s", "$defs": {"c": CITY | {"$anchor": "here"}}, "items": {"$ref": "#here"}},
            ['[{"city":""}]'],
            ['[{"city":"","x":1}]'],
        ),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"a/b": CITY}}
            | {"properties": {"c": {"$ref": "#/definitions/a~1b"}}},
            ['{"c":{"city":""}}'],
            ['{"c":{"city":"","x":1}}'],
        ),
        ({"properties": {"a": INTEGER, "b": {"$ref": "#/properties/a"}}}, ['{"a":1,"b":2}'], ['{"b":""}']),
        ({"properties": {"a": True, "b": False}}, ['{"a":[{"x":1}]}'], ['{"b":1}', '{"a":1,"c":1}']),
        ({"properties": {"$ref": TEXT, "required": INTEGER}}, ['{"$ref":"","required":1}'], ['{"a":1}']),
    ],
    ids=range(39),
)
def test_b4_keys_are_those_declared(
    schema: Any, allowed: list[str], refused: list[str], tokenizer: LLTokenizer
) -> None:
    grammar = kept(schema, tokenizer)
    assert [text for text in allowed if not is_allowed(grammar, text)] == []
    assert [text for text in refused if is_allowed(grammar, text)] == []
    for text in allowed:
        jsonschema.validate(json.loads(text), schema)


# Schemas and answers at random


class Drawn:
    """A random schema with definitions, some of them recursive."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.definitions = {f"d{place}": self.object(1) for place in range(3)}
        self.schema = self.value(3) | {"$defs": self.definitions}

    def value(self, depth: int) -> dict[str, Any]:
        kinds = [self.scalar, self.reference]
        if depth:
            kinds += [self.object, self.object, self.array, self.any_of, self.all_of, self.one_of]
        made: dict[str, Any] = self.draw.choice(kinds)(depth - 1)
        return made

    def scalar(self, depth: int) -> dict[str, Any]:
        return dict(
            self.draw.choice(
                [INTEGER, TEXT, {"type": "boolean"}, {"enum": ["a", 1, None]}, {"minimum": 5}, {"pattern": "^[ab]+$"}]
            )
        )

    def reference(self, depth: int) -> dict[str, Any]:
        return {"$ref": f"#/$defs/d{self.draw.randrange(3)}"}

    def array(self, depth: int) -> dict[str, Any]:
        return {"type": "array", "items": self.value(depth), "maxItems": 2}

    def object(self, depth: int, names: str = "abcd") -> dict[str, Any]:
        """An object; references in it are to values that it may leave out, so that there is an end."""
        chosen = self.draw.sample(names, self.draw.randint(1, len(names)))
        values = {name: self.value(depth) if depth > 0 else self.scalar(0) for name in chosen}
        made: dict[str, Any] = {"properties": values}
        made["required"] = [name for name in chosen if "$ref" not in values[name] and self.draw.random() < 0.4]
        if self.draw.random() < 0.7:
            made["type"] = "object"
        if self.draw.random() < 0.2:
            made["additionalProperties"] = self.draw.choice([True, False, INTEGER])
        if self.draw.random() < 0.2:
            made["patternProperties"] = {"^x": INTEGER}
        items = list(made.items())
        self.draw.shuffle(items)
        return dict(items)

    def any_of(self, depth: int) -> dict[str, Any]:
        cases = [self.draw.choice([self.object, self.reference, self.all_of])(depth) for _ in range(2)]
        beside = self.object(depth, "ef") if self.draw.random() < 0.4 else {}
        return beside | {"anyOf": [*cases, {"required": ["a"], "properties": {}}]}

    def all_of(self, depth: int) -> dict[str, Any]:
        members = [self.object(depth, "ab"), self.draw.choice([self.object(depth, "cd"), self.reference(0)])]
        return self.draw.choice([{}, {"properties": {"f": INTEGER}}]) | {"allOf": members}

    def one_of(self, depth: int) -> dict[str, Any]:
        if self.draw.random() < 0.3:  # most of these overlap
            return {"oneOf": [self.value(depth) for _ in range(2)]}
        cases = [self.object(depth) for _ in range(2)]
        for case, word in zip(cases, ("k", "l"), strict=True):
            case["properties"]["k"] = {"const": word}
            case["required"].append("k")
        return {"oneOf": cases}


def closed(schema: Any, root: Any, *, is_value: bool = True) -> Any:
    """The same with JSON Schema's own word for it: `unevaluatedProperties`, where nothing is said of other keys."""
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for key in ("properties", "patternProperties"):
        if key in made:
            made[key] = {name: closed(value, root) for name, value in made[key].items()}
    for key in ("items", "additionalProperties"):
        if key in made:
            made[key] = closed(made[key], root)
    for key in ("allOf", "anyOf", "oneOf", "$defs"):
        if isinstance(made.get(key), list):
            made[key] = [closed(part, root, is_value=False) for part in made[key]]
    if "$defs" in made:
        made["$defs"] = {name: closed(part, root, is_value=False) for name, part in made["$defs"].items()}
    if is_value and not is_open(schema, root):
        made |= {"unevaluatedProperties": False, "patternProperties": made.get("patternProperties", {})}
        made["properties"] = {name: True for name in required(schema, root)} | made.get("properties", {})
    return made


def is_open(schema: Any, root: Any) -> bool:
    return "additionalProperties" in schema or any(is_open(part, root) for part in members(schema, root))


def required(schema: Any, root: Any) -> list[str]:
    """The keys that must be there, in any case."""
    parts = [*members(schema, root), *schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return [*schema.get("required", ()), *(name for part in parts for name in required(part, root))]


def members(schema: Any, root: Any) -> list[Any]:
    target = [root["$defs"][schema["$ref"].rpartition("/")[2]]] if "$ref" in schema else []
    return [*schema.get("allOf", ()), *target]


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    declared = [key for key, _ in pairs if key in list("abcdefk")]
    assert len(set(declared)) == len(declared), f"repeated: {declared}"
    return dict(pairs)


def test_b4_what_follows_a_random_schema_validates_and_has_no_other_keys(tokenizer: LLTokenizer) -> None:
    num_kept = num_whole = 0
    for seed in range(NUM_SCHEMAS):
        schema = Drawn(seed).schema
        try:
            grammar = kept(schema, tokenizer)
        except InvalidRequest:  # contradictory, `oneOf` that overlaps, or recursion with keywords beside it
            continue
        num_kept += 1
        strict = jsonschema.Draft202012Validator(closed(schema, schema))
        for walk in range(WALKS):
            text = written(grammar, random.Random(walk))
            num_whole += text is not None
            if text is not None:
                answer = json.loads(text, object_pairs_hook=unique)
                jsonschema.validate(answer, schema)
                assert strict.is_valid(answer), (json.dumps(schema), text)
    assert num_kept > 0.5 * NUM_SCHEMAS
    assert num_whole > 0.7 * WALKS * num_kept


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"oneOf": [CITY, {"type": "object", "properties": {"b": INTEGER}}]}, "`oneOf` with cases that overlap"),
        ({"oneOf": [True, True]}, "`oneOf` with cases that overlap"),
        (
            {"oneOf": [{"anyOf": [{"properties": {"a": TEXT}}, {"type": "object"}]}, {"required": ["b"]}]},
            "`oneOf` with cases that overlap",
        ),
        ({"oneOf": [CITY | {"additionalProperties": True}, DOG]}, "`oneOf` with cases that overlap"),
        ({"oneOf": [{"minimum": 3}, {"type": "string"}]}, "`oneOf` with cases that overlap"),
        ({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, CITY]}}, "$ref": "#/$defs/a"}, "leads to itself: #/$defs/a"),
        ({"properties": {"a": {"$ref": "#/$defs/no"}}}, "does not exist"),
        ({"properties": []}, "properties must be an object"),
        (
            {"$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n - 1}"}] * 3} for n in range(1, 20)} | {"d0": CITY}}
            | {"$ref": "#/$defs/d19"},
            "has more than 50000 parts",
        ),
    ],
    ids=range(9),
)
def test_b4_what_cannot_be_kept_is_refused(schema: Any, reason: str, tokenizer: LLTokenizer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        kept(schema, tokenizer)
    assert reason in caught.value.message
    assert "\n" not in caught.value.message
