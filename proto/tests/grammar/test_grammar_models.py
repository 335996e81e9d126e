"""JSON schemas as pydantic writes them: whatever a random model writes by them validates, and most can be kept."""

import datetime
import enum
import ipaddress
import json
import random
import uuid
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel, ConfigDict, Field, RootModel

from funitel.proto.errors import InvalidRequest
from funitel.proto.grammar.compiler import compile_grammar
from funitel.proto.step import GrammarType
from funitel_testing.random_writer import EOS_ID, written
from funitel_testing.tiny import byte_tokenizer

WALKS = 6


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Node(BaseModel):
    """Recursive."""

    value: int
    children: list["Node"] = []
    left: "Node | None" = None


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str = Field(pattern=r"^[A-Z][a-z]{1,6}$")


class Unions(BaseModel):
    tagged: Annotated[Cat | Dog, Field(discriminator="kind")]
    plain: Cat | Dog | None
    scalar: int | str | bool | None
    several: list[Cat] | dict[str, int]


class Bounds(BaseModel):
    share: float = Field(gt=0, lt=1)
    fives: int = Field(gt=0, lt=100, multiple_of=5)
    some: list[bool] = Field(min_length=1, max_length=3)
    pair: tuple[int, bool]
    word: str = Field(min_length=2, max_length=5)


class Annotations(BaseModel):
    """What describes without restricting."""

    model_config = ConfigDict(
        title="A title", json_schema_extra={"examples": [{"x": 1}], "$comment": "hi", "x-custom": [1]}
    )
    x: int = Field(3, title="X", description="d", examples=[1], deprecated=True, json_schema_extra={"readOnly": True})
    y: int = Field(json_schema_extra={"format": "int64", "example": 1})


class Formats(BaseModel):
    day: datetime.date
    instant: datetime.datetime
    id: uuid.UUID
    address: ipaddress.IPv4Address


class Enums(BaseModel):
    model_config = ConfigDict(extra="forbid")
    color: Color
    mixed: Literal["a", 1, None, True]
    only: Literal["only"] = "only"


class Maps(BaseModel):
    by_word: dict[str, int]
    by_color: dict[Color, int]
    by_literal: dict[Literal["a", "b"], list[Cat]]
    by_one: dict[Literal["a"], int]


class Numbers(RootModel[list[int]]):
    pass


MODELS: list[type[BaseModel]] = [Node, Unions, Bounds, Annotations, Formats, Enums, Maps, Numbers]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    byte_tokenizer().save(str(path))
    return LLTokenizer(str(path), eos_token=EOS_ID)


def kept(schema: Any, tokenizer: LLTokenizer) -> LLMatcher:
    return compile_grammar(GrammarType.JSON, json.dumps(schema), tokenizer)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_what_follows_a_models_schema_validates(model: type[BaseModel], tokenizer: LLTokenizer) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    schema = model.model_json_schema()
    grammar = kept(schema, tokenizer)
    texts = [
        text
        for seed in range(WALKS)
        if (text := written(grammar, random.Random(seed), max_tokens=300, closing='}"]0123456789e,:', share=0.8))
        is not None
    ]
    assert len(texts) > WALKS // 2, "hardly any comes to an end"
    for text in texts:
        jsonschema.validate(json.loads(text), schema, format_checker=checker)
        if model is not Formats:  # pydantic has bounds there that its schema does not tell
            model.model_validate_json(text)


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"propertyNames": {"type": "string"}, "additionalProperties": {"type": "null"}}, '{"x":null}', '{"x":1'),
        ({"propertyNames": {"enum": ["a", 1]}}, '{"a":1}', '{"b'),
        (
            {"propertyNames": {"const": "a", "title": "A"}, "additionalProperties": {"type": "null"}},
            '{"a":null}',
            '{"a":1',
        ),
        ({"propertyNames": {"$ref": "#/$defs/a~1b"}, "$defs": {"a/b": {"pattern": "^x"}}}, '{"xy":1}', '{"yx'),
        ({"properties": {"a": {"type": "null"}}, "unevaluatedProperties": False}, '{"a":null}', '{"b'),
        ({"unevaluatedProperties": {"type": "null"}}, '{"b":null}', '{"b":1'),
    ],
    ids=range(6),
)
def test_the_same_in_words_the_engine_knows(schema: Any, allowed: str, refused: str, tokenizer: LLTokenizer) -> None:
    grammar = kept({"type": "object"} | schema, tokenizer)
    encode = byte_tokenizer().encode
    follows = grammar.deep_copy()
    assert follows.consume_tokens(encode(allowed).ids)
    assert follows.is_accepting()
    ids = encode(refused).ids
    assert grammar.deep_copy().try_consume_tokens(ids) < len(ids)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
    ({"not": {"type": "null"}}, "not"),
    ({"if": {"type": "null"}, "then": {}, "else": {}}, "if"),
    ({"type": "array", "contains": {"type": "null"}}, "contains"),
    ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
    (
        {"type": "object", "propertyNames": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
        "propertyNames",
    ),
    ({"type": "object", "properties": {"a": {}}, "propertyNames": {"enum": ["a"]}}, "propertyNames"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "anyOf": [{"properties": {"a": {}}}], "unevaluatedProperties": {}}, "unevaluatedProperties"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
]


@pytest.mark.parametrize(("schema", "keyword"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_kept_is_refused_by_name(schema: Any, keyword: str, tokenizer: LLTokenizer) -> None:
    with pytest.raises(InvalidRequest, match=keyword) as caught:
        kept(schema, tokenizer)
    assert "\n" not in caught.value.message
